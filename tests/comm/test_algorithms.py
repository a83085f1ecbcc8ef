"""Sums by every algorithm, against float64, closed forms of their traffic, and one another."""

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.algorithms import (
    ALGORITHMS,
    Auto,
    Dummy,
    HalvingDoubling,
    Hierarchical,
    Native,
    RecursiveDoubling,
    Ring,
    TwoDimensional,
    make_algorithm,
)
from allstep.errors import CommunicationError, DisagreementError, PeerLostError, UsageError
from allstep.plan.algorithms import ALGORITHMS as PLANNED
from allstep.plan.algorithms import traffic_of
from tests.helpers.nodes import make_nodes
from tests.helpers.ranks import run_ranks

SUMMING = [name for name in ALGORITHMS if name != "dummy"]
PLACES = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (5, 5)]  # ranks, ranks a node
NUM_ELEMENTS = (0, 1, 1001, 20_001)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.uint8)


def values(rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """A rank's tensor; integers small enough for their sum."""
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    if dtype.is_floating_point:
        return torch.randn(num_elements, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (num_elements,), generator=generator).to(dtype)


@pytest.mark.parametrize(("n", "local_size"), PLACES)
@pytest.mark.parametrize("name", SUMMING)
def test_every_algorithm_gives_the_sum_on_every_rank(name, n, local_size):
    cases = [(m, dtype) for m in NUM_ELEMENTS for dtype in (*FLOATS, *INTEGERS)]

    def work(comm):
        algorithm = make_algorithm(name, comm)
        results = []
        for num_elements, dtype in cases:
            x = values(comm.rank, num_elements, dtype)
            algorithm.reduce_(x)
            results.append(x)
        return results

    of_ranks = run_ranks(n, work, local_size=local_size)
    for case, (num_elements, dtype) in enumerate(cases):
        exact = [values(rank, num_elements, dtype).double() for rank in range(n)]
        total = torch.stack(exact).sum(0)
        result = of_ranks[0][case]
        assert result.dtype == dtype
        assert all(torch.equal(other[case], result) for other in of_ranks)
        if not dtype.is_floating_point:
            assert torch.equal(result.double(), total)
        elif num_elements:
            largest = torch.stack(exact).abs().max()
            bound = 4 * n * torch.finfo(dtype).eps * largest
            assert (result.double() - total).abs().max() <= bound


@pytest.mark.parametrize(
    "name", ["ring", "halving_doubling", "recursive_doubling", "shared_memory", "hierarchical"]
)
def test_every_algorithm_is_reproducible(name):
    def work(comm):
        algorithm = make_algorithm(name, comm)
        results = []
        for _ in range(3):
            x = values(comm.rank, 5000, torch.float32)
            algorithm.reduce_(x)
            results.append(x)
        return results

    for first, *others in run_ranks(4, work, local_size=2):
        assert all(torch.equal(first, other) for other in others)


def test_dummy_changes_nothing():
    def work(comm):
        dummy = make_algorithm("dummy", comm)
        x = torch.full((3,), float(comm.rank))
        dummy.reduce_(x)
        return x.tolist(), dummy.sent_bytes, dummy.num_messages

    assert run_ranks(2, work) == [([0.0] * 3, 0, 0), ([1.0] * 3, 0, 0)]


@pytest.mark.parametrize(("n", "local_size"), [(2, 2), (3, 3), (4, 2), (5, 5), (6, 3), (7, 7)])
@pytest.mark.parametrize(
    "kind",
    [Native, Ring, HalvingDoubling, RecursiveDoubling, Hierarchical, TwoDimensional],
    ids=lambda k: k.name,
)
def test_traffic_is_what_the_planner_says(kind, n, local_size):
    options = {"share_memory": False} if kind is Hierarchical else {}

    def work(comm):
        algorithm = kind(comm, **options)
        algorithm.reduce_(torch.ones(1001))
        return algorithm.sent_bytes, algorithm.num_messages

    for rank, sent in enumerate(run_ranks(n, work, local_size=local_size)):
        nodes = make_nodes(local_size, n // local_size)
        traffic = traffic_of(PLANNED[kind.name], nodes, rank, 1001, 4)
        assert sent == (traffic.sent_bytes, traffic.num_messages)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_ring_traffic_is_minimal(n):
    num_elements = 60 * n

    def work(comm):
        ring = Ring(comm)
        ring.reduce_(torch.ones(num_elements))
        return ring.sent_bytes, ring.num_messages

    bound = 2 * (n - 1) * 4 * num_elements // n
    assert run_ranks(n, work) == [(bound, 2 * (n - 1))] * n


def test_hierarchical_sends_between_first_ranks_only():
    def work(comm):
        hierarchical = Hierarchical(comm, Ring)
        hierarchical.reduce_(torch.ones(100))
        return hierarchical.sent_bytes

    assert run_ranks(4, work, local_size=2) == [400, 0, 400, 0]


def test_ring_order():
    """Floats tell in which order they were added."""
    order = (0, 2, 1, 3)

    def work(comm):
        x = values(comm.rank, 4000, torch.float32)
        ring = Ring(comm, order=order)
        ring.reduce_(x)
        return x

    expected = []
    for place, chunks in enumerate(
        zip(*(values(rank, 4000, torch.float32).tensor_split(4) for rank in order), strict=True)
    ):
        total = chunks[place].clone()
        for step in range(1, 4):
            total = chunks[(place + step) % 4] + total
        expected.append(total)
    result = run_ranks(4, work)[0]
    assert torch.equal(result, torch.cat(expected))
    straight = run_ranks(4, lambda comm: _sum(Ring(comm), values(comm.rank, 4000, torch.float32)))
    assert not torch.equal(result, straight[0])


def test_half_precision_sums_are_taken_in_float32():
    """One large and many small: added in half precision the small ones would be lost."""

    def work(comm):
        x = torch.full((5,), 2048.0 if comm.rank == 0 else 1.0, dtype=torch.float16)
        return _sum(Hierarchical(comm, share_memory=False), x.clone()), _sum(
            make_algorithm("shared_memory", comm), x.clone()
        )

    naive = torch.tensor(2048.0, dtype=torch.float16)
    for _ in range(4):
        naive = naive + torch.tensor(1.0, dtype=torch.float16)
    assert naive == 2048
    for wire, memory in run_ranks(5, work):
        assert wire.tolist() == memory.tolist() == [2052.0] * 5


@pytest.mark.parametrize("n", [1, 3])
def test_auto_makes_the_same_choice_on_every_rank(n):
    def work(comm):
        auto = Auto(comm)
        x = _sum(auto, torch.full((10,), 1.0))
        return auto.choices, auto.seconds, x.tolist()

    results = run_ranks(n, work)
    choices, seconds, x = results[0]
    assert all(other == results[0] for other in results)
    assert x == [float(n)] * 10
    sizes = [1 << k for k in (12, 16, 18, 20, 23)]
    assert list(choices) == list(seconds) == sizes[: len(choices)]  # a slow one ends it early
    assert bool(choices) == (n > 1)
    assert set(choices.values()) <= {
        "native", "ring", "halving_doubling", "recursive_doubling", "shared_memory",
    }  # fmt: skip


def test_auto_uses_the_nearest_measured_size():
    def measure(algorithm, x):
        favourite = "native" if x.nbytes < 1 << 17 else "ring"
        return 0.01 if algorithm.name == favourite else 0.05

    def work(comm):
        auto = Auto(comm, measure=measure)
        return [auto.used_for(size).name for size in (1, 1 << 16, 1 << 18, 1 << 30)]

    assert run_ranks(2, work) == [["native", "native", "ring", "ring"]] * 2


def favour(*names):
    """Seconds in which the named are the fastest, each for some sizes."""

    def measure(algorithm, x):
        return 0.01 if algorithm.name == names[x.nbytes.bit_length() % len(names)] else 0.02

    return measure


def test_auto_state_dict_keeps_choices():
    """Whatever the clock would say now."""

    def work(comm):
        x = torch.randn(1 << 10, generator=torch.Generator().manual_seed(comm.rank))
        first = Auto(comm, measure=favour("ring", "recursive_doubling"))
        expected, state = _sum(first, x.clone()), first.state_dict()
        second = Auto(comm, measure=favour("native"))
        assert set(second.choices.values()) == {"native"}
        second.load_state_dict(state)
        assert second.choices == first.choices
        return state, torch.equal(_sum(second, x.clone()), expected)

    results = run_ranks(4, work)
    assert all(equal for _, equal in results)

    def elsewhere(comm):
        auto = Auto(comm, measure=favour("native"))
        before = auto.choices
        auto.load_state_dict(results[0][0])
        auto.load_state_dict({"size": comm.size, "choices": {1 << 12: "hierarchical"}})
        auto.load_state_dict({})
        return auto.choices == before and _sum(auto, torch.ones(2)).tolist()

    assert run_ranks(2, elsewhere) == [[2.0, 2.0]] * 2  # others choose for themselves
    assert elsewhere(Communicator.single_process()) == [1.0, 1.0]


def test_auto_measures_with_the_dtype_that_travels():
    seen = set()

    def measure(algorithm, x):
        seen.add(x.dtype)
        return 1.0

    run_ranks(2, lambda comm: Auto(comm, torch.bfloat16, measure=measure).close())
    assert seen == {torch.bfloat16}


def test_auto_measures_the_backend_with_num_at_once():
    """What posts them waits for the first when all are under way; the others sum one by one."""

    class Counted:
        def __init__(self, work, wait):
            self.work, self.wait = work, wait

    def most_at_once(comm, num_at_once):
        under_way, most = 0, 0
        all_reduce = comm.wire.all_reduce

        def counted(tensor, op, verb):
            nonlocal under_way, most
            work = all_reduce(tensor, op, verb)
            under_way += 1
            most = max(most, under_way)

            def wait(timeout_s=None):
                nonlocal under_way
                under_way -= 1
                work.wait(timeout_s)

            return Counted(work, wait)

        comm.wire.all_reduce = counted
        make_algorithm("auto", comm, num_at_once=num_at_once).close()
        return most

    for num_at_once in (1, 3):
        found = run_ranks(2, lambda comm, n=num_at_once: most_at_once(comm, n))
        assert found == [num_at_once] * 2


def test_auto_candidates_on_several_nodes():
    def work(comm):
        return set(next(iter(Auto(comm).seconds.values())))

    assert run_ranks(4, work, local_size=2)[0] == {
        "native", "ring", "halving_doubling", "recursive_doubling", "hierarchical",
        "two_dimensional",
    }  # fmt: skip


# -- the communicator's verb ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMMING)
def test_all_reduce_with_algorithm_packs_all_kinds_of_tensors(name):
    def work(comm):
        xs = (
            torch.arange(6.0).reshape(2, 3).t(),
            torch.tensor(comm.rank, dtype=torch.int16),
            torch.empty(0, 3),
            torch.tensor([1 + 2j, 3j]),
            torch.ones(10)[::3],
            torch.nn.Parameter(torch.ones(2)),
            torch.tensor([1.0]).expand(1),
        )
        assert comm.all_reduce(xs, algorithm=name) is xs
        mean = comm.all_reduce(torch.tensor([1.0, comm.rank]), "mean", algorithm=name)
        pending = comm.all_reduce(torch.ones(2), algorithm=name, async_op=True)
        return [x.tolist() for x in xs], mean.tolist(), pending.wait().tolist()

    for xs, mean, ones in run_ranks(3, work):
        assert xs == [
            [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]], 3, [], [3 + 6j, 9j], [3.0] * 4, [3.0] * 2, [3.0]
        ]  # fmt: skip
        assert mean == [1.0, 1.0]
        assert ones == [3.0, 3.0]


def test_all_reduce_makes_an_algorithm_once():
    def work(comm):
        for _ in range(3):
            x = comm.all_reduce(torch.ones(3), algorithm="dummy")
        right = comm.all_reduce(torch.ones(3), algorithm="native")
        return x.tolist(), right.tolist(), len(comm._algorithms)

    assert run_ranks(2, work) == [([1.0] * 3, [2.0] * 3, 1)] * 2


def test_bad_arguments():
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match=r"`algorithm` \(='rong'\): did you mean `ring`"):
        comm.all_reduce(torch.ones(1), algorithm="rong")
    with pytest.raises(UsageError, match=r"`op` \(='max'\) is not what `algorithm` \(='ring'\)"):
        comm.all_reduce(torch.ones(1), "max", algorithm="ring")
    with pytest.raises(UsageError, match=r"`algorithm` \(='rong'\)"):
        make_algorithm("rong", comm)
    with pytest.raises(UsageError, match=r"`order` \(=\(0, 0\)\) must name each of the ranks"):
        Ring(comm, order=(0, 0))


def test_ring_refuses_different_orders():
    """Whose sums would be of other parts of the tensor."""

    def work(comm):
        with pytest.raises(DisagreementError, match=r"ranks 0, 1 want: .* \(0, 1, 2\); rank 2 .*"):
            Ring(comm, order=(0, 2, 1) if comm.rank == 2 else (0, 1, 2))

    run_ranks(3, work)


def test_all_reduce_refuses_different_algorithms():
    def work(comm):
        comm.all_reduce(torch.ones(1), algorithm="ring" if comm.rank else "dummy")

    with pytest.raises(DisagreementError, match=r"wants: `all_reduce` with sum \((dummy|ring)\)"):
        run_ranks(2, work)


def test_two_dimensional_refuses_unequal_nodes():
    def work(comm):
        comm.local_size = 1 + (comm.rank == 2)
        with pytest.raises(UsageError, match=r"1 on rank 0's and 2 on rank 2's; use 'hier"):
            TwoDimensional(comm)

    run_ranks(3, work)


def test_make_algorithm_from_a_callable():
    def work(comm):
        return _sum(
            make_algorithm(lambda c: Ring(c, order=(2, 0, 1)), comm), torch.ones(2)
        ).tolist()

    assert run_ranks(3, work) == [[3.0, 3.0]] * 3
    assert isinstance(make_algorithm(Dummy, Communicator.single_process()), Dummy)


def test_make_algorithm_defaults_to_shared_memory_on_one_host():
    assert run_ranks(2, lambda comm: make_algorithm(None, comm).name) == ["shared_memory"] * 2
    names = run_ranks(2, lambda comm: make_algorithm(None, comm).name, local_size=1)
    assert names == ["native"] * 2
    assert make_algorithm(None, Communicator.single_process()).name == "native"


@pytest.mark.parametrize("name", SUMMING)
def test_a_failing_rank_ends_the_algorithm_of_the_others(name):
    def work(comm):
        algorithm = make_algorithm(name, comm)
        algorithm.reduce_(torch.ones(3))
        if comm.rank == 3:
            raise KeyError("the cause")
        with pytest.raises(CommunicationError):
            algorithm.reduce_(torch.ones(50_000))
        raise PeerLostError("a consequence")

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(4, work, local_size=2, timeout_s=20)


def _sum(algorithm, x: Tensor) -> Tensor:
    algorithm.reduce_(x)
    return x
