"""Rows travel without a word about their shapes."""

import pytest
import torch

from allstep import UsageError
from allstep.comm import Communicator
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_into_tensor_and_single_move_the_right_rows(size: int, dtype: torch.dtype) -> None:
    def work(comm: Communicator) -> tuple[list[list[int]], list[list[int]]]:
        mine = torch.tensor([comm.rank, 7], dtype=dtype)
        table = (torch.arange(comm.size)[:, None] + 10 * comm.rank).to(dtype)
        return comm.all_gather_into_tensor(mine).tolist(), comm.all_to_all_single(table).tolist()

    for rank, (gathered, exchanged) in enumerate(run_ranks(size, work)):
        assert gathered == [[other, 7] for other in range(size)]
        assert exchanged == [[rank + 10 * other] for other in range(size)]


def test_into_tensor_and_single_of_empty_and_strided_tensors() -> None:
    def work(comm: Communicator) -> tuple[torch.Size, torch.Size, bool]:
        strided = torch.arange(6.0).view(2, 3).t()
        gathered = comm.all_gather_into_tensor(strided)
        return (
            comm.all_gather_into_tensor(torch.empty(0)).shape,
            comm.all_to_all_single(torch.empty(2, 0)).shape,
            torch.equal(gathered[1 - comm.rank], strided),
        )

    assert run_ranks(2, work) == [((2, 0), (2, 0), True)] * 2


def test_all_to_all_single_refuses_other_numbers_of_rows() -> None:
    with pytest.raises(UsageError, match=r"`x` has shape \[3\]; pass 1 rows"):
        Communicator.single_process().all_to_all_single(torch.ones(3))
