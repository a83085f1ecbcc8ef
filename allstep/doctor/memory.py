"""How fast a machine's memory is copied."""

from statistics import median
from time import perf_counter

import torch

from allstep.comm import Communicator
from allstep.doctor.timing import agreed_repeats, slowest_s, synchronize

__all__ = ["measure_copy_s_per_byte"]

_COPY_BYTES = 32 << 20
_COPY_S = 0.5
_NUM_ROUNDS = 7


def measure_copy_s_per_byte(comm: Communicator) -> float:
    """The slowest worker's, of memory in no cache, while all workers copy. Collective."""
    source = torch.ones(_COPY_BYTES // 4, device=comm.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(comm.device)

    copy()
    comm.barrier()
    num_copies = agreed_repeats(comm, copy, _COPY_S / _NUM_ROUNDS)
    rounds = []
    for _ in range(_NUM_ROUNDS):
        comm.barrier()
        start_s = perf_counter()
        for _ in range(num_copies):
            copy()
        rounds.append(slowest_s(comm, perf_counter() - start_s))
    return median(rounds) / num_copies / _COPY_BYTES
