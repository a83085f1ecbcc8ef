"""Measures what exchanging costs here, and chooses the size of buckets by it."""

import logging
from collections.abc import Mapping, Sequence
from math import isqrt
from time import perf_counter

import torch

from allstep.comm import Communicator
from allstep.exchange.buckets import ReadyGradient, choose_bucket_bytes
from allstep.exchange.layout import BucketLayout
from allstep.exchange.sender import Sender

__all__ = ["tuned_bucket_bytes"]

_PROBE_BYTES = (32 << 10, 1 << 20)
_NUM_PROBES = 3
_NUM_BUCKETS = 4  # at once: what a backward pass hands over faster than they are exchanged


def tuned_bucket_bytes(
    comm: Communicator,
    sender: Sender,
    gradients: Sequence[ReadyGradient],
    backward_s: float,
) -> int:
    """The bucket size that exposes least of the exchange, the same on every worker. Collective.

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
    chosen = choose_bucket_bytes(
        slowest, backward_s=backward_s, latency_s=latency_s, bytes_per_s=1 / s_per_byte
    )
    if comm.rank == 0:
        logging.getLogger("allstep").info(
            f"buckets of {chosen / 2**20:g} MiB: backward pass {1e3 * backward_s:.1f} ms, exchange"
            f" {1e3 * latency_s:.2f} ms + {1e3 * s_per_byte * 2**20:.2f} ms/MiB"
        )
    return chosen


def _link(sender: Sender, gradients: Sequence[ReadyGradient]) -> tuple[float, float]:
    """Latency and seconds per byte of exchanging a bucket, from the best of a few."""
    dtype, device = _kind_of(gradients)
    seconds = [_probe(sender, num_bytes, dtype, device) for num_bytes in _PROBE_BYTES]
    small, large = _PROBE_BYTES
    s_per_byte = max((seconds[1] - seconds[0]) / (large - small), 1e-12)
    return max(seconds[0] - s_per_byte * small, 0.0), s_per_byte


def _kind_of(gradients: Sequence[ReadyGradient]) -> tuple[torch.dtype, torch.device]:
    bytes_of: Mapping[object, int] = {
        g.kind: sum(x.num_bytes for x in gradients if x.kind == g.kind) for g in gradients
    }
    kind = max(bytes_of, key=lambda k: bytes_of[k])
    assert isinstance(kind, tuple)
    return kind


def _probe(sender: Sender, num_bytes: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of one of a few buckets that follow each other as fast as they can."""
    rows = isqrt(num_bytes // dtype.itemsize)  # a matrix: low rank makes nothing of a vector
    columns = num_bytes // dtype.itemsize // rows
    layout = BucketLayout(("probe",), ((rows, columns),), ((columns, 1),), dtype, device)
    buckets = [(layout.new_flat(), sender.wire.new_state(layout)) for _ in range(_NUM_BUCKETS)]
    best_s = float("inf")
    for _ in range(_NUM_PROBES):
        start_s = perf_counter()
        for job in [sender.start(flat, layout, state) for flat, state in buckets]:
            job.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, perf_counter() - start_s)
    return best_s / _NUM_BUCKETS
