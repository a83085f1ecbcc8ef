"""Loader processes end with their worker, and not before it says so."""

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import allstep
from allstep.env import read_stat
from tests.data.sets import Augmented, Seat


class Pids(Augmented):
    """Each sample is its process."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert get_worker_info() is not None
        return os.getpid(), index


def lives(pid: int) -> bool:
    try:
        return not read_stat(pid).has_ended
    except OSError:
        return False


def wait_until_gone(pids: set[int]) -> bool:
    deadline_s = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(lives, pids))


def make_loader(**changes: object) -> object:
    arguments = {"global_batch": 8, "micro_batch": 2, "num_workers": 2} | changes
    return allstep.data.loader(Pids(40), Seat(0, 1), **arguments)


def pids_of_epoch(loader: object) -> set[int]:
    return {
        int(pid)
        for batch in loader.global_batches()
        for micro in batch.micro_batches
        for pid in micro.data[0]
    }


def test_processes_ignore_signals_to_the_whole_group() -> None:
    with make_loader() as loader:
        pids = pids_of_epoch(loader)
        assert len(pids) == 2
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in pids:
                os.kill(pid, number)
        assert pids_of_epoch(loader) == pids  # the same processes go on in the next epoch
    assert wait_until_gone(pids)


def test_close_ends_the_processes_and_the_next_epoch_starts_new_ones() -> None:
    loader = make_loader()
    pids = pids_of_epoch(loader)
    loader.close()
    assert wait_until_gone(pids)
    others = pids_of_epoch(loader)
    assert not others & pids
    loader.close()
    loader.close()


def test_worker_init_fn_is_called(tmp_path: Path) -> None:
    with make_loader(worker_init_fn=lambda worker: (tmp_path / str(worker)).touch()) as loader:
        pids_of_epoch(loader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class Opened(Augmented):
    """Reads from what each process opens for itself."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.opened_by = 0

    def __getitem__(self, index: int) -> tuple[bool, int]:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return self.opened_by == os.getpid(), index


def open_data(worker: int) -> None:
    get_worker_info().dataset.opened_by = os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_init_fn_gets_the_data_set(method: str) -> None:
    with allstep.data.loader(
        Opened(8),
        Seat(0, 1),
        global_batch=8,
        micro_batch=2,
        num_workers=2,
        worker_init_fn=open_data,
        multiprocessing_context=method,
    ) as loader:
        (batch,) = loader.global_batches()
        assert all(micro.data[0].all() for micro in batch.micro_batches)


class Interval(IterableDataset):
    """As in torch's documentation of IterableDataset, whose `worker_init_fn` splits it."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> object:
        return iter(range(self.start, self.end))


def split_interval(worker: int) -> None:
    info = get_worker_info()
    start, each = info.dataset.start, (info.dataset.end - info.dataset.start) // info.num_workers
    info.dataset.start, info.dataset.end = start + worker * each, start + (worker + 1) * each


def test_worker_init_fn_may_split_a_sharded_stream() -> None:
    arguments = {"num_workers": 2, "worker_init_fn": split_interval}
    batches = {"global_batch": 4, "micro_batch": 2}
    lone = allstep.Communicator.single_process()
    with allstep.data.loader(
        Interval(3, 19), lone, stream="sharded", **batches, **arguments
    ) as loader:
        found = [m.data for batch in loader.global_batches() for m in batch.micro_batches]
    by_torch = list(DataLoader(Interval(3, 19), batch_size=2, **arguments))
    for parts in (found, by_torch):
        assert sorted(torch.cat(parts).tolist()) == list(range(3, 19))
    with (
        allstep.data.loader(Interval(3, 19), lone, **batches, **arguments) as replicated,
        pytest.raises(AttributeError, match="start"),
    ):
        next(replicated.global_batches())


class Collecting(Augmented):
    """Collects garbage in the loader process."""

    def __getitem__(self, index: int) -> tuple[bool, int]:
        gc.collect()
        return gc.isenabled(), index


class Garbage:
    """In a cycle; its end is noted with the process that brought it about."""

    def __init__(self, log: Path) -> None:
        self.itself, self.log = self, log

    def __del__(self) -> None:
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")


def test_a_loader_process_collects_no_garbage_of_its_parent(tmp_path: Path) -> None:
    def read() -> list[bool]:
        with allstep.data.loader(
            Collecting(4), Seat(0, 1), global_batch=2, micro_batch=2, num_workers=1
        ) as loader:
            batches = loader.global_batches()
            return [bool(micro.data[0].all()) for b in batches for micro in b.micro_batches]

    assert read() == [True, True]  # the process collects its own
    assert gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # torch's process shall find this test's garbage only
    try:
        Garbage(tmp_path / "torch's")
        list(DataLoader(Collecting(4), num_workers=1))
        gc.collect()
        Garbage(tmp_path / "ours")
        read()
        gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    own = str(os.getpid())
    assert (tmp_path / "ours").read_text().split() == [own]
    child, parent = (tmp_path / "torch's").read_text().split()
    assert child != own == parent


PROGRAM = """
import os, sys
from tests.data.test_processes import make_loader, pids_of_epoch
if __name__ == "__main__":
    loader = make_loader(multiprocessing_context={method!r})
    print(*pids_of_epoch(loader), flush=True)
    {then}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("then", "code", "method"),
    [
        pytest.param("pass", 0, "fork", marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, "fork", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", -9, "fork"),
        pytest.param("os.kill(os.getpid(), 9)", -9, "forkserver", marks=pytest.mark.slow),
    ],
)
def test_processes_end_with_a_worker_that_left_them_open(then: str, code: int, method: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(then=then, method=method)]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, cwd=root)
    pids = {int(pid) for pid in done.stdout.split()}
    assert len(pids) == 2
    assert wait_until_gone(pids)
    assert done.returncode == code
    if code >= 0:  # killed, it leaves multiprocessing's tracker something to say
        assert done.stderr == ""


@pytest.mark.process
def test_another_start_method() -> None:
    with make_loader(multiprocessing_context="spawn") as loader:
        assert len(pids_of_epoch(loader)) == 2


class FullMemory(type(multiprocessing.get_context("fork"))):
    """What Python's queues meet where /dev/shm is full."""

    def Queue(self, maxsize: int = 0) -> NoReturn:  # noqa: N802
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# torch's iterator that was not made to its end complains.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_processes_that_cannot_be_started_say_what_to_free() -> None:
    message = r"`num_workers` \(=2\): .* \(No space left on device\). They need room in /dev/shm"
    with (
        make_loader(multiprocessing_context=FullMemory()) as loader,
        pytest.raises(allstep.UsageError, match=message),
    ):
        pids_of_epoch(loader)
