"""A data set split over the workers, held by all of them or by one."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import allstep
from allstep import Communicator
from allstep.errors import DisagreementError, UsageError
from tests.helpers.ranks import run_ranks


def parts_of(size: int, dataset: Any, **arguments: Any) -> list[list[Any]]:
    def part(comm: Communicator) -> list[Any]:
        own = allstep.data.split(dataset, comm, **arguments)
        return [own[i] for i in range(len(own))]

    return run_ranks(size, part)


def test_blocks_in_order() -> None:
    assert parts_of(3, range(7)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert parts_of(3, range(2)) == [[0], [1], []]


def test_shuffled_parts_cover_the_set() -> None:
    first, again = (parts_of(3, range(20), shuffle=True, seed=1) for _ in range(2))
    assert first == again
    assert sorted(chain(*first)) == list(range(20))
    assert list(chain(*first)) != list(range(20))
    assert first != parts_of(3, range(20), shuffle=True, seed=2)


def test_equal_length_repeats_from_the_start() -> None:
    assert parts_of(3, range(7), equal_length=True) == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert parts_of(3, range(1), equal_length=True) == [[0], [0], [0]]


@pytest.mark.parametrize("root", [0, 2])
def test_from_one_worker(root: int) -> None:
    def part(comm: Communicator) -> list[Any]:
        dataset = None
        if comm.rank == root:
            dataset = [(torch.full((i % 3,), i), np.float32(i), {"name": f"{i}"}) for i in range(7)]
        own = allstep.data.split(dataset, comm, root=root)
        return [own[i] for i in range(len(own))]

    parts = run_ranks(3, part)
    assert [len(part) for part in parts] == [3, 2, 2]
    for i, (x, y, z) in enumerate(chain(*parts)):
        assert torch.equal(x, torch.full((i % 3,), i))
        assert (y, z) == (i, {"name": f"{i}"})


def test_tensors_from_one_worker_stay_tensors() -> None:
    def part(comm: Communicator) -> Any:
        dataset = TensorDataset(torch.arange(5), torch.ones(5, 2)) if comm.rank == 0 else None
        return allstep.data.split(dataset, comm, root=0, shuffle=True)

    parts = run_ranks(2, part)
    assert all(type(own) is TensorDataset for own in parts)
    assert sorted(torch.cat([own.tensors[0] for own in parts]).tolist()) == list(range(5))


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (range(0), {}, r"`dataset` is empty"),
        (iter([1]), {}, r"`dataset` \(a list_iterator\) has no length"),
        (DataLoader([1]), {}, r"`dataset` \(a DataLoader\) has no length or can't be indexed"),
        (range(3), {"root": 2}, r"`root` \(=2\) must be a rank, 0 to 1"),
        (range(3), {"root": "0"}, r"`root` \(='0'\) must be a rank"),
        (range(3), {"root": -1}, r"`root` \(=-1\) must be a rank"),
    ],
)
def test_messages(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parts_of(2, dataset, **arguments)


@pytest.mark.parametrize("dataset", [[], iter([1])])
def test_the_roots_mistake_ends_every_worker(dataset: Any) -> None:
    def part(comm: Communicator) -> str:
        with pytest.raises(UsageError, match="`dataset`") as caught:
            allstep.data.split(dataset if comm.rank == 0 else None, comm, root=0)
        return str(caught.value)

    assert len(run_ranks(2, part)) == 2


def test_range_of_a_part_as_the_migration_page_has_it() -> None:
    """ChainerMN's `scatter_index`."""

    def found(comm: Communicator) -> tuple[int, int]:
        part = allstep.data.split(range(10), comm)
        begin, end = part[0], part[len(part) - 1] + 1  # type: ignore[arg-type]
        return begin, end

    assert run_ranks(3, found) == [(0, 4), (4, 7), (7, 10)]


def test_loader_of_data_that_only_rank_0_has() -> None:
    """As the migration pages have it; the batches are those of a single process."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(13, 3, generator=generator), torch.arange(13)

    def seen(comm: Communicator) -> list[tuple[int, list[int]]]:
        x, y = comm.broadcast(data if comm.rank == 0 else None)
        loader = allstep.data.loader(TensorDataset(x, y), comm, global_batch=6, micro_batch=2)
        found = []
        with loader:
            for batch in loader.global_batches():
                for micro_batch in batch.micro_batches:
                    values, labels = micro_batch.data
                    assert torch.equal(values, data[0][labels])
                    found.append((batch.step, labels.tolist()))
        return found

    (whole,) = run_ranks(1, seen)
    parts = run_ranks(3, seen)
    assert sorted(chain(*parts)) == sorted(whole)
    assert all(len(part) < len(whole) for part in parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: {"dataset": range(8 + rank)}, r"len\(dataset\).*8.*9"),
        (lambda rank: {"seed": rank, "shuffle": True}, "seed"),
        (lambda rank: {"shuffle": rank == 0}, "shuffle"),
        (lambda rank: {"equal_length": rank == 0}, "equal_length"),
        (lambda rank: {"root": rank}, "root"),
    ],
    ids=["length", "seed", "shuffle", "equal_length", "root"],
)
def test_workers_that_split_otherwise_are_refused(
    arguments: Callable[[int], dict[str, Any]], message: str
) -> None:
    """Their parts would overlap, and leave samples out."""

    def part(comm: Communicator) -> None:
        with pytest.raises(DisagreementError, match=f"split a data set(?s:.*){message}"):
            allstep.data.split(comm=comm, **({"dataset": range(8)} | arguments(comm.rank)))

    run_ranks(2, part, timeout_s=5)
