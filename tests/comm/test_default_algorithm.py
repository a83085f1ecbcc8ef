"""What sums are taken with where nobody says."""

import pytest
import torch

from allstep.comm.algorithms import default_algorithm
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(
    ("n", "local_size", "full", "half"),
    [
        (1, 1, "native", "native"),
        (2, 2, "shared_memory", "shared_memory"),
        (2, 1, "native", "recursive_doubling"),
        (4, 1, "native", "native"),
        (4, 2, "native", "native"),
    ],
)
def test_default_algorithm_by_hosts_and_dtype(n, local_size, full, half):
    def work(comm):
        return [default_algorithm(comm, dtype) for dtype in (torch.float32, torch.float16)]

    assert run_ranks(n, work, local_size=local_size) == [[full, half]] * n
