"""Collectives on tensors: closed forms with rank-valued inputs."""

import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.group import Topology
from allstep.comm.group_wire import GroupWire
from allstep.errors import DisagreementError, UsageError
from tests.helpers.ranks import run_ranks

SIZES = (1, 2, 3, 5)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
)
MOVED = {
    "empty": torch.empty(0, 3),
    "0-dim": torch.tensor(2.5),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(10)[::3],
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "expanded": torch.tensor([1.0]).expand(4),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
}

LINE = torch.ones(5)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", lambda n: n * (n + 1) / 2),
        ("mean", lambda n: (n + 1) / 2),
        ("max", lambda n: n),
        ("min", lambda n: 1),
    ],
)
def test_all_reduce_has_its_closed_form(n, op, expected):
    def work(comm):
        x = torch.full((3,), comm.rank + 1.0)
        result = comm.all_reduce(x, op)
        assert result is x
        return x.tolist()

    assert run_ranks(n, work) == [[expected(n)] * 3] * n


def test_all_reduce_takes_tuples_and_changes_them_in_place():
    def work(comm):
        xs = (torch.tensor(comm.rank), torch.full((2, 2), 0.5))
        assert comm.all_reduce(xs) is xs
        return [x.tolist() for x in xs]

    assert run_ranks(3, work) == [[3, [[1.5, 1.5], [1.5, 1.5]]]] * 3


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.bool, torch.float8_e4m3fn)])
def test_all_reduce_sums_every_dtype(dtype):
    def work(comm):
        return comm.all_reduce(torch.tensor([comm.rank + 1, 2]).to(dtype))

    for result in run_ranks(3, work):
        assert result.dtype == dtype
        assert torch.equal(result, torch.tensor([6, 6]).to(dtype))


def test_all_reduce_of_tensors_that_are_not_contiguous():
    def work(comm):
        base = torch.zeros(3, 4)
        comm.all_reduce(base.t()[1:3].add_(comm.rank + 1))
        z = torch.tensor([1j * comm.rank]).conj()
        return base, comm.all_reduce(z)

    for base, z in run_ranks(3, work):
        assert base.t()[1:3].eq(6).all()
        assert base.sum() == 6 * 6  # nothing else was touched
        assert z.item() == -3j


@pytest.mark.parametrize(
    ("op", "algorithm", "expected"),
    [
        ("sum", None, -6.0),
        ("mean", None, -2.0),
        ("max", None, -1.0),
        ("min", None, -3.0),
        ("sum", "ring", -6.0),
        ("mean", "shared_memory", -2.0),
    ],
)
def test_all_reduce_of_tensors_with_the_negative_bit(op, algorithm, expected):
    def work(comm):
        x = torch.tensor([(comm.rank + 1) * 1j]).conj().imag
        assert x.is_neg()
        assert x.is_contiguous()
        return comm.all_reduce(x, op, algorithm=algorithm).item()

    assert run_ranks(3, work) == [expected] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_of_halves_with_the_negative_bit(dtype):
    def work(comm):
        x = torch._neg_view(torch.tensor([1.0, -2.0, 3.0], dtype=dtype) * (comm.rank + 1))
        return comm.all_reduce(x, "mean").tolist()

    assert run_ranks(3, work) == [[-2.0, 4.0, -6.0]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("algorithm", ["native", "ring", "recursive_doubling", "shared_memory"])
def test_all_reduce_of_one_element_of_many(algorithm, dtype):
    def work(comm):
        x = torch.zeros(6, dtype=dtype)
        comm.all_reduce(x[1::3][1:].add_(comm.rank + 1), algorithm=algorithm)
        return x.tolist()

    assert run_ranks(3, work) == [[0, 0, 0, 0, 6, 0]] * 3


def test_all_reduce_leaves_gradients_out_of_it():
    def work(comm):
        parameter = torch.nn.Parameter(torch.tensor([1.0 + comm.rank]))
        comm.all_reduce(parameter, "mean")
        return parameter

    for parameter in run_ranks(2, work):
        assert parameter.item() == 1.5
        assert parameter.is_leaf


def test_all_reduce_of_neighbours_in_one_tensor():
    def work(comm):
        x = torch.full((2, 4), comm.rank + 1.0)
        comm.all_reduce([x[0], x[1, :2], x[1, 2:], x[:0]])
        every_second = torch.full((6,), comm.rank + 1.0)
        comm.all_reduce([every_second[::2], every_second[1::2]], "mean")
        return x.tolist(), every_second.tolist()

    assert run_ranks(3, work) == [([[6.0] * 4] * 2, [2.0] * 6)] * 3


def test_async_all_reduces_may_be_waited_for_in_any_order():
    def work(comm):
        xs = [torch.full((1000,), comm.rank + i) for i in range(4)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        results = [p.wait() for p in reversed(works)]
        assert works[0].wait() is xs[0]  # again, and not divided or added twice
        return [int(r[0]) for r in results]

    assert run_ranks(3, work) == [[12, 9, 6, 3]] * 3


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_extremes_are_those_of_all_values_together(op, dtype):
    inf, nan = float("inf"), float("nan")
    rows = [[nan, 1, -inf, -0.5, 2, 0], [0, nan, inf, -0.25, -3, -1], [-1, 2, 0, -2, nan, 1e-7]]
    every = torch.tensor(rows, dtype=dtype)
    expected = every.amax(0) if op == "max" else every.amin(0)

    def work(comm):
        x = every[comm.rank].clone()
        part = comm.reduce_scatter(x, op)
        return comm.all_reduce(x, op), part

    for rank, (whole, part) in enumerate(run_ranks(3, work)):
        torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(part, expected.chunk(3)[rank], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("algorithm", [None, "ring", "recursive_doubling", "shared_memory"])
def test_a_mean_of_float16_is_finite_where_the_sum_is_not(algorithm):
    def work(comm):
        x = torch.tensor([40000.0, 3 * 2.0**-24 * comm.rank], dtype=torch.float16)
        mean = comm.all_reduce(x.clone(), "mean", algorithm=algorithm)
        part = comm.reduce_scatter(x, "mean")
        assert not comm.all_reduce(x, algorithm=algorithm).isfinite().all()
        return mean.tolist(), part.tolist()

    for rank, (mean, part) in enumerate(run_ranks(2, work)):
        assert mean == [40000.0, 2 * 2.0**-24]  # the smallest numbers round once: 1.5 to 2
        assert part == [mean[rank]]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_reduce_scatter_is_a_part_of_all_reduce(n, op):
    def work(comm):
        x = torch.arange(2.0 * n * 3).reshape(2 * n, 3) * (comm.rank + 1)
        before = x.clone()
        part = comm.reduce_scatter(x, op)
        parts = [torch.full((r,), comm.rank + 1.0) for r in range(n)]
        ragged = comm.reduce_scatter(parts, op, async_op=True).wait()
        assert torch.equal(x, before)
        assert ragged.shape == (comm.rank,)
        expected = comm.all_reduce(x, op).chunk(n)[comm.rank]
        whole = comm.all_reduce(torch.tensor(comm.rank + 1.0), op)
        return torch.equal(part, expected) and bool(ragged.eq(whole).all())

    assert all(run_ranks(n, work))


@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce_scatter_of_parts_of_unlike_dtypes(op):
    def work(comm):
        parts = [torch.full((2,), comm.rank + 1, dtype=d) for d in (torch.int64, torch.float32)]
        return comm.reduce_scatter(parts, op)

    expected = {"sum": 3, "max": 2}[op]
    for part, dtype in zip(run_ranks(2, work), (torch.int64, torch.float32), strict=True):
        assert torch.equal(part, torch.full((2,), expected, dtype=dtype))


def test_reduce_scatter_of_nothing():
    assert [x.shape for x in run_ranks(2, lambda comm: comm.reduce_scatter(torch.empty(0, 3)))] == [
        (0, 3),
        (0, 3),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels(dtype):
    def work(comm):
        x = torch.tensor([0, 1, comm.rank]).to(dtype)
        everyone = comm.all_gather(x)
        received = comm.broadcast(x if comm.rank == 1 else None, root=1)
        return everyone, received

    for everyone, received in run_ranks(2, work):
        assert [x.dtype for x in (*everyone, received)] == [dtype] * 3
        expected = [torch.tensor([0, 1, r]).to(dtype) for r in (0, 1, 1)]
        for x, y in zip((*everyone, received), expected, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", MOVED)
def test_every_kind_of_tensor_travels(name):
    def work(comm):
        return comm.all_gather((torch.ones(3, dtype=torch.uint8), MOVED[name]))

    for everyone in run_ranks(2, work):
        for _, x in everyone:
            assert torch.equal(x, MOVED[name])
            assert x.is_leaf


shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.tuples(shapes, st.sampled_from(DTYPES)).map(
    lambda s: torch.randint(0, 2, s[0]).to(s[1])
)
values = st.one_of(tensors, st.lists(tensors, max_size=4).map(tuple))


def same(x: object, y: object) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (x, y)]
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(*bits)
    assert isinstance(x, tuple)
    assert isinstance(y, tuple)
    return len(x) == len(y) and all(map(same, x, y))


@settings(max_examples=15, deadline=None)
@given(st.lists(values, min_size=3, max_size=3), st.integers(0, 2))
def test_ragged_tensors_and_tuples_travel_by_all_verbs(xs, root):
    def work(comm):
        assert all(map(same, comm.all_gather(xs[comm.rank]), xs))
        gathered = comm.gather(xs[comm.rank], root)
        assert gathered is None if comm.rank != root else all(map(same, gathered, xs))
        assert same(comm.scatter(xs if comm.rank == root else None, root), xs[comm.rank])
        assert same(comm.broadcast(xs[root] if comm.rank == root else None, root), xs[root])
        exchanged = comm.all_to_all([xs[(comm.rank + dest) % 3] for dest in range(3)])
        assert all(same(x, xs[(source + comm.rank) % 3]) for source, x in enumerate(exchanged))
        works = comm.recv((comm.rank - 1) % 3, async_op=True)
        comm.send(xs[comm.rank], (comm.rank + 1) % 3)
        assert same(works.wait(), xs[(comm.rank - 1) % 3])

    run_ranks(3, work)


def test_many_tensors_need_a_long_header():
    xs = tuple(torch.full((i % 3, 2), i) for i in range(200))

    def work(comm):
        everyone = comm.all_gather(xs if comm.rank == 0 else xs[:1])
        exchanged = comm.all_to_all([xs, xs[:1]])
        gathered = comm.gather(xs, root=1)
        received = comm.broadcast(xs if comm.rank == 0 else None)
        return everyone, exchanged, gathered, received

    for rank, (everyone, exchanged, gathered, received) in enumerate(run_ranks(2, work)):
        assert same(everyone[0], xs)
        assert same(everyone[1], xs[:1])
        assert same(exchanged[1], xs if rank == 0 else xs[:1])
        assert gathered is None if rank == 0 else same(gathered[0], xs)
        assert same(received, xs)


def test_messages_above_the_backends_limit_go_in_pieces():
    x = torch.arange(1003)

    def work(whole):
        wire = GroupWire(whole.process_group, whole.timeout_s, chunk_bytes=1000)
        comm = Communicator(wire, Topology(whole.rank, 2, 0, 1), whole.device)
        everyone = comm.all_gather(x + comm.rank)
        received = comm.broadcast(x if comm.rank == 0 else None)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            assert torch.equal(comm.recv(0), x)
        return torch.equal(everyone[1], x + 1) and torch.equal(received, x)

    assert run_ranks(2, work) == [True, True]


def test_broadcast_fills_what_is_given():
    def work(comm):
        x = torch.full((2, 3), float(comm.rank)).t()
        assert comm.broadcast(x, root=2) is x
        return x.tolist()

    assert run_ranks(3, work) == [[[2.0, 2.0]] * 3] * 3


def test_broadcast_refuses_to_fill_what_does_not_fit():
    def work(comm):
        x = torch.zeros(2, dtype=torch.float64 if comm.rank == 1 else torch.float32)
        if comm.rank == 1:
            with pytest.raises(DisagreementError, match=r"rank 1 gave float64\[2\].*float32\[2\]"):
                comm.broadcast(x)
        else:
            comm.broadcast(x)
        comm.barrier()  # nobody was left waiting

    run_ranks(3, work)


def test_several_asynchronous_receives_keep_their_order():
    def work(comm):
        other = 1 - comm.rank
        works = [comm.recv(other, tag=3, async_op=True) for _ in range(5)]
        sent = [comm.send(torch.full((i + 1,), i), other, tag=3, async_op=True) for i in range(6)]
        last = comm.recv(other, tag=3)
        for call in sent:
            call.wait()
        return [len(p.wait()) for p in reversed(works)] + [len(last)]

    assert run_ranks(2, work) == [[5, 4, 3, 2, 1, 6]] * 2


def test_recv_keeps_no_reference_to_its_result():
    """Tags may carry the number of a step: none of a million results is kept."""

    def work(comm):
        if comm.rank == 0:
            for step in range(5):
                comm.send(torch.ones(1000), 1, tag=step)
            return 0
        received = []
        for step in range(5):
            works = comm.recv(0, tag=step, async_op=True)
            received.append(weakref.ref(works.wait()))
        del works
        deadline_s = time.monotonic() + 10  # for the last thread to end
        while any(x() is not None for x in received) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return sum(x() is not None for x in received), len(comm._inbox._last)

    assert run_ranks(2, work)[1] == (0, 0)


def test_tags_tell_messages_apart():
    def work(comm):
        if comm.rank == 0:
            first = comm.send(torch.tensor(7), 1, tag=7, async_op=True)
            comm.send(torch.tensor(8), 1, tag=8)
            first.wait()
            return None
        return [comm.recv(0, tag=8).item(), comm.recv(0, tag=7).item()]

    assert run_ranks(2, work)[1] == [8, 7]


def test_tensor_verbs_of_a_single_process():
    comm = Communicator.single_process()
    x = torch.tensor([1.0, 2.0])
    assert comm.all_reduce(x, "mean") is x
    assert comm.reduce_scatter(x).tolist() == [1.0, 2.0]
    assert comm.broadcast(x) is x
    for result in (comm.all_gather(x), comm.gather(x), comm.all_to_all([x])):
        assert len(result) == 1
        assert torch.equal(result[0], x)
        assert result[0].data_ptr() != x.data_ptr()
    assert torch.equal(comm.scatter([x]), x)
    assert comm.all_reduce(x, async_op=True).wait() is x
    assert comm.process_group is None
    comm.barrier()
    comm.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce(torch.ones(1), "maximum"), r"`op` \(='maximum'\).*`max`"),
        (lambda c: c.all_reduce(torch.ones(1), "avg"), r"`op` \(='avg'\): valid"),
        (lambda c: c.all_reduce(torch.ones(1, dtype=torch.int64), "mean"), "int64.*`sum`"),
        (lambda c: c.all_reduce(torch.ones(1, dtype=torch.int16), "mean"), "int16.*`sum`"),
        (lambda c: c.all_reduce(torch.ones(1, dtype=torch.bool)), "bool.*use `max` or `min`"),
        (lambda c: c.all_reduce(torch.ones(1, dtype=torch.complex64), "max"), "no order"),
        (lambda c: c.all_reduce(torch.ones(1).to(torch.float8_e5m2)), "float8_e5m2.*float"),
        (lambda c: c.all_reduce(torch.ones(1).expand(3)), r"\[3\] and strides \[0\].*x.clone"),
        (lambda c: c.all_reduce(2 * [torch.ones(3)]), "0 and 1 of `x` share memory.*clone"),
        (lambda c: c.all_reduce([MOVED["0-dim"], LINE, LINE[3:]], algorithm="ring"), "1 and 2 of"),
        (lambda c: c.broadcast(torch.ones(1).expand(3), 1 - c.rank), "elements share.*`broadcast`"),
        (lambda c: c.all_reduce(3.0), r"`x` is a float; pass a tensor.*_object"),
        (lambda c: c.all_reduce([3.0]), r"`x` holds a float; pass a tensor.*_object"),
        (lambda c: c.all_gather(torch.ones(2).to_sparse()), "sparse.*to_dense"),
        (lambda c: c.all_reduce(torch.ones(2).to_sparse(), check=False), "sparse.*to_dense"),
        (lambda c: c.reduce_scatter(torch.ones(2).to_sparse(), check=False), "sparse.*to_dense"),
        (lambda c: c.reduce_scatter(torch.ones(3)), r"multiple of `size` \(=2\); nearest: 2, 4"),
        (lambda c: c.reduce_scatter(torch.tensor(1.0)), r"shape \[\].*multiple"),
        (lambda c: c.reduce_scatter([torch.ones(1)]), "`x` has 1 entries; pass 2"),
        (lambda c: c.all_gather_into_tensor([LINE]), r"`x` .*must be a Tensor.*`all_gather`"),
        (lambda c: c.all_gather_into_tensor(torch.ones(2).to_sparse()), "sparse.*to_dense"),
        (lambda c: c.all_to_all_single([LINE, LINE]), r"`x` .*must be a Tensor.*`all_to_all`"),
        (lambda c: c.all_to_all_single(torch.ones(2).to_sparse()), "sparse.*to_dense"),
        (lambda c: c.all_to_all([torch.ones(1)]), "`xs` has 1 entries; pass 2"),
        (lambda c: c.all_to_all(torch.ones(2)), "`xs` is a Tensor; pass a tuple of 2"),
        (lambda c: c.scatter(None, root=c.rank), "`xs` is a NoneType; pass a tuple of 2"),
        (lambda c: c.scatter(["ab", "cd"], root=c.rank), "`xs` is a str; pass a tensor"),
        (lambda c: c.broadcast(root=c.rank), "`x` is None on the root"),
        (lambda c: c.broadcast(torch.ones(1), root=2), r"`root` \(=2\) is no rank; .* 0 to 1"),
        (lambda c: c.gather(torch.ones(1), root=-1), r"`root` \(=-1\) is no rank"),
        (lambda c: c.gather(torch.ones(1), root=True), r"`root` \(=True\) is no rank"),
        (lambda c: c.send(torch.ones(1), 2), r"`dest` \(=2\) is no rank"),
        (lambda c: c.send(torch.ones(1), c.rank), r"`dest` .* is this rank itself"),
        (lambda c: c.recv(1.0), r"`source` \(=1.0\) is no rank"),
        (lambda c: c.recv(c.rank), r"`source` .* is this rank itself"),
        (lambda c: c.recv(1 - c.rank, tag=-1), r"`tag` \(=-1\) is out of range"),
        (lambda c: c.recv(1 - c.rank, tag=1 << 30), r"`tag` \(=1073741824\) is out of range"),
    ],
)
def test_bad_arguments_are_refused_before_sending(call, message):
    def work(comm):
        with pytest.raises(UsageError, match=message):
            call(comm)
        comm.barrier()

    run_ranks(2, work)


def test_reductions_of_different_tensors_error():
    def work(comm):
        shape = 4 if comm.rank == 1 else 3
        with pytest.raises(
            DisagreementError, match=r"rank 0 wants: .*float32\[3\].*rank 1 .*\[4\]"
        ):
            comm.all_reduce(torch.ones(shape))
        with pytest.raises(DisagreementError, match=r"with sum of .* with max of"):
            comm.reduce_scatter(torch.ones(2), "max" if comm.rank else "sum")
        comm.barrier()

    run_ranks(2, work)


def test_different_verbs_error():
    def work(comm):
        if comm.rank == 0:
            comm.broadcast(torch.ones(1))
        else:
            comm.broadcast_object()

    with pytest.raises(DisagreementError, match="rank 1 expected `broadcast_object` where rank 0"):
        run_ranks(2, work)


def test_recv_object_of_a_tensor_error():
    def work(comm):
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
        else:
            comm.recv_object(0)

    with pytest.raises(DisagreementError, match="expected `send_object` where rank 0"):
        run_ranks(2, work)
