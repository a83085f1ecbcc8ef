"""Ranks as threads whose random numbers don't depend on which thread draws first."""

from collections.abc import Callable
from typing import TypeVar

import torch

from allstep import Communicator
from allstep.comm import threads
from tests.helpers.generators import rank_generator

T = TypeVar("T")


def run_ranks(
    n: int,
    fn: Callable[[Communicator], T],
    *,
    local_size: int | None = None,
    timeout_s: float = 30.0,
    seed: int = 0,
) -> list[T]:
    """`allstep.comm.threads.run_ranks`, each rank with random numbers of its own."""

    def seeded(comm: Communicator) -> T:
        # Asked for it, a new thread takes the process's number of threads; else its first product
        # of matrices would be made by more of them, with other last bits than the next.
        torch.get_num_threads()
        with rank_generator(1000 * seed + comm.rank):
            return fn(comm)

    return threads.run_ranks(n, seeded, local_size=local_size, timeout_s=timeout_s)
