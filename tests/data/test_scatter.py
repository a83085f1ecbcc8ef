import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks
from allstep.errors import UsageError


def samples(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("root", [None, 1])
def test_parts_cover_the_set(root: int | None, shuffle: bool) -> None:
    def split(comm: Communicator) -> list[int]:
        dataset = samples(11) if root in (None, comm.rank) else None
        part = allstep.scatter(dataset, comm, shuffle=shuffle, seed=4, root=root)
        return [int(part[i][0]) for i in range(len(part))]

    parts = run_ranks(3, split)
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert {len(part) for part in parts} == {3, 4}
    assert (parts[0] == [0, 1, 2, 3]) is not shuffle


def test_equal_length_repeats_from_the_start() -> None:
    def split(comm: Communicator) -> list[int]:
        part = allstep.scatter(samples(5), comm, equal_length=True)
        return [int(part[i][0]) for i in range(len(part))]

    assert run_ranks(3, split) == [[0, 1], [2, 3], [4, 0]]


def test_tensors_travel_whole() -> None:
    def split(comm: Communicator) -> tuple[Tensor, str]:
        whole = [(torch.full((2, 2), float(i)), f"name {i}") for i in range(2)]
        part = allstep.scatter(whole if comm.rank == 0 else None, comm, root=0)  # type: ignore
        sample: tuple[Tensor, str] = part[0]
        return sample

    for rank, (tensor, name) in enumerate(run_ranks(2, split)):
        assert torch.equal(tensor, torch.full((2, 2), float(rank)))
        assert name == f"name {rank}"


def test_wrong_arguments() -> None:
    comm = Communicator.lone()
    with pytest.raises(UsageError, match="`dataset` is empty"):
        allstep.scatter(samples(0), comm)
    with pytest.raises(UsageError, match=r"`root` \(=1\) must be a rank, 0 to 0"):
        allstep.scatter(samples(3), comm, root=1)
