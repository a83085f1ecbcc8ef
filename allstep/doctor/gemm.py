"""The machine's matrix-multiply rate: the peak that training is measured against."""

import time

import torch

from allstep.comm import Communicator

__all__ = ["measure_gemm_flops"]

# Large enough to be bound by arithmetic, small enough for several repeats in a fraction of a
# second.
_CPU_SIZE = 1024
_CUDA_SIZE = 8192


def measure_gemm_flops(comm: Communicator, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Floating-point operations per second of square matrix products on all workers at once.

    rate = sum over workers of max over repeats of 2 * size^3 / seconds_per_product

    Workers that share a host multiply at the same time, as they do in training.

    Args:
        comm: all of its workers must call this.
        dtype: of the matrices.
        seconds: how long to repeat the product, at least once.

    Returns:
        The sum over all workers, the same on each, in 1/s.
    """
    size = _CUDA_SIZE if comm.device.type == "cuda" else _CPU_SIZE
    a = torch.ones(size, size, dtype=dtype, device=comm.device)
    b = torch.ones_like(a)
    out = torch.empty_like(a)
    _time_product(a, b, out)  # loads the kernel
    comm.barrier()
    best_s = float("inf")
    deadline_s = time.perf_counter() + seconds
    while best_s == float("inf") or time.perf_counter() < deadline_s:
        best_s = min(best_s, _time_product(a, b, out))
    flops = torch.tensor(2 * size**3 / best_s, dtype=torch.float64)
    return float(comm.all_reduce(flops).item())


def _time_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    start_s = time.perf_counter()
    torch.mm(a, b, out=out)
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - start_s
