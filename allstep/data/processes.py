"""torch's DataLoader as all loaders use it, with items that the data set has already collated."""

import atexit
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from threading import Thread, Timer
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from allstep.data.random import derive_seed
from allstep.env import without_collector
from allstep.errors import UsageError, check_integer

_POLL_S = 0.5
_GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LoaderProcesses:
    """Settings of the processes in which a worker reads its samples.

    [Note: fork] The default start method is torch's, which on Linux is fork. It starts two
    processes in 0.05 s, whereas forkserver and spawn first import torch in each of them (2 s).
    It shares a data set in memory instead of copying it, accepts lambdas, and needs no
    `if __name__ == "__main__"`. The risk that another thread holds a lock during the fork is small:
    the thread that forks is the one that draws random numbers and computes. A data set that itself
    uses CUDA or threads needs `multiprocessing_context="forkserver"`.

    Another risk is garbage collection. If a loader process collected reference cycles of its
    parent, it could hang in the destructor of a process group, which waits for threads that a fork
    doesn't copy. Hence it starts with the collector disabled, and freezes all inherited objects
    (`gc.freeze`) before it enables the collector, which also keeps their memory shared.

    Raises:
        UsageError: if the values contradict each other.
    """

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        check_integer("num_workers", self.num_workers, 0)
        if not isinstance(self.pin_memory, bool):
            raise UsageError(f"`pin_memory` (={self.pin_memory!r}) must be True or False.")
        if not (self.worker_init_fn is None or callable(self.worker_init_fn)):
            raise UsageError(
                f"`worker_init_fn` (={self.worker_init_fn!r}) must be a function of a process's"
                " number, or None."
            )
        if self.prefetch_factor is not None:
            check_integer("prefetch_factor", self.prefetch_factor)
        for name in ("prefetch_factor", "multiprocessing_context", "worker_init_fn"):
            value = getattr(self, name)
            if value is not None and self.num_workers == 0:
                raise UsageError(
                    f"`{name}` (={value!r}) needs loader processes; set `num_workers` to 1 or more."
                )

    def single(self) -> "LoaderProcesses":
        """The same settings for a single process, or for none if there is none."""
        num_workers = min(1, self.num_workers)
        return replace(self, num_workers=num_workers, prefetch_factor=None, pin_memory=False)

    def start(
        self, dataset: Dataset[Any], keys: Iterable[Any] | None = None, *, seed: int
    ) -> "Items":
        """Starts to read.

        Args:
            dataset: data set of collated items, made from the user's data set, its `dataset`.
            keys: keys of the items to read from a map-style data set, in order.
            seed: seed of random numbers that are not seeded elsewhere, as in `worker_init_fn`.
        """
        return Items(
            DataLoader(
                dataset,
                batch_size=None,
                sampler=keys,
                num_workers=self.num_workers,
                collate_fn=_as_it_is,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
                multiprocessing_context=self.multiprocessing_context,
                worker_init_fn=partial(_start, self.worker_init_fn),
                # DataLoader draws from this generator instead of the global random state.
                generator=torch.Generator().manual_seed(derive_seed(seed)),
            )
        )


class Items(Iterator[Any]):
    """An iterator over the items of a DataLoader, until it is closed.

    The loader's processes ignore the signal by which Python would end them at exit, so an open
    iterator is closed at exit.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        try:
            with without_collector():  # [Note: fork]
                self._iterator: Any = iter(loader)
        except OSError as error:
            if loader.num_workers == 0:  # the error is the data set's
                raise
            raise UsageError(
                f"`num_workers` (={loader.num_workers}): loader processes can't be started "
                f"({error.strerror or error}). They need room in /dev/shm (docker run --shm-size), "
                "open files (ulimit -n), processes (ulimit -u) and memory: free some, or start "
                "fewer; 0 needs none of it."
            ) from error
        self._at_exit = partial(_close, ref(self))
        atexit.register(self._at_exit)

    def __next__(self) -> Any:
        if self._iterator is None:
            raise UsageError(
                "The loader was closed or set to another position after it handed out this batch;"
                " take the next one from `global_batches()`."
            )
        return next(self._iterator)

    def close(self) -> None:
        """Ends the processes; those that are still busy after a second are killed.

        torch would wait 5 s for each of them, too long for a failed worker that has to end at once.
        """
        iterator, self._iterator = self._iterator, None
        atexit.unregister(self._at_exit)
        if hasattr(iterator, "_shutdown_workers"):
            if iterator._worker_pids_set:  # or torch would report the end of a process as a failure
                signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
                iterator._worker_pids_set = False
            impatience = Timer(_GRACE_S, _kill, [iterator._workers])
            with suppress(RuntimeError):  # Python 3.12 starts no thread at exit; then torch waits
                impatience.start()
            iterator._shutdown_workers()
            impatience.cancel()
            _kill(iterator._workers)


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _close(items: Callable[[], Items | None]) -> None:
    alive = items()
    if alive is not None:
        alive.close()


def _as_it_is(item: Any) -> Any:
    return item


def _start(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """The first function that runs in each loader process.

    Launchers send SIGINT and SIGTERM to whole process groups. The training process decides how to
    react; its loader processes continue until it closes them or ends. They must not outlive it: a
    forked one holds copies of its sockets, and peers notice its end only once these are closed.
    """
    gc.freeze()
    gc.enable()
    info = get_worker_info()
    assert info is not None
    # `worker_init_fn` expects the user's data set here; but it must not split a replicated stream.
    if getattr(info.dataset, "is_sharded", True):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _end_with_parent() -> None:
    """Ends this process once the training process has ended.

    It checks two signs, as neither is reliable: the parent of a forkserver's child is not the
    training process; and multiprocessing's check uses a pipe that siblings of a forked process hold
    open.
    """
    parent, parent_pid = parent_process(), os.getppid()
    assert parent is not None
    while os.getppid() == parent_pid and parent.is_alive():
        time.sleep(_POLL_S)
    os._exit(1)
