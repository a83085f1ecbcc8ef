"""Measures what exchanging costs here, and chooses the size of buckets by it."""

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from math import isqrt
from time import perf_counter, sleep

import torch

from allstep.comm import Communicator, Work
from allstep.exchange.buckets import (
    ReadyGradient,
    choose_bucket_bytes,
    exposed_by_bucket_bytes,
    split_in_buckets,
)
from allstep.exchange.layout import BucketLayout
from allstep.exchange.sender import NUM_AT_ONCE, Sender
from allstep.exchange.wires import WireState

__all__ = ["tuned_bucket_bytes"]

_PROBE_BYTES = (32 << 10, 1 << 20)
_NUM_PROBES = 3
_NUM_REPLAYS = 2
_MAX_CONTENDERS = 4
_UNCERTAINTY = 0.25  # of a modelled step
_HIDDEN = 0.05  # of the backward pass: less is not worth replays
_LONGEST_S = 30.0  # of all replays

Probe = tuple[torch.Tensor, BucketLayout, WireState]


def tuned_bucket_bytes(
    comm: Communicator,
    sender: Sender,
    gradients: Sequence[ReadyGradient],
    backward_s: float,
) -> int:
    """The bucket size that exposes least of the exchange, the same on every worker. Collective.

    A model with one latency and one bandwidth says which sizes may be the best. It doesn't know
    how much better a network is used by several buckets at once, so these few are then tried,
    with zeros, in the rhythm of the backward pass.

    Times of the backward pass are the slowest worker's, and those of the exchange the workers'
    mean, which takes all of them as long; so all choose by the same numbers.

    Args:
        comm: the workers.
        sender: of the buckets; nothing may be under way.
        gradients: with this worker's times.
        backward_s: of this worker's backward pass.
    """
    link = torch.tensor(_link(sender, gradients), dtype=torch.float64, device=comm.device)
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
    contenders = _contenders(exposed, backward_s)
    if len(contenders) > 1:
        exposed = _replayed(comm, sender, slowest, backward_s, contenders)
    chosen = choose_bucket_bytes(exposed)
    if comm.rank == 0:
        logging.getLogger("allstep").info(
            f"buckets of {chosen / 2**20:g} MiB: backward pass {1e3 * backward_s:.1f} ms, exchange"
            f" {1e3 * latency_s:.2f} ms + {1e3 * s_per_byte * 2**20:.2f} ms/MiB,"
            f" exposed {1e3 * exposed[chosen]:.1f} ms"
        )
    return chosen


def _link(sender: Sender, gradients: Sequence[ReadyGradient]) -> tuple[float, float]:
    """Latency and seconds per byte of exchanging a bucket, from the best of a few."""
    small, large = _PROBE_BYTES
    flat = _new_flat(gradients, large)
    small_s, large_s = (_probe(sender, num_bytes, flat) for num_bytes in _PROBE_BYTES)
    s_per_byte = max((large_s - small_s) / (large - small), 1e-12)
    return max(small_s - s_per_byte * small, 0.0), s_per_byte


def _contenders(exposed: Mapping[int, float], backward_s: float) -> list[int]:
    """Sizes that may be the best, as the model knows it; the one it finds best comes first."""
    sizes = sorted(exposed, key=lambda size: (exposed[size], -size))
    best_s = backward_s + exposed[sizes[0]]
    contenders = [s for s in sizes if backward_s + exposed[s] <= (1 + _UNCERTAINTY) * best_s]
    if max(exposed[size] for size in contenders) < _HIDDEN * backward_s:
        return sizes[:1]
    num_in_time = int(_LONGEST_S / (_NUM_REPLAYS * best_s))
    return contenders[: max(1, min(_MAX_CONTENDERS, num_in_time))]


def _replayed(
    comm: Communicator,
    sender: Sender,
    gradients: Sequence[ReadyGradient],
    backward_s: float,
    sizes: Sequence[int],
) -> dict[int, float]:
    """Bucket size -> seconds exposed, the workers' mean, in the best of a few backward passes."""
    plans = [
        [(sum(g.num_bytes for g in b), max(g.ready_s for g in b)) for b in buckets]
        for buckets in (split_in_buckets(gradients, size) for size in sizes)
    ]
    flat = _new_flat(gradients, max(num_bytes for plan in plans for num_bytes, _ in plan))
    best_s = torch.full((len(sizes),), float("inf"), dtype=torch.float64, device=comm.device)
    for _ in range(_NUM_REPLAYS):
        own_s = [_replay(comm, sender, plan, backward_s, flat) for plan in plans]
        best_s = best_s.minimum(torch.tensor(own_s, dtype=torch.float64, device=comm.device))
    return dict(zip(sizes, comm.all_reduce(best_s, "mean").tolist(), strict=True))


def _replay(
    comm: Communicator,
    sender: Sender,
    buckets: Sequence[tuple[int, float]],
    backward_s: float,
    flat: torch.Tensor,
) -> float:
    """Seconds from the end of a backward pass until all has been exchanged; the pass is slept.

    Args:
        comm, sender: as of `tuned_bucket_bytes`.
        buckets: bytes of each, and when it is ready.
        backward_s: of the pass.
        flat: zeros, enough for the largest.
    """
    probes = {num_bytes: _new_probe(sender, num_bytes, flat) for num_bytes, _ in buckets}
    jobs: list[Work[None]] = []
    comm.barrier()
    start_s = perf_counter()
    for num_bytes, ready_s in buckets:
        sleep(max(0.0, start_s + ready_s - perf_counter()))
        jobs.append(sender.start(*probes[num_bytes]))
    sleep(max(0.0, start_s + backward_s - perf_counter()))
    _wait(jobs, flat.device)
    return perf_counter() - start_s - backward_s


def _probe(sender: Sender, num_bytes: int, flat: torch.Tensor) -> float:
    """Seconds of one of a few buckets that follow each other as fast as they can."""
    probes = [_new_probe(sender, num_bytes, flat) for _ in range(NUM_AT_ONCE)]
    best_s = float("inf")
    for _ in range(_NUM_PROBES):
        start_s = perf_counter()
        _wait([sender.start(*probe) for probe in probes], flat.device)
        best_s = min(best_s, perf_counter() - start_s)
    return best_s / NUM_AT_ONCE


def _new_flat(gradients: Sequence[ReadyGradient], num_bytes: int) -> torch.Tensor:
    """Zeros of the kind that most of the gradients' bytes are."""
    bytes_of: Counter[Hashable] = Counter()
    for gradient in gradients:
        bytes_of[gradient.kind] += gradient.num_bytes
    ((kind, _),) = bytes_of.most_common(1)
    assert isinstance(kind, tuple)
    dtype, device = kind[0].to_real(), kind[1]
    return torch.zeros(max(1, num_bytes // dtype.itemsize), dtype=dtype, device=device)


def _new_probe(sender: Sender, num_bytes: int, flat: torch.Tensor) -> Probe:
    """A bucket that belongs to no parameter, at the beginning of `flat`.

    All that are made of one `flat` may be under way at once: they add zeros to zeros.
    """
    num_elements = max(1, num_bytes // flat.itemsize)
    rows = isqrt(num_elements)  # a matrix: low rank makes nothing of a vector
    columns = num_elements // rows
    layout = BucketLayout(("probe",), ((rows, columns),), ((columns, 1),), flat.dtype, flat.device)
    return flat[: layout.num_elements], layout, sender.wire.new_state(layout)


def _wait(jobs: Sequence[Work[None]], device: torch.device) -> None:
    for job in jobs:
        job.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
