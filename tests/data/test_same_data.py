"""Workers that give a loader or an evaluator different data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import allstep
from allstep import Communicator
from allstep.data.processes import LoaderProcesses
from allstep.data.same_data import check_same_samples
from allstep.errors import DisagreementError
from tests.helpers.ranks import run_ranks

NUM_SAMPLES = 24


class Samples(Dataset[Any]):
    """Made when they are read: (an array, a number, a name)."""

    def __init__(self, draw: Callable[[int], float], num_samples: int = NUM_SAMPLES) -> None:
        self._draw, self._num_samples = draw, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, self._draw(index)), "y": index, "name": f"sample {index}"}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(NUM_SAMPLES))


def numbers(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(float(num_samples)))


def make_loader(comm: Communicator, dataset: Dataset[Any], **changes: Any) -> None:
    arguments = {"global_batch": 8, "micro_batch": 2} | changes
    allstep.data.loader(dataset, comm, **arguments).close()  # type: ignore[arg-type]


def message_of(call: Callable[[Communicator], object], size: int = 3) -> str:
    """What all ranks are told."""

    def worker(comm: Communicator) -> str:
        with pytest.raises(DisagreementError) as caught:
            call(comm)
        return str(caught.value)

    (message,) = set(run_ranks(size, worker, timeout_s=20))
    return message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "`seed` is 0 on ranks 0, 2; 1 on rank 1."),
        ({"shuffle": False}, "`shuffle` is True on ranks 0, 2; False on rank 1."),
        ({"global_batch": 4}, "`global_batch` is 8 on ranks 0, 2; 4 on rank 1."),
        ({"micro_batch": 4}, "`micro_batch` is 2 on ranks 0, 2; 4 on rank 1."),
        ({"micro_batch": 3}, "`micro_batch` is 2 on ranks 0, 2; 3 on rank 1."),
        ({"drop_last": True}, "`drop_last` is False on ranks 0, 2; True on rank 1."),
    ],
)
def test_a_loader_names_the_argument_and_the_ranks(changes: dict[str, Any], named: str) -> None:
    message = message_of(
        lambda comm: make_loader(
            comm, numbers(), **({"seed": 0} | changes if comm.rank == 1 else {})
        )
    )
    assert message.startswith("Workers that make a loader disagree: ")
    assert named in message


def test_a_stream_is_asked_for_its_arguments_only() -> None:
    def worker(comm: Communicator) -> None:
        make_loader(comm, Stream())

    run_ranks(2, worker)
    message = message_of(lambda comm: make_loader(comm, Stream(), seed=comm.rank), 2)
    assert "`seed` is 0 on rank 0; 1 on rank 1" in message


def test_a_loader_names_another_length() -> None:
    message = message_of(lambda comm: make_loader(comm, numbers(24 - (comm.rank == 2))))
    assert "`len(dataset)` is 24 on ranks 0, 1; 23 on rank 2" in message


def test_a_loader_names_samples_in_another_order() -> None:
    """As of a folder whose files each worker lists as they come; the first may be the same."""
    order = list(range(NUM_SAMPLES))

    def of(rank: int) -> Subset[Any]:
        return Subset(numbers(), order if rank else [0, *reversed(order[1:])])

    message = message_of(lambda comm: make_loader(comm, of(comm.rank)))
    assert "`dataset[1]` is content" in message
    assert "on rank 0; content" in message
    assert "`dataset[0]`" not in message


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_read_as_in_training(num_workers: int) -> None:
    """Random transforms draw from (seed, epoch, sample), in a loader process if there is one."""

    def worker(comm: Communicator) -> Any:
        state = np.random.get_state()[1].copy()  # type: ignore[index]
        make_loader(comm, Samples(lambda _: np.random.rand()), num_workers=num_workers)
        return np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]

    assert run_ranks(2, worker) == [True] * 2
    message = message_of(
        lambda comm: make_loader(comm, Samples(lambda i: i + comm.rank), num_workers=num_workers), 2
    )
    assert "`dataset[0]` is content" in message


def test_samples_that_no_reading_repeats_are_left_out() -> None:
    """A generator that is kept from sample to sample may be seeded by rank."""

    def worker(comm: Communicator) -> None:
        generator = np.random.default_rng(comm.rank)
        make_loader(comm, Samples(lambda _: generator.random()))

    run_ranks(2, worker)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_that_cannot_read_a_sample_raises_why(num_workers: int) -> None:
    def read(rank: int, index: int) -> float:
        if rank == 1 and index == 1:
            raise OSError("no such file")
        return index

    def worker(comm: Communicator) -> str:
        samples = Samples(lambda i: read(comm.rank, i))
        with pytest.raises(OSError if comm.rank == 1 else DisagreementError) as caught:
            make_loader(comm, samples, num_workers=num_workers)
        return str(caught.value)

    for rank, message in enumerate(run_ranks(3, worker, timeout_s=20)):
        if rank == 1:
            assert "no such file" in message
        else:
            assert "`dataset[1]` is content" in message
            assert "not readable (OSError) on rank 1" in message


@pytest.mark.parametrize("what", ["seed", "micro_batch", "len(dataset)", "dataset[0]"])
def test_an_evaluator_names_the_argument_and_the_ranks(what: str) -> None:
    def worker(comm: Communicator) -> None:
        is_other = comm.rank == 1
        dataset = numbers(20) if is_other and what == "len(dataset)" else numbers()
        if is_other and what == "dataset[0]":
            dataset.tensors[0][0] = -1.0
        arguments = {"seed": 0, "micro_batch": 2}
        if is_other and what in arguments:
            arguments[what] = 5
        allstep.Evaluator(lambda model, batch: {"n": (1, 1)}, dataset, comm, **arguments)(nn.ReLU())

    message = message_of(worker)
    assert message.startswith("Workers that evaluate a model disagree: ")
    assert f"`{what}` is" in message
    assert "on ranks 0, 2; " in message


def test_a_loader_at_another_position_is_told_at_the_first_exchange() -> None:
    """It was found at the epoch's end, as a disagreement about running statistics."""

    def worker(comm: Communicator) -> None:
        model = nn.Linear(1, 1)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(numbers(), comm, global_batch=8, micro_batch=2)
        if comm.rank:
            loader.load_state_dict({"samples": 8, "steps": 0})
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                batch.backward(model(x[:, None]).sum())

    message = message_of(worker, 2)
    assert "rank 0 wants: exchange gradients 0, of global batch 0 (8 samples after 0 o" in message
    assert "rank 1 wants: exchange gradients 0, of global batch 0 (8 samples after 8 o" in message


def test_samples_of_every_kind_are_compared() -> None:
    """Tensors of any dtype, arrays, nested containers; of other objects only the type."""
    samples = [
        (torch.ones(2, dtype=torch.bfloat16), np.float32(1)),
        {"a": [1, "b", None, b"c", True], "d": object()},
        torch.zeros(0, 3),
    ]

    def worker(comm: Communicator) -> None:
        check_same_samples(comm, "look", samples, LoaderProcesses(), 0)  # type: ignore[arg-type]

    run_ranks(2, worker)
