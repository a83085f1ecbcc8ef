"""How much slower communication and compute get where they go on at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from time import perf_counter

import torch

from allstep.comm import Communicator
from allstep.doctor.timing import slowest_s, synchronize
from allstep.exchange.runner import Runner

__all__ = ["measure_contention"]

_ALONE_S = 0.1
_MATRIX = 512  # large enough that products hold no lock of Python's for long


def measure_contention(
    comm: Communicator, exchange: Callable[[], None], num_runs: int, runner: Runner
) -> tuple[float, float]:
    """Compute beside exchanges and exchanges beside compute, each against itself alone.

    One soon after the other, since a machine's speed changes. Collective.

    Args:
        comm: the workers.
        exchange: of a bucket, once.
        num_runs: exchanges that follow one another each time.
        runner: does it beside compute.

    Returns:
        How much longer compute takes, on the worker that the others wait for, and how much
        longer exchanges take; 0.1 is 10 %. Measured, so they may be below 0.
    """

    def exchanges() -> float:
        with _stream_of_its_own(comm.device):
            exchange()  # takes the head start of an idle link
            start_s = perf_counter()
            for _ in range(num_runs):
                exchange()
        return perf_counter() - start_s

    product = _product(comm)
    comm.barrier()
    alone_s = slowest_s(comm, exchanges())
    product_s = _loop_s(product, lambda elapsed_s: elapsed_s < _ALONE_S)
    comm.barrier()
    beside_product_s, beside_s = _beside(product, exchanges, runner)
    return (
        slowest_s(comm, beside_product_s / product_s) - 1,
        slowest_s(comm, beside_s) / alone_s - 1,
    )


def _beside(
    product: Callable[[], None], exchanges: Callable[[], float], runner: Runner
) -> tuple[float, float]:
    """Seconds of a product, and of the exchanges that go on meanwhile."""
    found_s: list[float] = []
    is_over = Event()

    def work() -> None:
        try:
            found_s.append(exchanges())
        finally:
            is_over.set()

    job = runner.submit(work)
    product_s = _loop_s(product, lambda _: not is_over.is_set())
    job.wait()
    return product_s, found_s[0]


def _stream_of_its_own(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA work inside goes on beside that of the main thread's stream."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _product(comm: Communicator) -> Callable[[], None]:
    a = torch.ones(_MATRIX, _MATRIX, device=comm.device)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)
        synchronize(comm.device)

    product()
    return product


def _loop_s(product: Callable[[], None], goes_on: Callable[[float], bool]) -> float:
    """Mean seconds of products for as long as `goes_on`, given the seconds so far."""
    start_s = perf_counter()
    num_products, elapsed_s = 0, 0.0
    while num_products == 0 or goes_on(elapsed_s):
        product()
        num_products += 1
        elapsed_s = perf_counter() - start_s
    return elapsed_s / num_products
