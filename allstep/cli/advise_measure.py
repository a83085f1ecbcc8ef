"""`allstep advise --measure`: every policy for real, on the workers at hand."""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from allstep.cli.advise_worker import (
    Answer,
    Question,
    answer,
    ask_first,
    read_answer,
    write_question,
)
from allstep.cli.quantities import parse_counts
from allstep.cli.workers import run_here
from allstep.comm import Communicator
from allstep.env import read_launch
from allstep.errors import UsageError
from allstep.train.devices import num_cores

__all__ = ["check_flags", "measure_here", "worker_counts"]

_MACHINE_FLAGS = (
    "link",
    "cluster",
    "latency_us",
    "per_node",
    "node_link",
    "copy_gb_s",
    "contention",
)


def check_flags(known: Namespace) -> None:
    """Raises UsageError if flags describe machines that are to be measured."""
    for name in _MACHINE_FLAGS:
        value = getattr(known, name)
        if value is not None:
            flag = name.replace("_", "-")
            raise UsageError(
                f"`{name}` (={value}) describes machines, `measure` takes those at hand:"
                f" leave `--{flag}` or `--measure` out."
            )
    if known.stragglers:
        raise UsageError(
            f"`stragglers` (={known.stragglers}) describes machines, `measure` takes those at hand:"
            " leave `--stragglers` or `--measure` out."
        )


def worker_counts(known: Namespace) -> list[int]:
    """The numbers of workers to run, the lone one first.

    Raises:
        UsageError: if this machine, or the launcher, hasn't as many.
    """
    asked = None if known.workers is None else parse_counts("workers", known.workers)
    launch = read_launch()
    if launch.launcher != "none":
        if asked not in (None, [launch.size]):
            raise UsageError(
                f"`workers` (={known.workers}) contradicts {launch.launcher}, which started"
                f" {launch.size}: leave `--workers` out."
            )
        return [launch.size]
    num_gpus = torch.cuda.device_count()
    most, what = (num_gpus, "GPUs") if num_gpus else (num_cores(), "cores")
    if asked is not None and max(asked) > most:
        raise UsageError(
            f"`workers` (={max(asked)}) exceeds the {most} {what} of this machine, so `--measure`"
            " can't run them: ask for fewer, or start `allstep advise --measure` on all machines"
            " with torchrun."
        )
    powers = {1 << exponent for exponent in range(most.bit_length())}
    return sorted({1, *(asked or powers)})


def measure_here(
    ask: Callable[[], Question], counts: Sequence[int], finish: Callable[[list[Answer]], None]
) -> int:
    """Runs the policies on each number of workers, or as one of a launcher's workers.

    Args:
        ask: says what is to be trained; called in one process.
        counts: from `worker_counts`.
        finish: gets the answers, in one process.

    Returns:
        The exit code; the worker of a launcher doesn't return.
    """
    if read_launch().launcher != "none":
        return run_here(lambda comm: _work(comm, ask, finish))
    question, found = ask(), []
    for num_workers in counts:
        with tempfile.TemporaryDirectory(prefix="allstep-") as name:
            folder = Path(name)
            command = write_question(folder, question)
            code = _start(num_workers, command)
            if code:  # a worker, or the launcher, has said why
                return code
            found.append(read_answer(folder))
    finish(_against_lone(found))
    return 0


def _start(num_workers: int, command: Sequence[str]) -> int:
    from allstep.cli.launch import launch_workers

    return launch_workers(num_workers, command)


def _work(
    comm: Communicator, ask: Callable[[], Question], finish: Callable[[list[Answer]], None]
) -> int:
    found = answer(comm, ask_first(comm, ask))
    if comm.rank == 0:
        finish([found])
    return 0


def _against_lone(found: Sequence[Answer]) -> list[Answer]:
    """Efficiency is against one worker that has the machine to itself."""
    lone = found[0].predictions[0]
    return [
        replace(
            one,
            predictions=[
                replace(
                    p,
                    single_worker_batch=lone.single_worker_batch,
                    single_worker_samples_per_s=lone.single_worker_samples_per_s,
                )
                for p in one.predictions
            ],
        )
        for one in found
    ]
