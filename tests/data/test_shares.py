"""Which worker runs which micro-batches, when workers differ in speed."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.data.sampler import local_part
from allstep.data.shares import Shares
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.ranks import run_ranks

NUM_MICRO_BATCHES, MICRO_BATCH = 8, 4


def longest_by_trial(num: int, seconds: tuple[float, ...]) -> float:
    """Of all cuts the one whose last worker is done earliest, with a piece for each."""
    size = len(seconds)
    cuts = itertools.combinations(range(1, num), size - 1)
    return min(
        max((b - a) * s for a, b, s in zip((0, *cut), (*cut, num), seconds, strict=True))
        for cut in cuts
    )


def test_a_measured_cut_is_the_fastest_of_all() -> None:
    for seconds in [(1.0, 2.9), (1.0, 1.0, 3.0), (0.7, 0.2, 0.5), (5.0, 1.0, 1.0, 2.0)]:
        for num in range(len(seconds), 12):
            shares = Shares("measured", len(seconds))
            moved = [shares.follow(seconds, num) for _ in range(10)]
            parts = shares.parts(num)
            assert [i for part in parts for i in part] == list(range(num))  # each once, in order
            longest = max(len(part) * s for part, s in zip(parts, seconds, strict=True))
            if any(moved):
                assert longest == pytest.approx(longest_by_trial(num, seconds))
            else:  # not worth it
                assert longest * 0.9 <= longest_by_trial(num, seconds)


def test_equal_shares_are_cut_as_ever() -> None:
    for size, num in itertools.product(range(1, 7), range(13)):
        expected = tuple(local_part(num, rank, size) for rank in range(size))
        assert Shares("equal", size).parts(num) == expected
        assert Shares("measured", size).parts(num) == expected  # before anything is measured


def test_given_shares_cut_in_proportion() -> None:
    assert [len(part) for part in Shares([3, 1], 2).parts(8)] == [6, 2]
    assert [len(part) for part in Shares([3, 1], 2).parts(5)] == [4, 1]
    assert [len(part) for part in Shares([1, 1, 2], 3).parts(4)] == [1, 1, 2]


def test_small_differences_and_single_pauses_move_nothing() -> None:
    shares = Shares("measured", 2)
    for step in range(100):
        assert not shares.follow([0.1, 0.11 + (step % 10 == 0)], NUM_MICRO_BATCHES)
    assert shares.in_words(NUM_MICRO_BATCHES) is None


def test_steps_in_which_a_worker_had_nothing_are_left_out() -> None:
    shares = Shares("measured", 2)
    for _ in range(20):
        assert not shares.follow([0.1, 0.0], NUM_MICRO_BATCHES)


def test_speeds_that_swap_are_followed_within_fifty_steps() -> None:
    shares = Shares("measured", 2)
    for slow in (1, 0, 1):
        seconds = [0.1, 0.1]
        seconds[slow] = 0.3
        moves = [step for step in range(50) if shares.follow(seconds, NUM_MICRO_BATCHES)]
        assert len(moves) == 1  # and then it stays
        assert [len(part) for part in shares.parts(NUM_MICRO_BATCHES)][slow] == 2
        words = shares.in_words(NUM_MICRO_BATCHES)
        assert words == f"rank {slow} is 3.0x slower: 2 of 8 micro-batches"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ([3, 1, 1], "has 3 numbers for 2 workers"),
        ([1, 0], "must be positive"),
        ([1, -1], "must be positive"),
        ([1, float("nan")], "must be positive"),
        ([1, True], "must be positive"),
        ("fair", "'equal', 'measured' or numbers"),
    ],
)
def test_shares_that_are_none_are_refused(how: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Shares(how, 2)


# -- in a training ------------------------------------------------------------------------------


class Clock:
    """Time that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def samples() -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(84, 6, generator=drawn), torch.randint(3, (84,), generator=drawn)
    )


def make_model(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=drawn))
    return model.to(dtype)


def train(
    comm: Communicator,
    shares: Any = "equal",
    *,
    compression: str = "fp32",
    dtype: torch.dtype = torch.float64,
    num_workers: int = 0,
    num_epochs: int = 7,
) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """Rank 1 is three times slower than others, and from step 12 on rank 0 is.

    Returns:
        The model's state; this worker's micro-batches in each step; the samples that it saw.
    """
    model = make_model(dtype)
    policy = allstep.Synchronous(compression=compression)
    exchange = allstep.attach(model, comm, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    clock, counts, seen = Clock(), [], []
    with allstep.data.loader(
        samples(),
        comm,
        global_batch=NUM_MICRO_BATCHES * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        shares=shares,
        num_workers=num_workers,
    ) as loader:
        for _ in range(num_epochs):
            for batch in allstep.steps(loader, exchange, clock=clock):
                slow = 1 if batch.step < 12 else 0
                counts.append(0)
                for x, y in batch:
                    clock.now_s += 0.3 if comm.rank == slow else 0.1
                    counts[-1] += 1
                    assert batch.micro_batch is not None
                    seen.append((batch.step, batch.micro_batch.index, x.double().sum().item()))
                    batch.backward(nn.functional.cross_entropy(model(x.to(dtype)), y))
                optimizer.step()
                optimizer.zero_grad()
    exchange.detach()
    return model.state_dict(), counts, seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_measured_shares_follow_the_workers_and_change_nothing(num_workers: int) -> None:
    """Moved twice while running, with loader processes that had read ahead, too."""
    ((alone, _, whole),) = run_ranks(1, train)
    found = run_ranks(2, lambda comm: train(comm, "measured", num_workers=num_workers))
    for state, _, _ in found:
        assert state_difference(state, alone) < 1e-10
    assert sorted([*found[0][2], *found[1][2]]) == sorted(whole)  # every sample once
    pairs = list(zip(found[0][1], found[1][1], strict=True))
    full = [pair for pair in pairs if sum(pair) == NUM_MICRO_BATCHES]
    assert full[0] == (4, 4) and full[-1] == (2, 6)
    assert (6, 2) in full[:9]
    assert len(dict.fromkeys(full)) <= 4  # few moves, not back and forth


@pytest.mark.parametrize("shares", ["measured", [3, 1, 2]])
def test_exact_sums_don_t_depend_on_the_shares(shares: Any) -> None:
    """In float32 not a bit differs; the usual sums do."""

    def run(shares: Any, compression: str) -> list[Any]:
        return run_ranks(
            3,
            lambda comm: train(
                comm, shares, compression=compression, dtype=torch.float32, num_epochs=4
            ),
        )

    equal, uneven = run("equal", "exact"), run(shares, "exact")
    assert equal[0][1] != uneven[0][1]
    for state, _, _ in uneven:
        assert not differing_names(state, equal[0][0])
    assert differing_names(run(shares, "fp32")[0][0], run("equal", "fp32")[0][0])


def test_an_evaluation_shares_out_alike_and_counts_the_same() -> None:
    def metrics(model: nn.Module, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return {"mean": (batch[0].sum(), len(batch[0]))}

    def evaluate(comm: Communicator, shares: Shares | None) -> float:
        evaluator = allstep.Evaluator(metrics, samples(), comm, micro_batch=4, shares=shares)
        return evaluator(nn.Identity())["mean"]

    seen: list[int] = []
    expected = evaluate(Communicator.single_process(), None)
    assert run_ranks(2, lambda comm: evaluate(comm, Shares([5, 1], 2))) == [expected, expected]
    assert sum(seen) == 2 * len(samples())


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from torch.arange(40.0)


def test_streams_take_given_shares_only() -> None:
    def indices(comm: Communicator, shares: Any) -> list[list[int]]:
        loader = allstep.data.loader(Stream(), comm, global_batch=16, micro_batch=2, shares=shares)
        return [[m.index for m in batch.micro_batches] for batch in loader.global_batches()]

    first, second = run_ranks(2, lambda comm: indices(comm, [3, 1]))
    assert first[0] == [0, 1, 2, 3, 4, 5] and second[0] == [6, 7]

    def refused(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="map-style"):
            indices(comm, "measured")

    run_ranks(2, refused)


def test_unequal_shares_are_refused_where_they_would_be_wrong() -> None:
    def run(comm: Communicator) -> None:
        loader = allstep.data.loader(
            samples(), comm, global_batch=8, micro_batch=4, shares=[3, 1], drop_last=True
        )
        with pytest.raises(UsageError, match="plain loop"):
            iter(loader)
        model = make_model(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = allstep.LocalSGD(sync_every=2)
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
        with pytest.raises(UsageError, match=r"`shares`.*LocalSGD"):
            allstep.steps(loader, exchange)

    run_ranks(2, run)
    with pytest.raises(UsageError, match=r"`shares`.*`sync_every`"):
        allstep.TrainOptions(shares="3,1", sync_every=4)
    with pytest.raises(UsageError, match="number for each worker"):
        allstep.TrainOptions(shares="3:1")
