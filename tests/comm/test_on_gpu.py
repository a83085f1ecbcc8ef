"""Every verb on a real GPU, over Gloo and over NCCL; see `tests.helpers.on_gpu`.

Numbers are small integers, drawn on the CPU: each rank knows those of all, and sums are exact.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm import Communicator, init
from allstep.comm.algorithms import ALGORITHMS, make_algorithm
from allstep.comm.batched_send_recv import BatchedSendRecv
from allstep.comm.group import Topology
from allstep.comm.group_wire import GroupWire
from allstep.comm.layout import bytes_of
from allstep.comm.reduce_ops import ReduceOp
from allstep.device import has_streams, new_stream
from allstep.env import forget_launch
from allstep.errors import CommunicationError, PeerLostError, UsageError
from tests.comm.test_autograd import ROOTED, SYMMETRIC, derivatives, inputs, loss_of
from tests.comm.test_tensors import DTYPES, MOVED
from tests.helpers.gpus import on_cpu
from tests.helpers.launched import run_as_two_ranks
from tests.helpers.on_gpu import gpu, over_links, run_on_gpu, share_the_gpu, start_on_gpu
from tests.helpers.processes import Workers, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.process]

OPS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}
SUMMED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)
NUM_PEER_BYTES = 1 << 24  # more than NCCL buffers: two that send first would wait forever


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of 0 to 7, the same whoever draws them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def same(
    found: Any,
    expected: Any,
    what: object,
    device: torch.device | None = None,
    *,
    is_mean: bool = False,
) -> None:
    """Asserts equal bits, wherever they are, and that `found` is on `device`.

    A GPU divides by a number as it multiplies by its inverse: a mean may have another last bit.
    """
    if not isinstance(expected, Tensor):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            same(one, other, what, device, is_mean=is_mean)
        return
    assert device is None or found.device == device, (what, found.device)
    assert found.dtype == expected.dtype, (what, found.dtype)
    assert found.shape == expected.shape, (what, found.shape)
    difference = f"{what}: {found.detach().cpu()} is not {expected.detach()}"
    is_same = torch.equal(bytes_of(found.cpu()), bytes_of(expected))
    assert is_same or (is_mean and torch.allclose(found.cpu(), expected, 1e-6)), difference


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own, where there are any."""
    return new_stream(device) if has_streams(device) else nullcontext()


def late(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device, which has it only some time later: who does not wait reads zeros."""
    result = torch.zeros_like(x, device=device)
    there = x.to(device)
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    return result.copy_(there)


# -- reductions --------------------------------------------------------------------------------


def reduce_everything(comm: Communicator) -> None:
    each_op(comm)
    each_dtype(comm)
    kinds_of_tensors(comm)
    several_at_once(comm)
    each_algorithm(comm)
    reduce_scatters(comm)


def each_op(comm: Communicator) -> None:
    everyone = torch.stack([drawn(rank, 5) for rank in range(comm.size)])
    for op, oracle in OPS.items():
        for device in (comm.device, torch.device("cpu")):
            x = everyone[comm.rank].to(device, copy=True)
            assert comm.all_reduce(x, op) is x
            same(x, oracle(everyone), op, device, is_mean=op == "mean")


def each_dtype(comm: Communicator) -> None:
    xs = [late(drawn(comm.rank, 3, dtype=dtype), comm.device) for dtype in SUMMED]
    total = sum(drawn(rank, 3) for rank in range(comm.size))
    same(comm.all_reduce(xs), [total.to(dtype) for dtype in SUMMED], "dtypes", comm.device)
    half = torch.full((2,), 60_000.0, dtype=torch.float16)  # the sum is more than it can hold
    same(comm.all_reduce(half.to(comm.device), "mean"), half, "mean of float16")
    with pytest.raises(UsageError, match="is bool, for which"):
        comm.all_reduce(torch.ones(2, dtype=torch.bool, device=comm.device))


def kinds_of_tensors(comm: Communicator) -> None:
    """In place, whatever their strides: a kind that is no view of others."""
    for name, shape, view in (
        ("transposed", (2, 3), Tensor.t),
        ("strided", (10,), lambda x: x[::3]),
        ("0-dim", (), lambda x: x),
        ("empty", (0, 3), lambda x: x),
    ):
        x = drawn(comm.rank, *shape).to(comm.device)
        comm.all_reduce(view(x))
        expected = drawn(comm.rank, *shape)
        view(expected).copy_(sum(view(drawn(rank, *shape)) for rank in range(comm.size)))
        same(x, expected, name, comm.device)


def several_at_once(comm: Communicator) -> None:
    """Waited for in another order, in a stream that is not the default one."""
    with beside(comm.device):
        xs = [late(drawn(10 * i + comm.rank, 4), comm.device) for i in range(3)]
        works = [comm.all_reduce(x, "mean", async_op=True) for x in xs]
        summed = [work.wait() for work in reversed(works)][::-1]
        expected = [
            sum(drawn(10 * i + rank, 4) for rank in range(comm.size)) / comm.size for i in range(3)
        ]
        same(summed, expected, "several", comm.device, is_mean=True)
        assert all(work.is_completed() for work in works)
        same([work.wait(60.0) for work in works], expected, "waited for again", is_mean=True)
        part = comm.reduce_scatter(late(drawn(comm.rank, comm.size), comm.device), async_op=True)
        everyone = sum(drawn(rank, comm.size) for rank in range(comm.size))
        same(part.wait(60.0), everyone[comm.rank : comm.rank + 1], "reduce_scatter", comm.device)


def each_algorithm(comm: Communicator) -> None:
    """By the communicator, and by themselves on a tensor that the link may not take."""
    total = sum(drawn(rank, 7) for rank in range(comm.size))
    for name in ALGORITHMS.keys() - {"dummy", "auto" if comm.size > 2 else "dummy"}:
        algorithm = make_algorithm(name, comm)
        x = late(drawn(comm.rank, 7), comm.device)
        algorithm.reduce_(x)
        same(x, total, name, comm.device)
        algorithm.close()
    for algorithm in ("native", "ring"):
        xs = (late(drawn(comm.rank, 7), comm.device), drawn(comm.rank, 1).long().to(comm.device))
        comm.all_reduce(xs, algorithm=algorithm)
        same(xs, (total, sum(drawn(r, 1).long() for r in range(comm.size))), algorithm, comm.device)


def reduce_scatters(comm: Communicator) -> None:
    everyone = torch.stack([drawn(rank, 2 * comm.size, 2) for rank in range(comm.size)])
    x = everyone[comm.rank].to(comm.device)
    for op, oracle in OPS.items():
        expected = oracle(everyone).chunk(comm.size)[comm.rank]
        same(comm.reduce_scatter(x, op), expected, op, comm.device, is_mean=op == "mean")
    same(x, everyone[comm.rank], "what was given")
    uneven = [drawn(comm.rank, length).to(comm.device) for length in range(comm.size)]
    expected = sum(drawn(rank, comm.rank) for rank in range(comm.size)) + torch.zeros(comm.rank)
    same(comm.reduce_scatter(uneven), expected, "uneven", comm.device)
    nothing = comm.reduce_scatter(torch.empty(0, 2, device=comm.device))
    same(nothing, torch.empty(0, 2), "nothing", comm.device)


@over_links
@pytest.mark.parametrize("n", [2, 3])
def test_reductions_are_those_of_one_process(n: int, link: str) -> None:
    run_on_gpu(n, reduce_everything, link=link)


# -- moves -------------------------------------------------------------------------------------


def move_everything(comm: Communicator) -> None:
    gather_to_all(comm)
    all_to_all(comm)
    from_and_to_a_root(comm)
    between_two(comm)
    around_the_ring(comm)
    objects(comm)


def on(device: torch.device, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each as it is, also its strides."""
    return tuple(x.to(device) for x in xs)


def gather_to_all(comm: Communicator) -> None:
    uneven = [drawn(rank, rank, 2) for rank in range(comm.size)]  # rank 0 has nothing
    for device in (comm.device, torch.device("cpu")):
        own = late(uneven[comm.rank], device)
        same(comm.all_gather(own), uneven, "uneven", device)
    nothing = torch.empty(0, 2)
    same(comm.all_gather(nothing.to(comm.device)), [nothing] * comm.size, "nothing", comm.device)
    kinds = tuple(MOVED.values())
    same(comm.all_gather(on(comm.device, kinds)), [kinds] * comm.size, "kinds", comm.device)
    dtypes = tuple(drawn(5, 3, dtype=dtype) for dtype in DTYPES)
    same(comm.all_gather(on(comm.device, dtypes)), [dtypes] * comm.size, "dtypes", comm.device)
    row = late(drawn(comm.rank, 2, 2), comm.device).t()
    rows = torch.stack([drawn(rank, 2, 2).t() for rank in range(comm.size)])
    same(comm.all_gather_into_tensor(row), rows, "into a tensor", comm.device)
    same(comm.all_gather_into_tensor(row.cpu(), check=True), rows, "of the CPU")


def all_to_all(comm: Communicator) -> None:
    def sent(source: int, dest: int) -> Tensor:
        return drawn(10 * source + dest, source * dest + dest)

    ranks = range(comm.size)
    for device in (comm.device, torch.device("cpu")):
        own = [late(sent(comm.rank, dest), device) for dest in ranks]
        same(comm.all_to_all(own), [sent(rank, comm.rank) for rank in ranks], "uneven", device)
    nothing = [torch.empty(0, device=comm.device) for _ in ranks]
    same(comm.all_to_all(nothing), [torch.empty(0) for _ in ranks], "nothing", comm.device)
    x = late(drawn(comm.rank, comm.size, 3), comm.device)
    rows = torch.stack([drawn(rank, comm.size, 3)[comm.rank] for rank in ranks])
    same(comm.all_to_all_single(x), rows, "single", comm.device)


def from_and_to_a_root(comm: Communicator) -> None:
    ranks, root = range(comm.size), comm.size - 1
    uneven = [(drawn(rank, rank), drawn(rank, 2).long()) for rank in ranks]
    own = on(comm.device, uneven[comm.rank])
    gathered = comm.gather(own, root)
    assert (gathered is None) == (comm.rank != root)
    if gathered is not None:
        same(gathered, uneven, "gather", comm.device)
    parts = [on(comm.device, x) for x in uneven] if comm.rank == root else None
    same(comm.scatter(parts, root), uneven[comm.rank], "scatter", comm.device)
    own = late(drawn(comm.rank, 4), comm.device)
    assert comm.broadcast(own, root) is own
    same(own, drawn(root, 4), "broadcast", comm.device)
    new = comm.broadcast(own.bfloat16() if comm.rank == root else None, root)
    same(new, drawn(root, 4).bfloat16(), "broadcast of what is new", comm.device)
    strided = drawn(comm.rank, 6).to(comm.device)
    comm.broadcast(strided[::2], root)
    same(strided[::2], drawn(root, 6)[::2], "broadcast to what is strided", comm.device)


def between_two(comm: Communicator) -> None:
    """From rank 0 to 1 and back, by and by and at once, in a stream that is not the default one."""
    if comm.rank > 1:
        return
    other = 1 - comm.rank
    for source, dest in ((0, 1), (1, 0)):
        with beside(comm.device):
            if comm.rank == source:
                comm.send(late(drawn(1, 3), comm.device), dest, tag=5)
                comm.send((drawn(2, 2), late(drawn(3, 2), comm.device).long()), dest, tag=6)
                comm.send(torch.empty(0), dest)
            else:
                same(comm.recv(source, tag=5), drawn(1, 3), "send", comm.device)
                pair = (drawn(2, 2), drawn(3, 2).long())
                same(comm.recv(source, tag=6), pair, "tuple", comm.device)
                same(comm.recv(source), torch.empty(0), "nothing", comm.device)
    with beside(comm.device):
        arriving = [comm.recv(other, tag, async_op=True) for tag in (1, 1, 2)]
        sending = [
            comm.send(late(drawn(10 * comm.rank + i, 4), comm.device), other, tag, async_op=True)
            for i, tag in enumerate((1, 1, 2))
        ]
        for i, work in enumerate(arriving):
            same(work.wait(), drawn(10 * other + i, 4), "recv without waiting", comm.device)
        for work in sending:
            work.wait()


def around_the_ring(comm: Communicator) -> None:
    """Everyone sends and receives at once, more than is buffered and in several pieces."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    group = comm.process_group
    assert group is not None
    pieces = GroupWire(group, comm.timeout_s, names=comm.wire.names, chunk_bytes=7)
    transport = pieces.transport_device(comm.device)
    for wire, num_bytes in ((pieces, 24), (pieces, 0), (comm.wire, NUM_PEER_BYTES)):
        own = late(drawn(comm.rank, num_bytes, dtype=torch.uint8), transport)
        arrived = torch.zeros_like(own)
        wire.exchange(own, after, arrived, before, 3, "send").wait()
        expected = drawn(before, num_bytes, dtype=torch.uint8)
        assert torch.equal(arrived.cpu(), expected), num_bytes
    chunked = Communicator(pieces, Topology(comm.rank, comm.size, 0, 1), comm.device)
    everyone = [drawn(rank, 5 + rank) for rank in range(comm.size)]
    own = everyone[comm.rank].to(comm.device)
    same(chunked.all_gather(own), everyone, "in pieces", comm.device)
    same(chunked.broadcast(own if comm.rank == 1 else None, 1), everyone[1], "in pieces")
    neighbours = {after, before}
    arrived = BatchedSendRecv(comm).exchange(
        {peer: late(drawn(10 * comm.rank + peer, 3), comm.device) for peer in neighbours},
        {peer: [3] for peer in neighbours},
        dtype=torch.float32,
        device=comm.device,
        verb="send",
    )
    for peer, x in arrived.wait().items():
        same(x, drawn(10 * peer + comm.rank, 3), "neighbour", comm.device)


def objects(comm: Communicator) -> None:
    ranks, long = range(comm.size), b"x" * 1000
    assert comm.all_gather_object({"rank": comm.rank, "long": long}) == [
        {"rank": rank, "long": long} for rank in ranks
    ]
    assert comm.broadcast_object([comm.rank, long], root=1) == [1, long]
    assert comm.all_reduce_object({"rank": comm.rank}) == {"rank": sum(ranks)}
    assert comm.scatter_object([10 * rank for rank in ranks] if comm.rank == 0 else None) == (
        10 * comm.rank
    )
    gathered = comm.gather_object(comm.rank, root=1)
    assert gathered == (list(ranks) if comm.rank == 1 else None)
    if comm.rank == 0:
        comm.send_object("to 1", 1, tag=2)
    if comm.rank == 1:
        assert comm.recv_object(0, tag=2) == "to 1"
    with pytest.raises(UsageError, match=r"send `\.cpu\(\)`|meta"):
        comm.all_gather_object(torch.ones(2, device=comm.device if not on_cpu() else "meta"))
    comm.barrier()


@over_links
@pytest.mark.parametrize("n", [2, 3])
def test_what_is_moved_arrives_as_it_was(n: int, link: str) -> None:
    run_on_gpu(n, move_everything, link=link)


# -- gradients ---------------------------------------------------------------------------------


def derive_everything(comm: Communicator) -> None:
    """Two derivatives through every message, against one process that has all ranks' inputs."""
    n, root = comm.size, 1
    for name, (call, oracle) in SYMMETRIC.items():
        xs = leaves(comm)
        ys = call(comm, xs)
        expect_derivatives(comm, name, ys, xs, lambda r, all_xs, of=oracle: of(n, r, all_xs))
    for name, (call, oracle) in ROOTED.items():
        xs = leaves(comm)
        delegate = torch.zeros((), dtype=torch.float64, device=comm.device, requires_grad=True)
        ys = call(comm, xs, root, delegate)
        expect_derivatives(
            comm, name, ys, (*xs, delegate), lambda r, all_xs, of=oracle: of(n, r, root, all_xs)
        )


def leaves(comm: Communicator) -> tuple[Tensor, ...]:
    own = inputs(comm.size, comm.rank)
    return tuple(x.detach().to(comm.device).requires_grad_() for x in own)


def expect_derivatives(
    comm: Communicator,
    name: str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    oracle: Callable[[int, list[tuple[Tensor, ...]]], Sequence[Tensor]],
) -> None:
    n, rank = comm.size, comm.rank
    all_xs = [inputs(n, other) for other in range(n)]
    all_ys = [oracle(other, all_xs) for other in range(n)]
    total = sum(loss_of(other, tuple(y)) for other, y in enumerate(all_ys))
    wanted = derivatives(total, tuple(x for own in all_xs for x in own))
    loss = loss_of(rank, tuple(ys))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    norm = sum((g**2).sum() for g in first)
    second = torch.autograd.grad(norm, xs, materialize_grads=True)
    for found, expected in (
        (ys, all_ys[rank]),
        (first[:n], wanted[rank * n : rank * n + n]),
        (second[:n], wanted[n * n + rank * n :][:n]),
    ):
        assert all(x.device == comm.device for x in found), name
        close = [x.detach().cpu() for x in found]
        torch.testing.assert_close(
            close,
            [x.detach() for x in expected],
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m: f"{name}: {m}",
        )


@over_links
def test_derivatives_through_messages_are_those_of_one_process(link: str) -> None:
    run_on_gpu(3, derive_everything, link=link)


# -- groups ------------------------------------------------------------------------------------


def make_groups(comm: Communicator) -> None:
    split_off(comm)
    in_turns(comm)
    a_mesh(comm)
    use_after_close(comm)


def summed(comm: Communicator) -> float:
    return float(comm.all_reduce(torch.full((2,), 1.0 + comm.rank, device=comm.device))[1])


def split_off(comm: Communicator) -> None:
    """The first call of a new group is one between some of its ranks."""
    trio = comm.split(0, key=-comm.rank)
    assert trio is not None and trio.rank == comm.size - 1 - comm.rank
    x = torch.full((4,), 2.0**trio.rank, device=comm.device)
    make_algorithm("recursive_doubling", trio).reduce_(x)
    assert x.tolist() == [7.0] * 4
    pair = trio.split(0 if trio.rank < 2 else None)
    assert (pair is None) == (trio.rank == 2)
    if pair is not None:
        alone = pair.split(pair.rank)
        assert alone is not None and (pair.size, alone.size) == (2, 1)
        other = 1 - pair.rank
        arriving = pair.recv(other, async_op=True)
        pair.send(torch.full((3,), float(pair.rank), device=comm.device), other)
        assert arriving.wait().tolist() == [float(other)] * 3
        assert (summed(pair), summed(alone)) == (3.0, 1.0)
        same(pair.all_gather(torch.ones(pair.rank)), [torch.ones(0), torch.ones(1)], "of the CPU")
        alone.close()
        pair.close()
    assert summed(trio) == 6.0
    trio.close()


def in_turns(comm: Communicator) -> None:
    """Calls of two groups, under way at the same time."""
    second = comm.split(0)
    assert second is not None
    works = []
    for i in range(4):
        x = late(drawn(10 * i + comm.rank, 3), comm.device)
        works.append((comm if i % 2 else second).all_reduce(x, async_op=True))
    expected = [sum(drawn(10 * i + rank, 3) for rank in range(comm.size)) for i in range(4)]
    same([work.wait() for work in works], expected, "two groups in turns", comm.device)
    second.close()


def a_mesh(comm: Communicator) -> None:
    mesh = comm.mesh(data=1, model=comm.size)
    assert (summed(mesh["data"]), summed(mesh["model"])) == (1.0, 6.0)
    if dist.is_initialized():
        group = mesh.device_mesh()["model"].get_group()
        x = torch.full((2,), 1.0 + comm.rank, device=comm.device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [6.0, 6.0]
    mesh["data"].close()


def use_after_close(comm: Communicator) -> None:
    closed = comm.split(0)
    assert closed is not None
    work = closed.all_reduce(torch.ones(3, device=comm.device), async_op=True)
    closed.close()
    assert work.wait().tolist() == [comm.size] * 3
    for call in (summed, Communicator.barrier, lambda comm: comm.split(0)):
        with pytest.raises(UsageError, match="closed communicator"):
            call(closed)


@over_links
def test_groups_of_a_group_sum_over_their_own_ranks(link: str) -> None:
    run_on_gpu(3, make_groups, link=link)


SCRIPT = """
import torch
import allstep
from allstep.comm import initialise
from tests.helpers.on_gpu import gpu, share_the_gpu

share_the_gpu()
initialise.check_own_devices = lambda places: None
comm = allstep.init(device=gpu(), timeout_s=60)
pair = comm.split(0)
if comm.rank:
    pair.send(torch.ones(2, device=comm.device), 0)
else:
    pair.recv(1)
x = comm.all_reduce(torch.ones(2, device=comm.device))
pair.close()
comm.close()
print(x.tolist())
"""


def test_close_leaves_nothing_that_warns_at_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor aborts it: the group, and one that was split off."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    for run in run_as_two_ranks(SCRIPT, tmp_path, monkeypatch, within_s=90.0):
        assert run.output.endswith("[2.0, 2.0]\n")
        assert not re.search(r"(?i)warning|destroy|abort|error", run.errors), run.errors


# -- failures ----------------------------------------------------------------------------------


def wait_in_vain(comm: Communicator) -> list[str]:
    """What ranks 0 and 1 are told of rank 2, which comes to no call any more."""
    calls: list[Callable[[Communicator, Tensor], Any]] = [
        lambda group, x: group.all_reduce(x.repeat(2)),  # not compared before
        lambda group, x: group.all_gather(x),
        lambda group, _: group.barrier(),
        lambda group, x: group.all_reduce(x, async_op=True).wait(3.0),
    ]
    groups = [comm.split(0) for _ in calls]
    x = torch.ones(3, device=comm.device)
    for group in groups:
        assert group is not None
        group.all_reduce(x.clone())
    told = []
    store = comm.process_group.get_group_store()
    comm.set_timeout(3.0)
    if comm.rank == 2:
        store.wait(["done/0", "done/1"], timedelta(seconds=90))
    else:
        for group, call in zip(groups, calls, strict=True):
            with pytest.raises(CommunicationError) as caught:
                call(group, x)
            told.append(str(caught.value))
        # What the device still waits for in one group does not keep another from its end.
        groups[0].abort()
        store.set(f"done/{comm.rank}", "")
    comm.abort()
    return told


@over_links
def test_every_wait_ends_and_names_the_rank_that_did_not_come(link: str) -> None:
    told = run_on_gpu(3, wait_in_vain, link=link)
    assert [len(messages) for messages in told] == [4, 4, 0]
    for messages in zip(*told[:2], strict=True):
        assert all("rank 2" in message for message in messages), messages
        # The first to give up breaks connections, which the other may see before its own timeout.
        first = [m for m in messages if "within 3 s" in m and "missing: rank 2." in m]
        assert first, messages


def lose_one(comm: Communicator, verb: str) -> str:
    """How the others' call ends when rank 2 is killed before its own."""
    x = torch.ones(1 << 10, device=comm.device)
    comm.all_reduce(x).cpu()
    comm.set_timeout(8.0)
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if verb == "all_gather":
            comm.all_gather(x)
        else:
            comm.all_reduce(x).cpu()
    except PeerLostError as error:
        comm.abort()
        return str(error)
    return "a result"


@over_links
@pytest.mark.parametrize("verb", ["all_gather", "all_reduce"])
def test_no_call_goes_on_without_a_rank_that_was_killed(verb: str, link: str) -> None:
    """Over NCCL an all-reduce has no word with the others: its own watchdog ends the process."""
    with start_on_gpu(3, lose_one, verb, link=link) as workers:
        is_told = verb == "all_gather" or link == "gloo" or on_cpu()
        # NCCL's watchdog writes down what it knows for a minute before.
        limit_s = 60.0 if is_told else 180.0
        wait_until(lambda: {0, 1, 2} <= workers.outcomes().keys(), limit_s, workers.folder / "log")
        outcomes = workers.outcomes()
    for rank in (0, 1):
        value = outcomes[rank].value
        assert "a result" not in value
        assert "rank 2" in value if is_told else "it died" in value, value


# -- the beginning -----------------------------------------------------------------------------


def both_on_one_gpu() -> None:
    share_the_gpu()
    with pytest.raises(UsageError, match=r"ranks 0 and 1 both compute on accelerator .*start one"):
        init(device=gpu(), timeout_s=60)


@pytest.mark.skipif(on_cpu(), reason="needs CUDA: CPUs may be shared")
def test_two_workers_on_one_gpu_are_refused_by_its_name() -> None:
    with Workers(2, both_on_one_gpu, ()) as workers:
        workers.results()


def over_a_frameworks_group(backend: str, is_bound: bool) -> None:
    """Tensors of both kinds, objects and groups, and the framework's own calls afterwards."""
    share_the_gpu()
    if has_streams(gpu()):
        torch.cuda.set_device(gpu())
        dist.init_process_group(backend, device_id=gpu() if is_bound else None)
    else:
        dist.init_process_group("gloo")
    comm = init(timeout_s=60, device=None if is_bound else gpu())
    assert comm.device == gpu()
    everyone = [drawn(rank, 3 + rank) for rank in range(comm.size)]
    for device in (comm.device, torch.device("cpu")):
        same(comm.all_gather(late(everyone[comm.rank], device)), everyone, "gather", device)
        x = late(drawn(comm.rank, 4), device)
        same(comm.all_reduce(x), drawn(0, 4) + drawn(1, 4), "sum", device)
        parts = [late(drawn(10 * comm.rank + dest, dest), device) for dest in range(2)]
        expected = [drawn(10 * source + comm.rank, comm.rank) for source in range(2)]
        same(comm.all_to_all(parts), expected, "all to all", device)
    assert comm.all_gather_object(b"x" * (300 + comm.rank)) == [b"x" * 300, b"x" * 301]
    if comm.rank == 0:
        comm.send(everyone[0].to(comm.device), 1)
    else:
        same(comm.recv(0), everyone[0], "send", comm.device)
    comm.barrier()
    split_off_pair = comm.split(0)
    assert split_off_pair is not None and summed(split_off_pair) == 3.0
    split_off_pair.close()
    comm.close()
    x = torch.ones(2, device=gpu())
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "is_bound"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("nccl", False)]
)
def test_a_frameworks_group_is_used_as_it_is(backend: str, is_bound: bool) -> None:
    with Workers(2, over_a_frameworks_group, (backend, is_bound)) as workers:
        workers.results(90.0)


def alone() -> None:
    """Without a launcher's variables, and as torchrun's only worker."""
    with init(timeout_s=60) as comm:
        summed_alone(comm)
    forget_launch()
    with init(timeout_s=60) as comm:
        summed_alone(comm)


def summed_alone(comm: Communicator) -> None:
    assert (comm.size, comm.device) == (1, gpu())
    x = late(drawn(0, 3), comm.device)
    same(comm.all_reduce(x), drawn(0, 3), "alone", comm.device)
    same(comm.all_gather(x), [drawn(0, 3)], "alone", comm.device)
    same(comm.all_to_all([x]), [drawn(0, 3)], "alone", comm.device)
    same(comm.reduce_scatter(x, "mean"), drawn(0, 3), "alone", comm.device)
    same(comm.broadcast(x), drawn(0, 3), "alone", comm.device)
    comm.barrier()


def test_a_single_process_takes_the_gpu_by_itself() -> None:
    with Workers(1, alone, ()) as workers:
        workers.results(90.0)
