"""Steps of two workers of which one is three times slower, with equal and with measured shares.

    python benchmarks/bench_shares.py [--quick] [--repeats 9] [--repeat-work]

The workers get processor time 3 to 1 by quotas of control groups, which needs root. With
`--repeat-work`, which needs nothing, worker 1 computes each micro-batch three times and keeps the
last. Equal, measured and ideal shares ([3, 1], given beforehand) take turns, an epoch each; then
the slow worker is worker 0, which the measured shares have to follow.
Keys: `step_vs_ideal` (measured over ideal shares), `speedup_vs_equal` (equal over measured ones),
`swap_vs_ideal` and `steps_to_follow` after the swap.
"""

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import estimate, print_headline, ratio, write_results
from network import UnavailableError, run_on_one_host
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator

SLOWER, MICRO_BATCH, GLOBAL_BATCH, STEPS, WIDTH = 3, 32, 256, 8, 320
VARIANTS: dict[str, Any] = {"equal": "equal", "measured": "measured", "ideal": [SLOWER, 1]}
TARGETS = {"step_vs_ideal": 1.1, "speedup_vs_equal": 1.5, "steps_to_follow": 50}


class RepeatedWork:
    """A slow worker computes each micro-batch several times."""

    def set_slow(self, is_slow: bool) -> int:
        """Whether this worker is the slow one; how often it is to compute a micro-batch."""
        return SLOWER if is_slow else 1

    def close(self) -> None:
        """Nothing to undo."""


class ProcessorQuota:
    """A slow worker gets less of a processor: its control group has a lower quota.

    Args:
        comm: its rank is part of the group's name.

    Raises:
        UnavailableError: if this process may not make a control group.
    """

    FAST_SHARE = 0.9
    """Of a processor."""

    PERIOD_S = 0.01
    """Far below a step, so that a worker is slow and does not stand still."""

    def __init__(self, comm: Communicator) -> None:
        root = Path("/sys/fs/cgroup")
        self._unified = (root / "cgroup.controllers").exists()
        parent = root if self._unified else root / "cpu"
        self._folder = parent / f"allstep-{os.getpid()}-{comm.rank}"
        try:
            self._folder.mkdir()
            self.set_slow(False)
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            message = f"no quota of processor time ({error}): run as root, or with --repeat-work"
            raise UnavailableError(message) from error

    def set_slow(self, is_slow: bool) -> int:
        """Whether this worker is the slow one; how often it is to compute a micro-batch."""
        period_us = round(1e6 * self.PERIOD_S)
        quota_us = round(period_us * self.FAST_SHARE / (SLOWER if is_slow else 1))
        if self._unified:
            (self._folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        return 1

    def close(self) -> None:
        """Gives the process back to the group that holds all."""
        (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()


class Training:
    """One way to share, an epoch at a time."""

    def __init__(self, comm: Communicator, shares: Any) -> None:
        torch.manual_seed(0)
        samples = TensorDataset(torch.randn(STEPS * GLOBAL_BATCH, WIDTH))
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model, self._comm = nn.Sequential(*layers), comm
        self._spare = copy.deepcopy(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._exchange = allstep.attach(self.model, comm)
        self.loader = allstep.data.loader(
            samples, comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, shares=shares
        )

    def epoch(self, num_computed: int) -> Iterator[int]:
        """Worker 0's micro-batches after each step; this rank computes each so many times."""
        for batch in allstep.steps(self.loader, self._exchange):
            for (x,) in batch:
                for _ in range(num_computed - 1):
                    self._spare(x).square().mean().backward()
                batch.backward(self.model(x).square().mean())
            self._optimizer.step()
            self._optimizer.zero_grad()
            yield len(self.loader.shares.parts(self.loader.num_micro_batches)[0])


def timed(training: Training, comm: Communicator, num_computed: int) -> float:
    """Seconds of a step, of the slowest rank."""
    comm.barrier()
    start_s = time.perf_counter()
    for _ in training.epoch(num_computed):
        pass
    local_s = torch.tensor((time.perf_counter() - start_s) / STEPS, dtype=torch.float64)
    return float(comm.all_reduce(local_s, "max"))


def measure(
    comm: Communicator, repeats: int, speed: RepeatedWork | ProcessorQuota
) -> dict[str, Any]:
    """Seconds of a step by kind of shares: of a slow worker 1, then of a slow worker 0."""
    num_computed = speed.set_slow(comm.rank == 1)
    trainings = {name: Training(comm, shares) for name, shares in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for repeat in range(-1, repeats):
        for name in list(trainings) if repeat % 2 else list(reversed(trainings)):
            step_s = timed(trainings[name], comm, num_computed)
            if repeat >= 0:
                seconds[name].append(step_s)
    num_computed = speed.set_slow(comm.rank == 0)
    swapped = {"measured": trainings["measured"], "ideal": Training(comm, [1, SLOWER])}
    wanted = GLOBAL_BATCH // MICRO_BATCH // (SLOWER + 1)
    followed = [n for _ in range(4) for n in swapped["measured"].epoch(num_computed)]
    for name, training in swapped.items():
        seconds[f"swapped {name}"] = []
        timed(training, comm, num_computed)
    for _ in range(repeats):
        for name, training in swapped.items():
            seconds[f"swapped {name}"].append(timed(training, comm, num_computed))
    steps = followed.index(wanted) + 1 if wanted in followed else len(followed)
    return {"seconds": seconds, "steps_to_follow": steps}


def work(file: Path, repeats: int, *, repeats_work: bool) -> None:
    torch.set_num_threads(1)
    with (
        allstep.init(device="cpu") as comm,
        contextlib.closing(RepeatedWork() if repeats_work else ProcessorQuota(comm)) as speed,
    ):
        measured = measure(comm, repeats, speed)
        if comm.rank == 0:
            file.write_text(json.dumps(measured))
        comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half a minute on two cores")
    parser.add_argument("--repeats", type=int, help="default: 9, quick 3")
    parser.add_argument("--repeat-work", action="store_true", help="no quota: compute three times")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    repeats = arguments.repeats or (3 if arguments.quick else 9)
    if arguments.worker:
        work(arguments.worker, repeats, repeats_work=arguments.repeat_work)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, __file__, "--worker", file, "--repeats", repeats]
        command += ["--repeat-work"] if arguments.repeat_work else []
        run_on_one_host(2, command, timeout_s=1800)
        measured = json.loads(file.read_text())
    seconds = measured["seconds"]
    table = Table("shares", "a step, ms")
    for name, values in seconds.items():
        table.add_row(name, str(estimate([1e3 * s for s in values])))
    keys = {
        "step_vs_ideal": ratio(seconds["measured"], seconds["ideal"]).median,
        "speedup_vs_equal": ratio(seconds["equal"], seconds["measured"]).median,
        "swap_vs_ideal": ratio(seconds["swapped measured"], seconds["swapped ideal"]).median,
        "steps_to_follow": measured["steps_to_follow"],
    }
    Console().print(table)
    slowed_by = "work" if arguments.repeat_work else "quota"
    write_results(
        "bench_shares",
        {"targets": TARGETS, **keys, "slowed_by": slowed_by, "repeats": repeats, "rows": seconds},
    )
    print_headline(**keys)


if __name__ == "__main__":
    main()
