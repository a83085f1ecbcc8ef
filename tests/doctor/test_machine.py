"""The rate of matrix products, and of copies."""

from itertools import count

import pytest
import torch

from allstep.comm import Communicator
from allstep.doctor.machine import measure_copy_s_per_byte, measure_gemm_flops
from allstep.doctor.same_machine import compare_machines
from allstep.doctor.timing import Effort
from tests.helpers.ranks import run_ranks

SIZE = 64
RATE = 2 * SIZE**3 / 0.5


def rate_by_the_clock(comm):
    """Of products that take half a second each."""
    clock = count(0, 0.5).__next__
    return measure_gemm_flops(comm, torch.float32, seconds=0.0, size=SIZE, clock=clock)


def test_gemm_rate_is_work_over_time():
    assert rate_by_the_clock(Communicator.single_process()) == RATE


def test_gemm_rates_of_workers_add_up():
    assert run_ranks(3, rate_by_the_clock) == [3 * RATE] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gemm_rate_of_a_real_product(dtype):
    rate = measure_gemm_flops(Communicator.single_process(), dtype, seconds=0.001, size=SIZE)
    assert rate > 1e6


def test_copy_rate_is_the_same_on_all_workers():
    effort = Effort(copy_bytes=1 << 16, batch_s=0.001)
    first, second = run_ranks(2, lambda comm: measure_copy_s_per_byte(comm, effort))
    assert first == second > 0


def test_workers_of_one_machine_compute_alike() -> None:
    for found in run_ranks(2, compare_machines):
        assert len(found) == 5
        assert all(len(set(hashes)) == 1 for hashes in found.values()), found


def test_numbers_of_threads_are_told_apart() -> None:
    """Some machines' kernels don't depend on it, but convolutions' gradients do on every CPU."""

    def worker(comm: Communicator) -> dict[str, list[str]]:
        torch.set_num_threads(1 + 2 * comm.rank)
        return compare_machines(comm)

    before = torch.get_num_threads()
    try:
        found = run_ranks(2, worker)[0]
    finally:
        torch.set_num_threads(before)
    assert any(len(set(hashes)) > 1 for hashes in found.values())
