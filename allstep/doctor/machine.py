"""Rates of the workers' machines: matrix products and copies in memory."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from timeit import timeit

import torch

from allstep.comm import Communicator
from allstep.device import is_accelerator
from allstep.doctor.timing import USUAL_EFFORT, Effort, agreed_repeats, slowest_s, synchronize

_CUDA_SIZE = 8192
_NUM_COPY_ROUNDS = 7


def measure_gemm_flops(
    comm: Communicator,
    dtype: torch.dtype,
    seconds: float = 0.3,
    *,
    size: int = Effort.matrix_size,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Floating-point operations per second of square matrix products, on all workers at once.

    rate = sum over workers of max over repeats of 2 * size^3 / seconds_per_product

    Workers that share a host multiply at the same time, as they do in training.

    Args:
        comm: all of its workers must call this.
        dtype: of the matrices.
        seconds: how long to repeat the product, at least once.
        size: rows and columns on a CPU; a GPU's matrices are larger.
        clock: of seconds.

    Returns:
        The sum over all workers, the same on each, in 1/s.
    """
    size = _CUDA_SIZE if is_accelerator(comm.device) else size
    product = make_product(comm, size, dtype)
    comm.barrier()
    best_s, deadline_s = float("inf"), clock() + seconds
    while best_s == float("inf") or clock() < deadline_s:
        start_s = clock()
        product()
        best_s = min(best_s, clock() - start_s)
    flops = torch.tensor(2 * size**3 / best_s, dtype=torch.float64)
    return float(comm.all_reduce(flops).item())


def make_product(
    comm: Communicator, size: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """A product of two square matrices on the workers' device, done once to load its kernel."""
    # Of random numbers: those that are all equal take a GPU less power, and so less time.
    generator = torch.Generator(comm.device).manual_seed(0)
    a = torch.randn(size, size, dtype=dtype, device=comm.device, generator=generator)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)
        synchronize(comm.device)

    product()
    return product


def measure_copy_s_per_byte(comm: Communicator, effort: Effort = USUAL_EFFORT) -> float:
    """The slowest worker's copy time of uncached memory, while all workers copy. Collective."""
    source = torch.ones(effort.copy_bytes // 4, device=comm.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(comm.device)

    copy()
    comm.barrier()
    num_copies = agreed_repeats(comm, copy, effort.batch_s)
    rounds = []
    for _ in range(_NUM_COPY_ROUNDS):
        comm.barrier()
        rounds.append(slowest_s(comm, timeit(copy, number=num_copies)))
    return median(rounds) / num_copies / effort.copy_bytes
