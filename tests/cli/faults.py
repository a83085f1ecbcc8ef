"""A training that goes wrong on purpose: `python faults.py WORKERS FAULT MARKS`.

Each worker makes a file named after its rank in the folder MARKS when it is about to go
wrong, so that a test knows when to look.
"""

import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import allstep
from allstep.cli.launch import Workers, launch_workers
from allstep.cli.worker import read_call
from allstep.comm import Communicator
from allstep.errors import DataError, UsageError
from allstep.train.failures import run_worker
from allstep.train.stop import Interrupts


def main() -> int:
    num_workers, fault, marks = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if num_workers == 1:
        return run_worker(lambda comm: body(comm, fault, marks))
    with TemporaryDirectory() as folder:
        arguments = {"fault": fault, "marks": str(marks)}
        workers = Workers(num_workers, "tests.cli.faults:worker", Path(folder), arguments)
        return launch_workers(workers)


def worker(folder: Path) -> int:
    call = read_call(folder)
    fault, marks = call.arguments["fault"], Path(call.arguments["marks"])
    return run_worker(lambda comm: body(comm, fault, marks), launcher_pid=call.launcher_pid)


def body(comm: Communicator, fault: str, marks: Path) -> int:
    if fault.startswith("fit_"):
        return fit_badly(comm, fault, marks)
    with Interrupts() as interrupts:
        (marks / str(comm.rank)).write_text(str(os.getpid()))
        if fault == "work_until_asked":
            code = work_until_asked(comm, interrupts)
        else:
            FAULTS[fault](comm)
            code = 0
        (marks / f"{comm.rank}.done").touch()
        return code


def work_until_asked(comm: Communicator, interrupts: Interrupts) -> int:
    agreed = 0
    while not agreed:
        time.sleep(0.05)
        agreed = int(comm.all_reduce(torch.tensor([interrupts.requested or 0]), "max").item())
    return 128 + agreed


def fit_badly(comm: Communicator, fault: str, marks: Path) -> int:
    """A training of which the last worker fails in its second step, its loaders being busy."""
    mark = marks / str(comm.rank)
    is_bad = comm.rank == comm.size - 1
    if not is_bad:
        mark.write_text(str(os.getpid()))
    num_losses = 0

    def loss(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        nonlocal num_losses
        num_losses += 1
        if fault == "fit_raise_in_loss" and is_bad and num_losses == 2:
            mark.write_text(str(os.getpid()))
            raise ZeroDivisionError("on purpose")
        return model(data).mean()

    model = nn.Linear(1, 1)
    samples = Slow(mark if fault == "fit_raise_in_loader" and is_bad else None)
    task = allstep.Task(
        model=model,
        train_set=samples,
        test_set=samples,
        loss=loss,
        metrics=lambda model, data: {"loss": (0.0, len(data))},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    options = allstep.TrainOptions(epochs=1, global_batch=4, micro_batch=1, loader_workers=2)
    allstep.fit(task, options, comm, marks / "run")
    return 0


class Slow(Dataset):
    """Samples of which some take long; with a file to mark the moment, some can't be read."""

    def __init__(self, mark: Path | None) -> None:
        self._mark = mark

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 3:
            time.sleep(0.2)
        if self._mark is not None and index % 8 == 5:
            self._mark.write_text(str(os.getppid()))
            raise RuntimeError("a sample that can't be read")
        if index % 8 == 6:  # the first, middle and last are read when the loader is made
            time.sleep(0.5 if self._mark is None else 60)
        return torch.ones(1)


class Stuck(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(120)
        return index


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise RuntimeError("a sample that can't be read")
        if index > 4 and get_worker_info() is not None:
            time.sleep(120)
        return index


def raise_in_collective(comm: Communicator) -> None:
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        raise ZeroDivisionError("on purpose")
    comm.all_reduce(torch.ones(3))


def raise_everywhere(comm: Communicator) -> None:
    raise ZeroDivisionError("on purpose")


def raise_while_peers_compute(comm: Communicator) -> None:
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        raise ZeroDivisionError("on purpose")
    a = torch.ones(9000, 9000)
    while True:
        a @ a


def raise_in_loader(comm: Communicator) -> None:
    if comm.rank == comm.size - 1:
        for _ in DataLoader(Broken(), batch_size=1, num_workers=2):
            pass
    comm.all_reduce(torch.ones(3))


def raise_usage(comm: Communicator) -> None:
    raise UsageError("`width` (=0) must be at least 1.")


def raise_data_error(comm: Communicator) -> None:
    if comm.rank == 0:
        raise DataError("cat.jpg is no image.")
    comm.barrier()


def hang_in_collective(comm: Communicator) -> None:
    if comm.rank > 0:
        time.sleep(120)
    comm.all_reduce(torch.ones(3))


def hang_in_compute(comm: Communicator) -> None:
    a = torch.ones(9000, 9000)
    while True:
        a @ a


def hang_in_loader(comm: Communicator) -> None:
    next(iter(DataLoader(Stuck(), num_workers=2)))


FAULTS = {
    function.__name__: function
    for function in (
        raise_in_collective,
        raise_everywhere,
        raise_while_peers_compute,
        raise_in_loader,
        raise_usage,
        raise_data_error,
        hang_in_collective,
        hang_in_compute,
        hang_in_loader,
    )
}

if __name__ == "__main__":
    sys.exit(main())
