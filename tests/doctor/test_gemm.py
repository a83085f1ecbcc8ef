import pytest
import torch

from allstep.comm import Communicator
from allstep.doctor import gemm
from allstep.doctor.gemm import measure_gemm_flops
from tests.helpers.ranks import run_ranks


@pytest.fixture
def slow_products(monkeypatch):
    """Each product takes 0.5 s by the clock, without being computed."""
    monkeypatch.setattr(gemm, "_time_product", lambda a, b, out: 0.5)
    return 2 * gemm._CPU_SIZE**3 / 0.5


def test_the_rate_is_the_work_over_the_time(slow_products):
    lone = Communicator.single_process()
    assert measure_gemm_flops(lone, torch.float32, seconds=0.0) == slow_products


def test_workers_add_up_and_agree(slow_products):
    rates = run_ranks(3, lambda comm: measure_gemm_flops(comm, torch.float32, seconds=0.0))
    assert rates == [3 * slow_products] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_real_product_is_measured(dtype, monkeypatch):
    monkeypatch.setattr(gemm, "_CPU_SIZE", 64)
    assert measure_gemm_flops(Communicator.single_process(), dtype, seconds=0.001) > 1e6
