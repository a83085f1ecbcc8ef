"""Every verb on a real GPU, over Gloo and over NCCL; see `tests.helpers.on_gpu`."""

import pytest
import torch

from allstep.comm import Communicator
from tests.helpers.on_gpu import over_links, run_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.process]


def sum_over_ranks(comm: Communicator) -> None:
    whole = sum(torch.arange(5.0) + rank for rank in range(comm.size))
    for algorithm in ("native", "ring", "auto"):
        summed = comm.all_reduce(
            torch.arange(5.0, device=comm.device) + comm.rank, algorithm=algorithm
        )
        assert summed.device == comm.device
        assert torch.equal(summed.cpu(), whole)


@over_links
def test_sums_over_ranks(link: str) -> None:
    run_on_gpu(3, sum_over_ranks, link=link)
