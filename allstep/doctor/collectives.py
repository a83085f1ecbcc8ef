"""What exchanging a bucket takes here, from encoding to decoding, alone and beside compute.

[Note: timed collectives] Whole exchanges of buckets are timed, as an attached model makes them, on
all workers at once: what they cost is what formats, sums, the network's software and workers that
share a machine's cores make of the wire together, which no formula knows. They follow one another
without a pause, as the buckets of a backward pass do.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter, sleep

import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import make_algorithm
from allstep.doctor.timing import agreed_repeats, slowest_s, synchronize
from allstep.exchange.layout import BucketLayout
from allstep.exchange.runner import ThreadRunner
from allstep.exchange.transport import Transport
from allstep.exchange.wires import make_wire
from allstep.plan.collective import Collective

__all__ = ["BucketExchange", "measure_burst_s", "measure_collective"]

_SIZES_BYTES = tuple(1 << exponent for exponent in (12, 16, 19, 21, 23, 25))
_ENOUGH_S = 0.25  # a slow network is known before the largest size
_BATCH_S = 0.06
_NUM_BATCHES = 5
_BESIDE_S = 0.4
_PAUSE_S = 0.03
_MATRIX = 256


class BucketExchange:
    """A bucket of zeros that is exchanged again and again.

    Args:
        comm: the workers.
        wire: name of a format.
        algorithm: name of how sums are taken.
        num_bytes: of the bucket in float32.
    """

    def __init__(self, comm: Communicator, wire: str, algorithm: str, num_bytes: int) -> None:
        self.num_elements = num_bytes // 4
        shape = (self.num_elements,)
        self._layout = BucketLayout(("probe",), (shape,), ((1,),), torch.float32, comm.device)
        self._flat = self._layout.new_flat()
        self._wire = make_wire(wire)
        self._state = self._wire.new_state(self._layout)
        self._transport = Transport(comm, make_algorithm(algorithm, comm))
        # The backend's own sum is divided by the worker when it comes back; see `Sender`.
        self._is_sum = (wire, algorithm) == ("fp32", "native")

    def run(self) -> None:
        """One exchange. Collective."""
        with torch.no_grad():
            if self._is_sum:
                self._transport.all_reduce(self._flat)
            else:
                self._wire.mean_(self._flat, self._layout, self._state, self._transport)
        synchronize(self._flat.device)

    def close(self) -> None:
        """Gives back what the algorithm holds."""
        self._transport.algorithm.close()


def measure_collective(comm: Communicator, wire: str, algorithm: str) -> Collective:
    """Times exchanges of buckets of growing sizes. See [Note: timed collectives]. Collective.

    Args:
        comm: at least two workers.
        wire: name of a format.
        algorithm: name of how sums are taken.

    Returns:
        The slowest worker's median seconds, the same on all.
    """
    sizes: list[int] = []
    seconds: list[float] = []
    for num_bytes in _SIZES_BYTES:
        bucket = BucketExchange(comm, wire, algorithm, num_bytes)
        sizes.append(bucket.num_elements)
        seconds.append(_seconds_of(comm, bucket))
        is_last = num_bytes == _SIZES_BYTES[-1] or (len(sizes) > 2 and seconds[-1] > _ENOUGH_S)
        if not is_last:
            bucket.close()
            continue
        slowdowns = _contention(comm, bucket, seconds[-1])
        bucket.close()
        break
    return Collective(
        wire=wire,
        algorithm=algorithm,
        num_elements=tuple(sizes),
        seconds=tuple(seconds),
        compute_slowdown=slowdowns[0],
        communication_slowdown=slowdowns[1],
    )


def measure_burst_s(comm: Communicator, timed: Collective) -> float:
    """By how much an exchange is faster after a pause than right after another. Collective.

    Args:
        comm: the workers.
        timed: float32 and the backend's own sums, without pauses.

    Returns:
        Seconds, the same on all workers; 0 if it is within a twentieth of the exchange.
    """
    sizes = zip(timed.num_elements, timed.seconds, strict=True)
    num_elements = next((n for n, s in sizes if s > _PAUSE_S / 3), timed.num_elements[-1])
    bucket = BucketExchange(comm, timed.wire, timed.algorithm, 4 * num_elements)
    bucket.run()
    found = []
    for _ in range(2 * _NUM_BATCHES):
        comm.barrier()
        sleep(_PAUSE_S)
        start_s = perf_counter()
        bucket.run()
        found.append(perf_counter() - start_s)
    busy_s = _seconds_of(comm, bucket)
    bucket.close()
    burst_s = busy_s - slowest_s(comm, statistics.median(found))
    return burst_s if burst_s > 0.05 * busy_s else 0.0


def _seconds_of(comm: Communicator, bucket: BucketExchange) -> float:
    bucket.run()  # makes connections
    comm.barrier()
    num_runs = agreed_repeats(comm, bucket.run, _BATCH_S)
    num_batches = _NUM_BATCHES if num_runs > 1 else 2
    batches = []
    for _ in range(num_batches):
        comm.barrier()
        bucket.run()  # takes the head start of an idle link
        start_s = perf_counter()
        for _ in range(num_runs):
            bucket.run()
        batches.append(slowest_s(comm, (perf_counter() - start_s) / num_runs))
    return statistics.median(batches)


def _contention(comm: Communicator, bucket: BucketExchange, alone_s: float) -> tuple[float, float]:
    """How much longer compute takes beside exchanges, and exchanges beside compute."""
    product = _product(comm)
    comm.barrier()
    product_s = _loop_s(product, lambda elapsed_s: elapsed_s < _BESIDE_S / 2)
    num_runs = max(1, round(_BESIDE_S / alone_s))
    runner = ThreadRunner()

    def exchanges() -> None:
        with _stream_of_its_own(comm.device):
            for _ in range(num_runs):
                bucket.run()

    comm.barrier()
    start_s = perf_counter()
    job = runner.submit(exchanges)
    ends_s: list[float] = []
    watcher = runner.submit(lambda: ends_s.append(perf_counter()))
    beside_product_s = _loop_s(product, lambda _: not ends_s)
    job.wait()
    watcher.wait()
    runner.close()
    beside_s = slowest_s(comm, (ends_s[0] - start_s) / num_runs)
    slower = torch.tensor(beside_product_s / product_s - 1, dtype=torch.float64)
    mean = float(comm.all_reduce(slower, "mean").item())
    return max(0.0, mean), max(0.0, beside_s / alone_s - 1)


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
