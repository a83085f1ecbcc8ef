"""A training in figures: a worker's compute in a step, and how the batch is divided."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from allstep.errors import (
    UsageError,
    check_integer,
    check_multiple,
    check_not_negative,
    check_positive,
    check_share,
)
from allstep.plan.compression import FLOAT32_BYTES


@dataclass(frozen=True)
class Bucket:
    """A piece of the gradient.

    Attributes:
        num_elements: number of its elements.
        backward_s: seconds of the backward pass from when the previous bucket is ready until this
            one is.
    """

    num_elements: int
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One worker's work in a step, without communication.

    Args:
        num_params: elements of the gradient.
        forward_s: seconds until the last backward pass begins, earlier micro-batches included.
        backward_s: seconds of the last backward pass, whose gradients are exchanged.
        optimizer_s: seconds of the update.
        num_samples: samples of this worker in a step.
        ready: pairs (share of the gradient, share of the backward pass's seconds after which it is
            ready), both increasing to 1. By default both grow in proportion.
        gradients: elements of each gradient in the order in which they become ready, if buckets
            hold whole gradients; () if buckets may end anywhere.
        core_share: share of the compute's seconds in which it needs the worker's cores, and so
            competes with the exchange; waits for cores shared with other workers count.
        element_bytes: bytes of an element of the gradient, which has its parameters' dtype: 2 for
            bfloat16, 4 for float32, 8 for float64.

    Raises:
        UsageError: for numbers out of range.

    >>> Workload.from_step(num_params=1000, step_s=1.5, num_samples=32).buckets([750, 250])
    (Bucket(num_elements=750, backward_s=0.75), Bucket(num_elements=250, backward_s=0.25))
    """

    num_params: int
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    num_samples: int = 1
    ready: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))
    gradients: tuple[int, ...] = ()
    core_share: float = 1.0
    element_bytes: int = FLOAT32_BYTES

    def __post_init__(self) -> None:
        for name in ("num_params", "num_samples"):
            check_integer(name, getattr(self, name))
        for name in ("forward_s", "backward_s", "optimizer_s"):
            check_not_negative(name, getattr(self, name), "it counts seconds")
        check_positive("forward_s + backward_s", self.forward_s + self.backward_s, "0.1 is 100 ms")
        _check_ready(self.ready)
        if self.gradients and (min(self.gradients) < 1 or sum(self.gradients) != self.num_params):
            raise UsageError(
                f"`gradients` (={self.gradients}) must have 1 or more elements each, and"
                f" {self.num_params} together as `num_params` says."
            )
        check_share("core_share", self.core_share)
        if self.element_bytes not in (2, 4, 8):
            raise UsageError(
                f"`element_bytes` (={self.element_bytes}) must be 2, 4 or 8: gradients have 16, 32"
                " or 64 bits."
            )

    @classmethod
    def from_step(
        cls,
        *,
        num_params: int,
        step_s: float,
        num_samples: int = 1,
        element_bytes: int = FLOAT32_BYTES,
    ) -> "Workload":
        """A step of which only the total time is known: a third is forward, the rest backward.

        The backward pass of a matrix multiplication consists of two multiplications as large.
        """
        check_positive("step_s", step_s, "0.1 is 100 ms")
        return cls(
            num_params=num_params,
            forward_s=step_s / 3,
            backward_s=step_s * 2 / 3,
            num_samples=num_samples,
            element_bytes=element_bytes,
        )

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.element_bytes * self.num_params

    def bucket_sizes(
        self, bucket_bytes: int | None, first_bucket_bytes: int | None = None
    ) -> list[int]:
        """Elements of each bucket in the order in which they become ready.

        Args:
            bucket_bytes: size of a full bucket; None for one bucket for all gradients.
            first_bucket_bytes: size of the first bucket; `bucket_bytes` by default.

        >>> workload = Workload.from_step(num_params=1000, step_s=0.3)
        >>> workload.bucket_sizes(1600, 400)
        [100, 400, 400, 100]
        """
        if bucket_bytes is None:
            return [self.num_params]
        if self.gradients:
            return self._whole_gradients(bucket_bytes, first_bucket_bytes)
        full = max(1, bucket_bytes // self.element_bytes)
        first = full
        if first_bucket_bytes is not None:
            first = max(1, first_bucket_bytes // self.element_bytes)
        edges = [0, *range(min(first, self.num_params), self.num_params, full), self.num_params]
        return [end - start for start, end in itertools.pairwise(edges)]

    def buckets(self, sizes: Sequence[int]) -> tuple[Bucket, ...]:
        """Buckets of these sizes, with backward seconds according to `ready`.

        Seconds of the backward pass after the last bucket is ready count for that bucket.
        """
        assert sum(sizes) == self.num_params
        ends = [end / self.num_params for end in itertools.accumulate(sizes)]
        of_gradient, of_seconds = zip(*self.ready, strict=True)
        shares = [0.0, *np.interp(ends, of_gradient, of_seconds).tolist()]
        shares[-1] = 1.0
        spans = (self.backward_s * (late - early) for early, late in itertools.pairwise(shares))
        return tuple(itertools.starmap(Bucket, zip(sizes, spans, strict=True)))

    def _whole_gradients(self, bucket_bytes: int, first_bucket_bytes: int | None) -> list[int]:
        """Sizes of buckets of whole gradients; a bucket is full once it has the wanted bytes."""
        first_bytes = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
        sizes: list[int] = []
        filling = 0
        for num_elements in self.gradients:
            filling += num_elements
            if self.element_bytes * filling >= (bucket_bytes if sizes else first_bytes):
                sizes.append(filling)
                filling = 0
        return [*sizes, filling] if filling else sizes


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A model, its micro-batch, the global batch if that is fixed, and the length if it is known.

    Args:
        micro: a worker's step of one micro-batch of `micro.num_samples`.
        global_batch: samples of a step with any number of workers; None for one micro-batch per
            worker, so that the batch grows with the workers.
        total_samples: samples of the whole training, which is epochs times samples of the
            training set; None if its length is unknown.

    Raises:
        UsageError: if the global batch isn't a multiple of the micro-batch, or the length isn't
            positive.

    >>> micro = Workload(num_params=10, forward_s=1.0, backward_s=2.0, num_samples=32)
    >>> TrainingSpec(micro=micro).batch(4), TrainingSpec(micro=micro, global_batch=256).batch(4)
    (128, 256)
    >>> TrainingSpec(micro=micro, global_batch=256).workload(4).compute_s  # two micro-batches each
    6.0
    """

    micro: Workload
    global_batch: int | None = None
    total_samples: int | None = None

    def __post_init__(self) -> None:
        if self.total_samples is not None:
            check_integer("total_samples", self.total_samples)
        if self.global_batch is not None:
            check_integer("global_batch", self.global_batch)
            check_multiple("global_batch", self.global_batch, "micro_batch", self.micro.num_samples)

    def batch(self, num_workers: int) -> int:
        """Samples of a step on `num_workers` workers."""
        return self.global_batch or num_workers * self.micro.num_samples

    def num_micro_batches(self, num_workers: int) -> int:
        """Micro-batches per step of the busiest worker."""
        return ceil(self.batch(num_workers) / (num_workers * self.micro.num_samples))

    def workload(self, num_workers: int) -> Workload:
        """The busiest worker's step, which exchanges gradients with the last micro-batch only."""
        micro, most = self.micro, self.num_micro_batches(num_workers)
        earlier_s = (most - 1) * (micro.forward_s + micro.backward_s)
        return replace(
            micro,
            forward_s=earlier_s + micro.forward_s,
            num_samples=most * micro.num_samples,
        )


def _check_ready(ready: tuple[tuple[float, float], ...]) -> None:
    pairs = list(itertools.pairwise(ready))
    ends = len(ready) >= 2 and ready[0][0] == 0 and ready[-1] == (1, 1)
    grows = all(x0 < x1 and 0 <= y0 <= y1 for (x0, y0), (x1, y1) in pairs)
    if not (ends and grows):
        raise UsageError(
            f"`ready` (={ready}) must be pairs that increase from a gradient share of 0 to (1, 1),"
            " such as ((0, 0), (0.9, 0.5), (1, 1))."
        )
