"""Times of bucket exchanges, from encoding to decoding, alone and beside compute.

[Note: timed collectives] Whole exchanges of buckets are timed, as an attached model makes them, on
all workers at once: what they cost is what formats, sums, the network's software and workers that
share a machine's cores make of the wire together, which no formula knows. They follow one another
without a pause, as the buckets of a backward pass do. All kinds and sizes are timed in turn,
several times: a shared machine is slower for seconds, which so changes one of many times for each
of them, and not all of them for one. Each has connections of its own, as a training has: TCP keeps
what larger buckets have made of a connection, and small ones then come late (seen with eight hosts
and 1 MiB: 38 ms, not 10). What the backend does with several buckets at once it is given two at a
time, and half of a pair's time is a bucket's: by itself, a small one may take longer.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from timeit import repeat, timeit

import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import Native, SharedMemory, make_algorithm
from allstep.device import is_accelerator
from allstep.doctor.contention import measure_contention
from allstep.doctor.timing import USUAL_EFFORT, Effort, agreed_repeats, mean_s, synchronize
from allstep.exchange import BucketLayout, BucketPlan, BucketSet, Transport, channel_of
from allstep.exchange.wires import make_wire
from allstep.plan import MeasuredCollective

_USUAL_BYTES = 8 << 20
_CACHED_BYTES, _MOST_BUCKETS = 64 << 20, 8
_ENOUGH_S = 0.25  # a slow network is known before the largest size
_NUM_PAUSES = 14
_MOST_RANKS_APART = 16  # among more, connections of each size would be too many to hold open


class BucketExchange:
    """Buckets of zeros that are exchanged in turn. Collective.

    Up to eight, and up to 64 MiB: the buckets of a model don't wait in a cache for each other.
    They lie where a model's would: in memory that workers share if that is where sums are taken.

    Args:
        transport: of the workers, with how sums are taken.
        wire: name of a format.
        num_bytes: of a bucket in float32.

    Attributes:
        num_elements: of a bucket.
        flats: the buckets' memory.
        num_at_once: exchanges of a run. The backend's own sums are handed to it as buckets become
            ready, and on CPUs it works on several at once.
    """

    def __init__(self, transport: Transport, wire: str, num_bytes: int) -> None:
        self.num_elements = num_bytes // 4
        shape, device = (self.num_elements,), transport.comm.device
        self._layout = BucketLayout(("probe",), (shape,), ((1,),), torch.float32, device)
        self._transport = transport
        self._wire = make_wire(wire)
        num_buckets = max(2, min(_MOST_BUCKETS, _CACHED_BYTES // num_bytes))
        plan = BucketPlan((self._layout,) * num_buckets, transport.comm.size)
        algorithm = transport.algorithm if wire == "fp32" else None
        block = algorithm.new_block(plan.num_bytes) if isinstance(algorithm, SharedMemory) else None
        self._set = BucketSet.new(plan, block)  # keeps the memory
        self.flats = self._set.flats
        self._buckets = [(flat, self._wire.new_state(self._layout)) for flat in self.flats]
        is_cpu = not is_accelerator(device)
        self._native = algorithm if is_cpu and isinstance(algorithm, Native) else None
        self.num_at_once = 1 if self._native is None else 2

    def run(self) -> None:
        """Makes `num_at_once` exchanges. Collective."""
        turn = self._buckets[: self.num_at_once]
        self._buckets = self._buckets[self.num_at_once :] + turn
        flat, state = turn[0]
        if self._native is None:
            with torch.no_grad():
                self._wire.sum_(flat, self._layout, state, self._transport)
        else:
            for posted in [self._native.post(flat) for flat, _ in turn]:
                posted.wait()
        synchronize(flat.device)


def measure_collectives(
    comm: Communicator,
    kinds: Sequence[tuple[str, str]],
    effort: Effort = USUAL_EFFORT,
) -> tuple[MeasuredCollective, ...]:
    """Times exchanges of buckets of growing sizes. See [Note: timed collectives]. Collective.

    Args:
        comm: at least two workers.
        kinds: names of a wire format and an algorithm each.
        effort: sizes and rounds.

    Returns:
        The workers' mean of their medians in seconds, the same on all.
    """
    timings = [_Timing(comm, wire, algorithm, effort) for wire, algorithm in kinds]
    for _ in range(effort.num_rounds):
        for timing in timings:
            timing.add_round()
    return tuple(timing.finish() for timing in timings)


class _Timing:
    """Timed exchanges of one format, a few at a time."""

    def __init__(self, comm: Communicator, wire: str, algorithm: str, effort: Effort) -> None:
        self.kind = wire, algorithm
        self.comm, self.effort = comm, effort
        self.transports: list[Transport] = []
        self.buckets: list[BucketExchange] = []
        self.num_runs: list[int] = []
        for num_bytes in effort.bucket_sizes_bytes:
            if not self.transports or comm.size <= _MOST_RANKS_APART:
                self.transports.append(_connect(comm, algorithm))
            bucket = BucketExchange(self.transports[-1], wire, num_bytes)
            bucket.run()  # makes connections
            comm.barrier()
            self.buckets.append(bucket)
            most = agreed_repeats(comm, bucket.run, 3 * effort.batch_s)
            self.num_runs.append(min(most, max(3, most // 3)))
            is_slow = self.num_runs[-1] == 1 and self._run(-1) * bucket.num_at_once > _ENOUGH_S
            if len(self.buckets) > 2 and is_slow:
                break
        self.seconds: list[list[float]] = [[] for _ in self.buckets]
        usual = min(self.buckets[-1].num_elements, _USUAL_BYTES // 4)
        self.usual = next(i for i, b in enumerate(self.buckets) if b.num_elements >= usual)
        self.slowdowns: list[tuple[float, float]] = []
        self.executor = ThreadPoolExecutor(1, "allstep exchange")
        self._contention()  # the first time it is slow

    def add_round(self) -> None:
        """Times each bucket, and the usual one beside compute."""
        for index, seconds in enumerate(self.seconds):
            seconds.append(self._run(index))
        self.slowdowns.append(self._contention())

    def finish(self) -> MeasuredCollective:
        """The measured times; nothing can be timed afterwards."""
        self.executor.shutdown()
        for transport in self.transports:
            _disconnect(transport, self.comm)
        wire, algorithm = self.kind
        compute, communication = zip(*self.slowdowns, strict=True)
        return MeasuredCollective(
            compression=wire,
            algorithm=algorithm,
            num_elements=tuple(bucket.num_elements for bucket in self.buckets),
            seconds=tuple(statistics.median(seconds) for seconds in self.seconds),
            compute_slowdown=max(0.0, statistics.median(compute)),
            communication_slowdown=max(0.0, statistics.median(communication)),
        )

    def _contention(self) -> tuple[float, float]:
        bucket, num_runs = self.buckets[self.usual], self.num_runs[self.usual]
        num_beside = 2 * num_runs if num_runs > 1 else 1
        product_s = 2 * self.effort.batch_s
        return measure_contention(self.comm, bucket.run, num_beside, product_s, self.executor)

    def _run(self, index: int) -> float:
        return _seconds_of(self.comm, self.buckets[index], self.num_runs[index])


def _connect(comm: Communicator, algorithm: str) -> Transport:
    """Separate connections for the measurement, between CPU ranks. [Note: timed collectives]"""
    channel = comm if algorithm == SharedMemory.name else channel_of(comm)
    return Transport(channel, make_algorithm(algorithm, channel))


def _disconnect(transport: Transport, comm: Communicator) -> None:
    transport.algorithm.close()
    if transport.comm is not comm:
        transport.comm.close()


def measure_burst_s(comm: Communicator, timed: MeasuredCollective, effort: Effort) -> float:
    """The seconds by which an exchange is faster after a pause than after another. Collective.

    Args:
        comm: the workers.
        timed: float32 and the backend's own sums, without pauses.
        effort: how long a pause is.

    Returns:
        Seconds, the same on all workers; see `head_start_s`.
    """
    sizes = zip(timed.num_elements, timed.seconds, strict=True)
    num_elements = next((n for n, s in sizes if s > effort.pause_s / 3), timed.num_elements[-1])
    transport = _connect(comm, timed.algorithm)
    bucket = BucketExchange(transport, timed.compression, 4 * num_elements)
    bucket.run()
    paused_s: list[float] = []
    busy_s: list[float] = []
    for _ in range(_NUM_PAUSES):
        comm.barrier()
        sleep(effort.pause_s)
        paused_s.append(timeit(bucket.run, number=1))
        busy_s.append(bucket.num_at_once * _seconds_of(comm, bucket, num_runs=2))
    _disconnect(transport, comm)
    return head_start_s(comm, paused_s, busy_s)


def head_start_s(comm: Communicator, paused_s: Sequence[float], busy_s: Sequence[float]) -> float:
    """The seconds that a pause saves an exchange, from several with and without one. Collective.

    Args:
        comm: the workers.
        paused_s: seconds of this worker's exchanges after a pause.
        busy_s: the same right after another.

    Returns:
        The difference of the medians; 0 if it is within a twentieth of the exchange, or if the
        upper quartile of those after a pause isn't below the lower quartile of the others: where
        many workers share a core, medians by themselves differ by chance.
    """
    first_busy_s, median_busy_s, _ = (mean_s(comm, s) for s in statistics.quantiles(busy_s, n=4))
    _, median_paused_s, last_paused_s = (
        mean_s(comm, s) for s in statistics.quantiles(paused_s, n=4)
    )
    saved_s = median_busy_s - median_paused_s
    is_clear = saved_s > 0.05 * median_busy_s and last_paused_s < first_busy_s
    return saved_s if is_clear else 0.0


def _seconds_of(comm: Communicator, bucket: BucketExchange, num_runs: int) -> float:
    """The workers' mean of their medians over some exchanges without a pause.

    A mean over exchanges would be of packets that were lost once in a while, and sent again a fifth
    of a second later. An exchange takes all workers as long, as they wait for each other; the
    slowest of many that share cores would only be the unluckiest.
    """
    comm.barrier()
    bucket.run()  # takes the head start of an idle link
    run_s = statistics.median(repeat(bucket.run, number=1, repeat=num_runs))
    return mean_s(comm, run_s / bucket.num_at_once)
