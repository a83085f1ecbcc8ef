"""torch's DataLoader as both loaders use it: every item is ready-made by the data set."""

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from allstep.errors import UsageError

__all__ = ["LoaderProcesses"]


@dataclass(frozen=True, kw_only=True)
class LoaderProcesses:
    """How a worker reads its samples: in how many processes, and what they do.

    Raises:
        UsageError: if the values contradict each other.
    """

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UsageError(f"`num_workers` (={self.num_workers}) must be 0 or more.")
        if self.prefetch_factor is not None and self.num_workers == 0:
            raise UsageError(
                f"`prefetch_factor` (={self.prefetch_factor}) needs processes that prefetch;"
                " set `num_workers` to 1 or more."
            )

    def loader(
        self, dataset: Dataset[Any], keys: Iterable[Any] | None, *, persistent: bool
    ) -> DataLoader[Any]:
        """A DataLoader that hands `dataset`'s items on as they are.

        Args:
            dataset: makes collated items.
            keys: what to ask a map-style data set for, anew at each iteration.
            persistent: whether the processes live on from one iteration to the next.
        """
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=persistent and self.num_workers > 0,
            multiprocessing_context=self.multiprocessing_context if self.num_workers else None,
            worker_init_fn=_WorkerInit(self.worker_init_fn),
            # DataLoader draws from it at each iteration; not from the global random state.
            generator=torch.Generator(),
        )


def _as_it_is(item: Any) -> Any:
    return item


class _WorkerInit:
    """Runs first in each loader process.

    Launchers send SIGINT and SIGTERM to whole process groups. The training process decides
    what they mean; its loaders go on until it closes them or is gone.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
