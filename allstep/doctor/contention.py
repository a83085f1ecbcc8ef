"""The slowdown of communication and compute that run at the same time."""

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from time import perf_counter
from timeit import timeit

import torch

from allstep.comm import Communicator
from allstep.device import has_streams, new_stream
from allstep.doctor.machine import make_product
from allstep.doctor.timing import slowest_s

_MATRIX = 512  # large enough that products hold no lock of Python's for long


def measure_contention(
    comm: Communicator,
    exchange: Callable[[], None],
    num_runs: int,
    product_s: float,
    executor: Executor,
) -> tuple[float, float]:
    """Measures compute beside exchanges and exchanges beside compute, relative to each alone.

    One soon after the other, since a machine's speed changes. Collective.

    Args:
        comm: the workers.
        exchange: of a bucket, once.
        num_runs: exchanges that follow one another each time.
        product_s: how long to compute without exchanges.
        executor: one thread, which exchanges beside compute. The same each time: a new thread
            would begin by starting the threads of its own kernels.

    Returns:
        How much longer compute takes, on the worker that the others wait for, and how much
        longer exchanges take; 0.1 is 10 %. Measured, so they may be below 0.
    """

    def exchanges() -> float:
        # On an accelerator they go on beside the work of the main thread's stream.
        own = new_stream(comm.device) if has_streams(comm.device) else nullcontext()
        with torch.no_grad(), own:
            exchange()  # takes the head start of an idle link
            return timeit(exchange, number=num_runs)

    product = make_product(comm, _MATRIX)
    comm.barrier()
    only_exchanges_s = slowest_s(comm, exchanges())
    only_product_s = _loop_s(product, lambda elapsed_s: elapsed_s < product_s)
    comm.barrier()
    beside = executor.submit(exchanges)
    beside_product_s = _loop_s(product, lambda _: not beside.done())
    return (
        slowest_s(comm, beside_product_s / only_product_s) - 1,
        slowest_s(comm, beside.result()) / only_exchanges_s - 1,
    )


def _loop_s(product: Callable[[], None], goes_on: Callable[[float], bool]) -> float:
    """The mean seconds of a product, repeated while `goes_on(seconds so far)`."""
    start_s = perf_counter()
    num_products, elapsed_s = 0, 0.0
    while num_products == 0 or goes_on(elapsed_s):
        product()
        num_products += 1
        elapsed_s = perf_counter() - start_s
    return elapsed_s / num_products
