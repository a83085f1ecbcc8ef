"""Streams: the same micro-batches for all, or uneven ones that end together."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks
from allstep.errors import DisagreementError, UsageError
from tests.data.sets import Counting
from tests.helpers.processes import run_processes

NUM_SAMPLES = 45

Found = dict[tuple[int, int], tuple[list[int], Tensor]]


def read(
    comm: Communicator,
    dataset: IterableDataset[Any],
    num_epochs: int = 1,
    state: dict[str, int] | None = None,
    **changes: Any,
) -> tuple[Found, list[int]]:
    """(step, micro-batch) -> samples, and the samples of each global batch."""
    arguments: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 3} | changes
    found: Found = {}
    totals = []
    with allstep.data.loader(dataset, comm, **arguments) as loader:
        if state:
            loader.load_state_dict(state)
        while loader.epoch < num_epochs:
            for batch in loader.global_batches():
                totals.append(batch.num_samples)
                for micro in batch.micro_batches:
                    numbers, draws = micro.data
                    found[batch.step, micro.index] = (numbers.tolist(), draws)
    return found, totals


def read_replicated(comm: Communicator, **changes: Any) -> tuple[Found, list[int]]:
    return read(comm, Counting(NUM_SAMPLES), **changes)


def assert_same(parts: list[tuple[Found, list[int]]], expected: tuple[Found, list[int]]) -> None:
    merged: Found = {}
    for found, totals in parts:
        assert totals == expected[1]
        assert not merged.keys() & found.keys()
        merged |= found
    assert merged.keys() == expected[0].keys()
    for place, (numbers, draws) in expected[0].items():
        assert merged[place][0] == numbers
        assert torch.equal(merged[place][1], draws)


def replicated_with_processes(comm: Communicator, num_workers: int) -> tuple[Found, list[int]]:
    return read_replicated(comm, num_workers=num_workers, num_epochs=2)


@pytest.mark.process
@pytest.mark.parametrize(("size", "num_workers"), [(1, 2), (2, 0), (3, 0), (2, 2), (5, 0)])
def test_replicated_streams_give_the_same_micro_batches(size: int, num_workers: int) -> None:
    expected = read_replicated(Communicator.lone(), num_epochs=2)
    assert expected[1] == [8, 8, 8, 8, 8, 5] * 2
    assert_same(run_processes(size, replicated_with_processes, num_workers), expected)


def test_drop_last_of_a_stream() -> None:
    _, totals = read_replicated(Communicator.lone(), drop_last=True)
    assert totals == [8] * 5


def test_a_stream_is_resumed_where_it_stood() -> None:
    expected, _ = read_replicated(Communicator.lone(), num_epochs=2)
    loader = allstep.data.loader(
        Counting(NUM_SAMPLES), Communicator.lone(), global_batch=8, micro_batch=2, seed=3
    )
    for _, batch in zip(range(3), loader.global_batches(), strict=False):
        list(batch.micro_batches)
    state = loader.state_dict()
    assert state["samples"] == 24
    rest, _ = read_replicated(Communicator.lone(), num_epochs=2, state=state)
    assert rest.keys() == {place for place in expected if place[0] >= 3}
    assert all(rest[place][0] == expected[place][0] for place in rest)
    assert all(torch.equal(rest[place][1], expected[place][1]) for place in rest)


@pytest.mark.parametrize("lengths", [(0, 7, 50), (8, 8), (1, 0, 0, 0), (0, 0)])
def test_uneven_streams_end_together(lengths: tuple[int, ...]) -> None:
    def read_own(comm: Communicator) -> tuple[Found, list[int]]:
        own = Counting(lengths[comm.rank], start=100 * comm.rank)
        return read(comm, own, stream="sharded")

    results = run_ranks(len(lengths), read_own)
    seen = sorted(n for found, _ in results for numbers, _ in found.values() for n in numbers)
    assert seen == [100 * rank + i for rank, n in enumerate(lengths) for i in range(n)]
    assert len({tuple(totals) for _, totals in results}) == 1  # all saw the same global batches
    assert sum(results[0][1]) == sum(lengths)
    places = [place for found, _ in results for place in found]
    assert len(places) == len(set(places))  # a micro-batch's index is its own among all workers


def test_uneven_streams_in_training_end_together() -> None:
    """Through `steps`: the gradient is the mean over whatever samples there were."""

    def train(comm: Communicator) -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False).double()
        exchange = allstep.attach(model, comm)
        own = Counting((3, 0, 9)[comm.rank], start=10 * comm.rank)
        loader = allstep.data.loader(own, comm, global_batch=6, micro_batch=2, stream="sharded")
        found = []
        for batch in allstep.steps(loader, exchange):
            for numbers, _ in batch:
                batch.backward(model(numbers.double()[:, None]).mean())
            assert model.weight.grad is not None
            found.append(float(model.weight.grad))
            model.zero_grad()
        return found

    # Two samples of each worker a step: (0, 1 | 20, 21), (2 | 22, 23), (24, 25), (26, 27), (28)
    expected = [42 / 4, 47 / 3, 49 / 2, 53 / 2, 28.0]
    for found in run_ranks(3, train):
        assert found == pytest.approx(expected)


def test_replicated_streams_that_differ() -> None:
    def read_wrongly(comm: Communicator) -> None:
        with pytest.raises(DisagreementError, match=r"batch 1 .* 8 \(rank 0\), 2 \(rank 1\)"):
            read(comm, Counting(16 if comm.rank == 0 else 10))

    run_ranks(2, read_wrongly)


def test_wrong_arguments() -> None:
    comm = Communicator.lone()
    with pytest.raises(UsageError, match=r"`shuffle` \(=True\) needs a map-style"):
        allstep.data.loader(Counting(4), comm, global_batch=2, micro_batch=1, shuffle=True)
    loader = allstep.data.loader(Counting(4), comm, global_batch=2, micro_batch=1)
    with pytest.raises(UsageError, match="no valid `samples`"):
        loader.load_state_dict({})
    assert [numbers.tolist() for numbers, _ in loader] == [[0], [1], [2], [3]]


def test_wrong_arguments_on_several_workers() -> None:
    def start(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"has 1 micro-batches for 2 workers.*use 4 or more"):
            allstep.data.loader(
                Counting(4), comm, global_batch=2, micro_batch=2, stream="sharded"
            )
        loader = allstep.data.loader(
            Counting(4), comm, global_batch=2, micro_batch=1, stream="sharded"
        )
        with pytest.raises(UsageError, match="plain loop would weigh wrongly"):
            iter(loader)
        state = loader.state_dict() | {"workers": 3}
        with pytest.raises(UsageError, match="Resume on 3 workers"):
            loader.load_state_dict(state)

    run_ranks(2, start)
