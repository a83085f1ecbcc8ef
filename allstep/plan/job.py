"""A training as numbers: what a worker has to do when there are so and so many of them."""

from dataclasses import dataclass, replace
from math import ceil

from allstep.errors import UsageError, nearest_multiples
from allstep.plan.workload import Workload

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its micro-batch, and the global batch if that is fixed.

    Args:
        micro: a worker's step of one micro-batch of `micro.num_samples`.
        global_batch: samples of a step whatever the workers; None for one micro-batch a worker,
            so that the batch grows with the workers.

    Raises:
        UsageError: if the global batch is no multiple of the micro-batch.

    >>> micro = Workload(num_params=10, forward_s=1.0, backward_s=2.0, num_samples=32)
    >>> Job(micro=micro).batch(4), Job(micro=micro, global_batch=256).batch(4)
    (128, 256)
    >>> Job(micro=micro, global_batch=256).workload(4).compute_s  # two micro-batches each
    6.0
    """

    micro: Workload
    global_batch: int | None = None

    def __post_init__(self) -> None:
        batch, micro_batch = self.global_batch, self.micro.num_samples
        if batch is not None and (batch < 1 or batch % micro_batch):
            raise UsageError(
                f"`global_batch` (={batch}) must be a multiple of `micro_batch` (={micro_batch});"
                f" nearest: {nearest_multiples(batch, micro_batch)}."
            )

    def batch(self, num_workers: int) -> int:
        """Samples of a step."""
        return self.global_batch or num_workers * self.micro.num_samples

    def num_micro_batches(self, num_workers: int) -> int:
        """Micro-batches of a step of the busiest of the workers."""
        return ceil(self.batch(num_workers) / (num_workers * self.micro.num_samples))

    def workload(self, num_workers: int) -> Workload:
        """What the busiest of the workers does in a step; the last micro-batch is exchanged."""
        micro, most = self.micro, self.num_micro_batches(num_workers)
        earlier_s = (most - 1) * (micro.forward_s + micro.backward_s)
        return replace(
            micro,
            forward_s=earlier_s + micro.forward_s,
            num_samples=most * micro.num_samples,
        )
