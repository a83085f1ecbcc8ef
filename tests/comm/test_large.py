"""Many processes, and tensors of gigabytes."""

import psutil
import pytest
import torch

from allstep import Communicator
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

NUM_ELEMENTS = 1 << 29  # 2 GiB in float32, more than 32 bits count in bytes


def rank_sums(comm: Communicator) -> list[float]:
    total = comm.all_reduce(torch.full((1000,), float(comm.rank)))
    everyone = comm.all_gather_object(comm.rank)
    assert everyone == list(range(comm.size))
    return [float(total[0]), float(total[-1])]


@pytest.mark.slow
@pytest.mark.process
def test_sixteen_processes() -> None:
    assert run_processes(16, rank_sums, timeout_s=400) == 16 * [[120.0, 120.0]]


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 14 << 30, reason="needs 14 GiB of memory")
def test_a_tensor_of_two_gigabytes() -> None:
    def worker(comm: Communicator) -> tuple[float, float, float]:
        x = torch.full((NUM_ELEMENTS,), float(comm.rank + 1))
        x[-1] = 10.0 * comm.rank
        total = comm.all_reduce(x, algorithm="native")
        return float(total[0]), float(total[NUM_ELEMENTS // 2]), float(total[-1])

    assert run_ranks(2, worker, timeout_s=600) == 2 * [(3.0, 3.0, 10.0)]
