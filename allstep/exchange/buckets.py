"""Which gradients travel together; pure functions."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ReadyGradient",
    "choose_bucket_bytes",
    "exposed_by_bucket_bytes",
    "exposed_s",
    "split_in_buckets",
]

FIRST_BUCKET_BYTES = 1 << 20
CANDIDATE_BYTES = tuple(1 << exponent for exponent in range(16, 28))  # 64 KiB to 128 MiB


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient as the backward pass makes it.

    Attributes:
        name: of the parameter.
        num_bytes: of the gradient.
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
