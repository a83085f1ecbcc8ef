"""Differentiable messages: two derivatives, against one process that has all tensors."""

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm import autograd as messages
from allstep.errors import CollectiveTimeoutError, PeerLostError, UsageError
from tests.helpers.ranks import run_ranks

SIZES = (1, 2, 3, 4)
ROOT = {1: 0, 2: 1, 3: 1, 4: 2}


def values(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss_of(rank: int, ys: tuple[Tensor, ...]) -> Tensor:
    """Not symmetric in ranks or positions, and not linear."""
    total = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(ys):
        total = total + (y**3).sum() * (1 + rank) + (y.flatten() ** 2).cumsum(0).sum() / (2 + i)
    return total


def derivatives(loss: Tensor, xs: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradient, and the gradient of its squared norm; zeros where nothing depends on one."""
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    norm = sum((g**2).sum() for g in first)
    return [*(g.detach() for g in first), *torch.autograd.grad(norm, xs, materialize_grads=True)]


# Name -> what a rank calls; what one process would, which has all ranks' inputs. Each rank has
# `size` inputs of different shapes for what is sent to each; equal shapes where they're reduced.
SYMMETRIC = {
    "all_gather": (
        lambda comm, xs: messages.all_gather(comm, xs[comm.rank]),
        lambda n, r, all_xs: tuple(all_xs[s][s] for s in range(n)),
    ),
    "all_to_all": (
        lambda comm, xs: messages.all_to_all(comm, xs),
        lambda n, r, all_xs: tuple(all_xs[s][r] for s in range(n)),
    ),
    "all_reduce sum": (
        lambda comm, xs: (messages.all_reduce(comm, xs[-1]),),
        lambda n, r, all_xs: (sum(all_xs[s][-1] for s in range(n)),),
    ),
    "all_reduce mean": (
        lambda comm, xs: (messages.all_reduce(comm, xs[-1], "mean"),),
        lambda n, r, all_xs: (sum(all_xs[s][-1] for s in range(n)) / n,),
    ),
    "all_reduce max": (
        lambda comm, xs: (messages.all_reduce(comm, xs[-1], "max"),),
        lambda n, r, all_xs: (torch.stack([all_xs[s][-1] for s in range(n)]).amax(0),),
    ),
    "all_reduce min": (
        lambda comm, xs: (messages.all_reduce(comm, xs[-1], "min"),),
        lambda n, r, all_xs: (torch.stack([all_xs[s][-1] for s in range(n)]).amin(0),),
    ),
    "reduce_scatter": (
        lambda comm, xs: (messages.reduce_scatter(comm, xs),),
        lambda n, r, all_xs: (sum(all_xs[s][r] for s in range(n)),),
    ),
    "reduce_scatter mean of a whole tensor": (
        lambda comm, xs: (messages.reduce_scatter(comm, torch.cat([xs[-1]] * comm.size), "mean"),),
        lambda n, r, all_xs: (sum(all_xs[s][-1] for s in range(n)) / n,),
    ),
}


def inputs(n: int, rank: int) -> tuple[Tensor, ...]:
    return tuple(values(rank * n + i, i + 2, 3).requires_grad_() for i in range(n))


def assert_derivatives(n, call, oracle):
    """Every rank's outputs and derivatives are those of one process with all ranks' inputs."""

    def work(comm):
        xs = inputs(n, comm.rank)
        ys = call(comm, xs)
        return [y.detach() for y in ys], derivatives(loss_of(comm.rank, ys), xs)

    all_xs = [inputs(n, rank) for rank in range(n)]
    all_ys = [oracle(n, rank, all_xs) for rank in range(n)]
    loss = sum(loss_of(rank, ys) for rank, ys in enumerate(all_ys))
    expected = derivatives(loss, tuple(x for xs in all_xs for x in xs))
    for rank, (ys, got) in enumerate(run_ranks(n, work)):
        torch.testing.assert_close(ys, [y.detach() for y in all_ys[rank]], rtol=0, atol=1e-14)
        own = [*expected[rank * n : rank * n + n], *expected[n * n + rank * n :][:n]]
        torch.testing.assert_close(got, own, rtol=1e-12, atol=1e-12)
    return expected


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", SYMMETRIC)
def test_derivatives_of_symmetric_calls(name, n):
    expected = assert_derivatives(n, *SYMMETRIC[name])
    assert all(g.abs().max() > 1e-3 for g in (expected[-1], expected[n * n - 1]))


# Here the ranks that only take pass a delegate of their own, so that they come back twice.
def phi() -> Tensor:
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def derivatives_with(loss: Tensor, xs: tuple[Tensor, ...], delegate: Tensor) -> list[Tensor]:
    """As `derivatives`, where the backward of a delegate takes part."""
    *first, zero = torch.autograd.grad(
        loss, (*xs, delegate), create_graph=True, materialize_grads=True
    )
    norm = sum((g**2).sum() for g in first) + zero
    *second, _ = torch.autograd.grad(norm, (*xs, delegate), materialize_grads=True)
    assert zero == 0
    return [*(g.detach() for g in first), *second]


def broadcast(comm, xs, root, delegate):
    return (
        messages.broadcast(comm, xs[0] if comm.rank == root else None, root, delegate=delegate),
    )


def scatter(comm, xs, root, delegate):
    return (messages.scatter(comm, xs if comm.rank == root else None, root, delegate=delegate),)


def gather(comm, xs, root, delegate):
    ys = messages.gather(comm, xs[comm.rank], root, delegate=delegate)
    return ys if comm.rank == root else (ys,)


def ring(comm, xs, root, delegate):
    """Rank r gives to r + 1; the even ranks first, so that nobody waits forever."""
    if comm.size == 1:
        return (messages.pseudo_connect(delegate, xs[0]),)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2 == 0:
        sent = messages.send(comm, xs[0], after, delegate=delegate)
        got = messages.recv(comm, before, delegate=sent)
    else:
        got = messages.recv(comm, before, delegate=delegate)
        sent = messages.send(comm, xs[0], after)
    return (messages.pseudo_connect(sent, got),)


ROOTED = {
    "broadcast": (broadcast, lambda n, r, root, xs: (xs[root][0],)),
    "scatter": (scatter, lambda n, r, root, xs: (xs[root][r],)),
    "gather": (
        gather,
        lambda n, r, root, xs: (
            tuple(xs[s][s] for s in range(n)) if r == root else (torch.zeros(()).double(),)
        ),
    ),
    "send and recv": (ring, lambda n, r, root, xs: (xs[r - 1][0],)),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ROOTED)
def test_derivatives_of_calls_with_a_root(name, n):
    call, oracle = ROOTED[name]
    root = ROOT[n]

    def work(comm):
        xs, delegate = inputs(n, comm.rank), phi()
        ys = call(comm, xs, root, delegate)
        return [y.detach() for y in ys], derivatives_with(loss_of(comm.rank, ys), xs, delegate)

    all_xs = [inputs(n, rank) for rank in range(n)]
    all_ys = [oracle(n, rank, root, all_xs) for rank in range(n)]
    loss = sum(loss_of(rank, ys) for rank, ys in enumerate(all_ys))
    expected = derivatives(loss, tuple(x for xs in all_xs for x in xs))
    for rank, (ys, got) in enumerate(run_ranks(n, work)):
        torch.testing.assert_close(ys, [y.detach() for y in all_ys[rank]])
        own = [*expected[rank * n : rank * n + n], *expected[n * n + rank * n :][:n]]
        torch.testing.assert_close(got, own, rtol=1e-12, atol=1e-12)


def test_send_recv_of_tuples_with_integers():
    def work(comm):
        if comm.rank == 0:
            x, mask = values(0, 3).requires_grad_(), torch.tensor([1, 0, 1])
            unused = values(1, 2).requires_grad_()
            messages.send(comm, (x, mask, unused), 1, tag=5).backward()
            return x.grad, mask.requires_grad, unused.grad
        x, mask, unused = messages.recv(comm, 0, tag=5)
        (x * mask).sum().backward()
        return x.requires_grad, mask.dtype, unused.shape

    sent, received = run_ranks(2, work)
    assert sent[0].tolist() == [1, 0, 1] and sent[1] is False and sent[2].tolist() == [0, 0]
    assert received == (True, torch.int64, (2,))


def test_send_of_integers_has_no_backward_message():
    def work(comm):
        if comm.rank == 0:
            messages.send(comm, torch.tensor([1, 2]), 1).backward()
            return None
        return messages.recv(comm, 0)

    received = run_ranks(2, work)[1]
    assert received.tolist() == [1, 2] and not received.requires_grad


def test_received_tensors_can_be_changed_in_place():
    def work(comm):
        if comm.rank == 0:
            x = torch.tensor([-1.0, 2.0], requires_grad=True)
            messages.send(comm, (x, x), 1).backward()
            return x.grad.tolist()
        a, b = messages.recv(comm, 0)
        (torch.relu_(a) + torch.relu_(b) * 2).sum().backward()
        return None

    assert run_ranks(2, work)[0] == [0, 3]


def test_no_grad_makes_no_graph():
    @torch.no_grad()
    def work(comm):
        x = torch.ones(2, requires_grad=True)
        results = [
            messages.all_reduce(comm, x),
            messages.broadcast(comm, x),
            messages.gather(comm, x),
        ]
        if comm.rank == 0:
            results.append(messages.send(comm, x, 1))
        else:
            results.append(messages.recv(comm, 0))
        results = [
            y for result in results for y in (result if isinstance(result, tuple) else [result])
        ]
        return any(y.requires_grad for y in results)

    assert run_ranks(2, work) == [False, False]


def test_all_reduce_max_shares_the_gradient_between_ties():
    def work(comm):
        x = torch.tensor([1.0, comm.rank], requires_grad=True)
        messages.all_reduce(comm, x, "max").sum().backward()
        return x.grad.tolist()

    assert run_ranks(2, work) == [[1, 0], [1, 2]]


def test_gradients_differ_without_the_mirrored_call():
    """The negative control: torch's verbs in place give every rank only its own part."""

    def work(comm):
        x = torch.ones(2, requires_grad=True)
        y = x * (1 + comm.rank)
        naive = (y + (comm.all_reduce(y.detach().clone()) - y.detach())).sum()
        right = messages.all_reduce(comm, y).sum()
        return [
            torch.autograd.grad(loss, x, retain_graph=True)[0][0].item() for loss in (naive, right)
        ]

    assert run_ranks(2, work) == [[1, 2], [2, 4]]


def waits_in_vain(rank: int, work, match: str, n: int = 2) -> str:
    """The rank's error, when the other ones sit still until the end."""
    messages_of = {}

    def guarded(comm):
        try:
            work(comm)
        except (CollectiveTimeoutError, PeerLostError) as error:
            messages_of[comm.rank] = str(error)
            raise

    with pytest.raises((CollectiveTimeoutError, PeerLostError)):
        run_ranks(n, guarded, timeout_s=2)
    assert "This was the backward of" in messages_of[rank]
    assert match in messages_of[rank]
    return messages_of[rank]


def test_unconnected_delegate_error():
    """Rank 1 gives a gradient back that rank 0 does not come for."""

    def work(comm):
        if comm.rank == 0:
            messages.send(comm, torch.ones(2, requires_grad=True), 1)
        else:
            messages.recv(comm, 0).sum().backward()

    told = waits_in_vain(1, work, "backward of `recv(source=0, tag=0)` on rank 1")
    assert "`pseudo_connect`" in told and "missing: rank 0" in told


def test_unused_result_error():
    def work(comm):
        if comm.rank == 0:
            messages.send(comm, torch.ones(2, requires_grad=True), 1).backward()
        else:
            messages.recv(comm, 0)

    waits_in_vain(0, work, "backward of `send(dest=1, tag=0)` on rank 0")


def test_backward_deadlock_error():
    """Each waits for the gradient of what it sent before it gives back what it owes."""

    def work(comm):
        x = torch.ones(2, requires_grad=True)
        other = 1 - comm.rank
        if comm.rank == 0:
            got = messages.recv(comm, other)
            sent = messages.send(comm, x, other)
        else:
            sent = messages.send(comm, x, other)
            got = messages.recv(comm, other)
        sent.backward()
        got.sum().backward()

    for rank in range(2):
        waits_in_vain(rank, work, "backward of `send(")


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "broadcast", "scatter"])
def test_missing_rank_in_backward_error(name):
    calls = {
        "all_gather": lambda comm, x: messages.all_gather(comm, x)[0],
        "all_reduce": lambda comm, x: messages.all_reduce(comm, x),
        "broadcast": lambda comm, x: messages.broadcast(comm, x),
        "scatter": lambda comm, x: messages.scatter(comm, (x, x)),
    }

    def work(comm):
        y = calls[name](comm, torch.ones(2, requires_grad=True))
        if comm.rank == 0:
            y.sum().backward()

    waits_in_vain(0, work, f"backward of `{name}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, x: messages.send(c, x, 0), r"`dest` \(=0\) is this rank itself"),
        (lambda c, x: messages.send(c, [x, 3], 0), "`x` holds a int"),
        (
            lambda c, x: messages.send(c, x, 0, delegate=x),
            r"`delegate` \(=\[2\]\) must be a floating",
        ),
        (lambda c, x: messages.recv(c, 0, delegate=3), r"`delegate` \(=3\) must be a floating"),
        (lambda c, x: messages.pseudo_connect(x, x), r"`delegate` \(=\[2\]\) must be a tensor"),
        (lambda c, x: messages.pseudo_connect(x.sum()), "`actual` is empty"),
        (lambda c, x: messages.all_reduce(c, x.long()), "`x` is int64, which has no gradient"),
        (lambda c, x: messages.all_gather(c, [x]), "`x` is a list; pass a tensor to `all_gather`"),
        (lambda c, x: messages.all_to_all(c, [x.int()]), "`xs` is int32"),
        (lambda c, x: messages.all_to_all(c, [x, x]), "`xs` has 2 entries; pass 1"),
        (lambda c, x: messages.broadcast(c), "`x` is a NoneType"),
        (lambda c, x: messages.scatter(c, [x, x]), "`xs` has 2 entries; pass 1"),
        (lambda c, x: messages.gather(c, x, 3), r"`root` \(=3\) is no rank"),
        (lambda c, x: messages.all_reduce(c, x, "product"), r"`op` \(='product'\)"),
        (lambda c, x: messages.reduce_scatter(c, x, "max"), r"`op` \(='max'\) has no mirrored"),
        (lambda c, x: messages.reduce_scatter(c, (x, x)), "`x` has 2 entries; pass 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call(Communicator.single_process(), torch.ones(2, requires_grad=True))
