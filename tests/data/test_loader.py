"""Map-style loading: the same micro-batches, bit for bit, whoever fetches them."""

import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks
from allstep.data import MapLoader
from allstep.errors import UsageError
from tests.data.sets import Broken, Noisy
from tests.helpers.processes import run_processes

NUM_SAMPLES = 45  # five global batches of 8, and one of 5

Found = dict[tuple[int, int], tuple[list[int], Tensor]]  # (step, micro-batch) -> samples


def make_loader(comm: Communicator, **changes: Any) -> MapLoader:
    arguments: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 3} | changes
    loader = allstep.data.loader(Noisy(NUM_SAMPLES), comm, **arguments)
    assert isinstance(loader, MapLoader)
    return loader


def read(comm: Communicator, num_epochs: int = 2, num_workers: int = 0, **state: int) -> Found:
    """What this worker gets, by place."""
    found: Found = {}
    with make_loader(comm, num_workers=num_workers) as loader:
        if state:
            loader.load_state_dict(state)
        while loader.epoch < num_epochs:
            for batch in loader.global_batches():
                micro_batches = list(batch.micro_batches)
                assert len(micro_batches) == batch.num_local_micro_batches
                assert [m.is_last for m in micro_batches[:-1]] == [False] * len(micro_batches[:-1])
                for micro in micro_batches:
                    indices, numbers = micro.data
                    assert micro.num_samples == len(indices)
                    found[batch.step, micro.index] = (indices.tolist(), numbers)
                assert not micro_batches or micro_batches[-1].is_last
    return found


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for place, (indices, numbers) in expected.items():
        assert found[place][0] == indices
        assert torch.equal(found[place][1], numbers)


def together(parts: list[Found]) -> Found:
    merged: Found = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


@pytest.mark.process
@pytest.mark.parametrize(("size", "num_workers"), [(1, 2), (2, 0), (3, 1), (5, 0)])
def test_the_same_samples_with_the_same_augmentation(size: int, num_workers: int) -> None:
    expected = read(Communicator.lone())
    assert_same(together(run_processes(size, read, 2, num_workers)), expected)


def test_augmentation_without_a_state_for_each_sample_differs() -> None:
    """The control: the data set itself does draw anew each time."""
    assert not torch.equal(Noisy(1)[0][1], Noisy(1)[0][1])


def test_epochs_differ_in_order_and_augmentation() -> None:
    found = read(Communicator.lone())
    first = {i: n for (step, _), (s, ns) in found.items() if step < 6 for i, n in zip(s, ns)}
    second = {i: n for (step, _), (s, ns) in found.items() if step >= 6 for i, n in zip(s, ns)}
    assert first.keys() == second.keys() == set(range(NUM_SAMPLES))
    assert not any(torch.equal(first[i], second[i]) for i in first)


@pytest.mark.parametrize("num_done", [1, 4, 6, 9])
def test_resumed_on_another_number_of_workers(num_done: int) -> None:
    expected = read(Communicator.lone())
    loader = make_loader(Communicator.lone())
    for _ in range(num_done):
        next(iter(loader.global_batches()))
    state = loader.state_dict()
    assert state["steps"] == num_done
    rest = {place: samples for place, samples in expected.items() if place[0] >= num_done}
    found = together([read(FakeRank(rank, 3), **state) for rank in range(3)])
    assert_same(found, rest)


class FakeRank(Communicator):
    """A rank on its own: a map-style loader says nothing to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._place = (rank, size)

    rank = property(lambda self: self._place[0])  # type: ignore[assignment]
    size = property(lambda self: self._place[1])  # type: ignore[assignment]


def test_what_is_not_asked_for_is_passed_over() -> None:
    comm = Communicator.lone()
    expected = read(comm, num_epochs=1)
    for batch in make_loader(comm).global_batches():
        first = next(batch.micro_batches)
        assert first.data[0].tolist() == expected[batch.step, 0][0]


def test_the_random_state_outside_is_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    read(Communicator.lone(), num_epochs=1)
    assert draw() == expected


def test_tensors_are_indexed_at_once_and_alike() -> None:
    samples = TensorDataset(torch.arange(NUM_SAMPLES), torch.rand(NUM_SAMPLES))
    comm = Communicator.lone()
    subset = Subset(Subset(samples, list(range(40))), list(range(39, -1, -1)))
    for dataset in (samples, subset):
        fast = allstep.data.loader(dataset, comm, global_batch=8, micro_batch=4)
        slow = allstep.data.loader(
            dataset, comm, global_batch=8, micro_batch=4, collate_fn=torch.utils.data.default_collate
        )
        for a, b in zip(fast.global_batches(), slow.global_batches(), strict=True):
            for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
                assert all(map(torch.equal, x.data, y.data))


def test_plain_loop() -> None:
    def read_plainly(comm: Communicator) -> list[list[int]]:
        loader = make_loader(comm, global_batch=4, micro_batch=2, drop_last=True)
        return [indices.tolist() for indices, _ in loader]

    parts = run_ranks(2, read_plainly)
    assert [len(part) for part in parts] == [11, 11]
    assert len({i for part in parts for micro in part for i in micro}) == 44


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"`global_batch` \(=8\) must be 2 workers x `micro_batch` \(=2\) = 4"),
        ({"global_batch": 4}, r"last global batch has 1 of 4 samples.*`drop_last=True`"),
    ],
)
def test_plain_loop_with_unequal_shares(changes: dict[str, int], message: str) -> None:
    def start(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            iter(make_loader(comm, **changes))

    run_ranks(2, start)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_fails_is_named(num_workers: int) -> None:
    loader = allstep.data.loader(
        Broken(), Communicator.lone(), global_batch=4, micro_batch=4, num_workers=num_workers
    )
    with pytest.raises(OSError, match="disk on fire") as caught, loader:
        for batch in loader.global_batches():
            list(batch.micro_batches)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while fetching sample 5" in told


def _signals(worker_id: int) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.process
def test_loader_processes_leave_signals_to_the_training_process() -> None:
    loader = make_loader(Communicator.lone(), num_workers=1, worker_init_fn=_signals)
    with loader:
        assert len(list(loader.global_batches())) == len(loader) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": -1}, r"`num_workers` \(=-1\) must be 0 or more"),
        ({"prefetch_factor": 2}, r"`prefetch_factor` \(=2\) needs processes"),
        ({"stream": "shard"}, "`stream`.*did you mean `sharded`"),
        ({"micro_batch": 3}, "nearest: 6, 9"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(Communicator.lone(), **changes)


@pytest.mark.parametrize("state", [{}, {"samples": 3}, {"samples": -1, "steps": 0}])
def test_wrong_state(state: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="no valid `s"):
        make_loader(Communicator.lone()).load_state_dict(state)
