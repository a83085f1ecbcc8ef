"""Measures what exchanging costs here, and chooses the size of buckets by it."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from time import perf_counter, sleep

import torch

from allstep.comm import Communicator, Work
from allstep.device import synchronize
from allstep.exchange.layout import BucketLayout
from allstep.exchange.reducer import NUM_AT_ONCE, Bucket, Reducer
from allstep.exchange.wires import WireState

FIRST_BUCKET_BYTES = 1 << 20
CANDIDATE_BYTES = tuple(1 << exponent for exponent in range(16, 28))  # 64 KiB to 128 MiB

_PROBE_BYTES = (32 << 10, 1 << 20)
NUM_PROBES = 3  # of which the fastest counts
_NUM_REPLAYS = 2
_MAX_CONTENDERS = 4
_UNCERTAINTY = 0.25  # of a modelled step
_HIDDEN = 0.05  # of the backward pass: less is not worth replays
_LONGEST_S = 30.0  # of all replays

Probe = tuple[Bucket, WireState]


@dataclass(frozen=True)
class Clock:
    """The clock of measurements; tests pass their own."""

    now_s: Callable[[], float] = perf_counter
    sleep_s: Callable[[float], None] = sleep


_WALL_CLOCK = Clock()


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient and the time at which the backward pass makes it.

    Attributes:
        name: the parameter's name.
        num_bytes: the gradient's size.
        kind: gradients of different kinds can't share a bucket: dtype and device.
        ready_s: seconds from the start of the backward pass until it is ready.
    """

    name: str
    num_bytes: int
    kind: Hashable = None
    ready_s: float = 0.0


def split_in_buckets(
    gradients: Iterable[ReadyGradient], bucket_bytes: int
) -> list[list[ReadyGradient]]:
    """Gradients in buckets of at least `bucket_bytes`, in the order in which buckets fill.

    The first bucket is small, so that the wire has work early.

    >>> gradients = [ReadyGradient(name, 3) for name in "edcba"]
    >>> [[g.name for g in bucket] for bucket in split_in_buckets(gradients, 6)]
    [['e', 'd'], ['c', 'b'], ['a']]
    """
    full: list[list[ReadyGradient]] = []
    filling: dict[Hashable, list[ReadyGradient]] = {}
    for gradient in gradients:
        bucket = filling.setdefault(gradient.kind, [])
        bucket.append(gradient)
        limit = bucket_bytes if full else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if sum(g.num_bytes for g in bucket) >= limit:
            full.append(filling.pop(gradient.kind))
    return full + list(filling.values())


def exposed_s(
    buckets: Sequence[Sequence[ReadyGradient]],
    *,
    backward_s: float,
    latency_s: float,
    bytes_per_s: float,
) -> float:
    """Seconds from the end of the backward pass until the last bucket has been exchanged.

    Buckets go one after the other, each when its last gradient is ready:

        end_i = max(end_{i-1}, ready_i) + latency_s + bytes_i / bytes_per_s

    >>> buckets = [[ReadyGradient("b", 10, ready_s=1.0)], [ReadyGradient("a", 10, ready_s=2.0)]]
    >>> exposed_s(buckets, backward_s=2.0, latency_s=0.5, bytes_per_s=10.0)
    2.0
    """
    end_s = 0.0
    for bucket in buckets:
        ready_s = max(gradient.ready_s for gradient in bucket)
        num_bytes = sum(gradient.num_bytes for gradient in bucket)
        end_s = max(end_s, ready_s) + latency_s + num_bytes / bytes_per_s
    return max(0.0, end_s - backward_s)


def exposed_by_bucket_bytes(
    gradients: Sequence[ReadyGradient],
    *,
    backward_s: float,
    latency_s: float,
    bytes_per_s: float,
) -> dict[int, float]:
    """Bucket size -> `exposed_s`; of sizes that make the same buckets the largest alone.

    >>> gradients = [ReadyGradient(name, 1 << 20) for name in "cba"]
    >>> exposed_by_bucket_bytes(gradients, backward_s=0.0, latency_s=1.0, bytes_per_s=1 << 20)
    {1048576: 6.0, 134217728: 5.0}
    """
    found: dict[tuple[tuple[str, ...], ...], tuple[int, float]] = {}
    for size in CANDIDATE_BYTES:
        buckets = split_in_buckets(gradients, size)
        seconds = exposed_s(
            buckets, backward_s=backward_s, latency_s=latency_s, bytes_per_s=bytes_per_s
        )
        found[tuple(tuple(g.name for g in bucket) for bucket in buckets)] = size, seconds
    return dict(found.values())


def choose_bucket_bytes(exposed: Mapping[int, float]) -> int:
    """The size that leaves the least exposed; the largest of equals.

    Args:
        exposed: bucket size -> seconds.

    >>> gradients = [ReadyGradient(str(i), 1 << 20, ready_s=0.001 * i) for i in range(32)]
    >>> def choose(latency_s: float) -> int:
    ...     return choose_bucket_bytes(
    ...         exposed_by_bucket_bytes(
    ...             gradients, backward_s=0.032, latency_s=latency_s, bytes_per_s=2e9
    ...         )
    ...     )
    >>> choose(0) >> 20
    2
    >>> choose(0.1) >> 20
    128
    """
    good_s = min(exposed.values()) * 1.001
    return max(size for size, seconds in exposed.items() if seconds <= good_s)


def tuned_bucket_bytes(
    comm: Communicator,
    reducer: Reducer,
    gradients: Sequence[ReadyGradient],
    backward_s: float,
    *,
    clock: Clock = _WALL_CLOCK,
    longest_s: float = _LONGEST_S,
) -> int:
    """The bucket size that exposes least of the exchange, the same on every worker. Collective.

    A model with one latency and one bandwidth says which sizes may be the best. It doesn't know
    how much better a network is used by several buckets at once, so these few are then tried,
    with zeros, in the rhythm of the backward pass.

    Times of the backward pass are the slowest worker's, and those of the exchange the workers'
    mean, which takes all of them as long; so all choose by the same numbers.

    Args:
        comm: the workers.
        reducer: of the buckets; nothing may be under way.
        gradients: with this worker's times.
        backward_s: of this worker's backward pass.
        clock: keeps the time.
        longest_s: seconds that trying sizes may take.
    """
    link = torch.tensor(_link(reducer, gradients, clock), dtype=torch.float64, device=comm.device)
    latency_s, s_per_byte = comm.all_reduce(link, "mean").tolist()
    own_s = [backward_s, *(gradient.ready_s for gradient in gradients)]
    times_s = torch.tensor(own_s, dtype=torch.float64, device=comm.device)
    backward_s, *ready_s = comm.all_reduce(times_s, "max").tolist()
    slowest = [
        ReadyGradient(g.name, g.num_bytes, g.kind, seconds)
        for g, seconds in zip(gradients, ready_s, strict=True)
    ]
    exposed = exposed_by_bucket_bytes(
        slowest, backward_s=backward_s, latency_s=latency_s, bytes_per_s=1 / s_per_byte
    )
    contenders = _contenders(exposed, backward_s, longest_s)
    if len(contenders) > 1:
        exposed = _replayed(comm, reducer, slowest, backward_s, contenders, clock)
    chosen = choose_bucket_bytes(exposed)
    if comm.rank == 0:
        logging.getLogger("allstep").info(
            f"buckets of {chosen / 2**20:g} MiB: backward pass {1e3 * backward_s:.1f} ms, exchange"
            f" {1e3 * latency_s:.2f} ms + {1e3 * s_per_byte * 2**20:.2f} ms/MiB,"
            f" exposed {1e3 * exposed[chosen]:.1f} ms"
        )
    return chosen


def probe_s(
    reducer: Reducer, num_bytes: int, flat: torch.Tensor, clock: Clock = _WALL_CLOCK
) -> float:
    """Seconds of one of a few buckets that follow each other as fast as they can. Collective.

    Args:
        reducer: of the buckets.
        num_bytes: of each.
        flat: zeros, at least so many bytes.
        clock: keeps the time.
    """
    probes = [_new_probe(reducer, num_bytes, flat) for _ in range(NUM_AT_ONCE)]
    best_s = float("inf")
    for _ in range(NUM_PROBES):
        start_s = clock.now_s()
        _wait([reducer.start(bucket, state=state) for bucket, state in probes], flat.device)
        best_s = min(best_s, clock.now_s() - start_s)
    return best_s / NUM_AT_ONCE


def _link(
    reducer: Reducer, gradients: Sequence[ReadyGradient], clock: Clock
) -> tuple[float, float]:
    """Latency and seconds per byte of exchanging a bucket, from the best of a few."""
    small, large = _PROBE_BYTES
    flat = _new_flat(gradients, large)
    small_s, large_s = (probe_s(reducer, num_bytes, flat, clock) for num_bytes in _PROBE_BYTES)
    s_per_byte = max((large_s - small_s) / (large - small), 1e-12)
    return max(small_s - s_per_byte * small, 0.0), s_per_byte


def _contenders(exposed: Mapping[int, float], backward_s: float, longest_s: float) -> list[int]:
    """Sizes that may be the best, as the model knows it; the one it finds best comes first."""
    sizes = sorted(exposed, key=lambda size: (exposed[size], -size))
    best_s = backward_s + exposed[sizes[0]]
    contenders = [s for s in sizes if backward_s + exposed[s] <= (1 + _UNCERTAINTY) * best_s]
    if max(exposed[size] for size in contenders) < _HIDDEN * backward_s:
        return sizes[:1]
    num_in_time = int(longest_s / (_NUM_REPLAYS * best_s))
    return contenders[: max(1, min(_MAX_CONTENDERS, num_in_time))]


def _replayed(
    comm: Communicator,
    reducer: Reducer,
    gradients: Sequence[ReadyGradient],
    backward_s: float,
    sizes: Sequence[int],
    clock: Clock,
) -> dict[int, float]:
    """Bucket size -> seconds exposed, the workers' mean, in the best of a few backward passes."""
    plans = [
        [(sum(g.num_bytes for g in b), max(g.ready_s for g in b)) for b in buckets]
        for buckets in (split_in_buckets(gradients, size) for size in sizes)
    ]
    flat = _new_flat(gradients, max(num_bytes for plan in plans for num_bytes, _ in plan))
    best_s = torch.full((len(sizes),), float("inf"), dtype=torch.float64, device=comm.device)
    for _ in range(_NUM_REPLAYS):
        own_s = [_replay(comm, reducer, plan, backward_s, flat, clock) for plan in plans]
        best_s = best_s.minimum(torch.tensor(own_s, dtype=torch.float64, device=comm.device))
    return dict(zip(sizes, comm.all_reduce(best_s, "mean").tolist(), strict=True))


def _replay(
    comm: Communicator,
    reducer: Reducer,
    plan: Sequence[tuple[int, float]],
    backward_s: float,
    flat: torch.Tensor,
    clock: Clock,
) -> float:
    """Seconds from the end of a backward pass until all has been exchanged; the pass is slept.

    Args:
        comm, reducer, clock: see `tuned_bucket_bytes`.
        plan: bytes of each bucket, and when it is ready.
        backward_s: of the pass.
        flat: zeros, enough for the largest.
    """
    probes = {num_bytes: _new_probe(reducer, num_bytes, flat) for num_bytes, _ in plan}
    works: list[Work[None]] = []
    comm.barrier()
    start_s = clock.now_s()
    for num_bytes, ready_s in plan:
        clock.sleep_s(max(0.0, start_s + ready_s - clock.now_s()))
        bucket, state = probes[num_bytes]
        works.append(reducer.start(bucket, state=state))
    clock.sleep_s(max(0.0, start_s + backward_s - clock.now_s()))
    _wait(works, flat.device)
    return clock.now_s() - start_s - backward_s


def _new_flat(gradients: Sequence[ReadyGradient], num_bytes: int) -> torch.Tensor:
    """Zeros of the kind that most of the gradients' bytes are."""
    bytes_of: Counter[Hashable] = Counter()
    for gradient in gradients:
        bytes_of[gradient.kind] += gradient.num_bytes
    ((kind, _),) = bytes_of.most_common(1)
    assert isinstance(kind, tuple)
    dtype, device = kind[0].to_real(), kind[1]
    return torch.zeros(max(1, num_bytes // dtype.itemsize), dtype=dtype, device=device)


def _new_probe(reducer: Reducer, num_bytes: int, flat: torch.Tensor) -> Probe:
    """A bucket without parameters, at the beginning of `flat`.

    All that are made of one `flat` may be under way at once: they add zeros to zeros.
    """
    num_elements = max(1, num_bytes // flat.itemsize)
    rows = isqrt(num_elements)  # a matrix: low rank makes nothing of a vector
    columns = num_elements // rows
    layout = BucketLayout(("probe",), ((rows, columns),), ((columns, 1),), flat.dtype, flat.device)
    return Bucket(layout, flat[: layout.num_elements]), reducer.wire.new_state(layout)


def _wait(works: Sequence[Work[None]], device: torch.device) -> None:
    for work in works:
        work.wait()
    synchronize(device)
