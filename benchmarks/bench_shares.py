"""Steps of two workers of which one is three times slower, with equal and with measured shares.

    python benchmarks/bench_shares.py [--quick] [--repeats 9]

Worker 1 computes each micro-batch three times and keeps the last, so that the ratio is known
whatever else runs on the machine. Equal, measured and ideal shares ([3, 1], given beforehand) take
turns, an epoch each; then the slow worker is worker 0, which the measured shares have to follow.
Keys: `step_vs_ideal` (measured over ideal shares), `speedup_vs_equal` (equal over measured ones),
`swap_vs_ideal` and `steps_to_follow` after the swap.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import estimate, print_headline, ratio, write_results
from network import run_on_one_host
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator

SLOWER, MICRO_BATCH, GLOBAL_BATCH, STEPS, WIDTH = 3, 32, 256, 8, 320
VARIANTS: dict[str, Any] = {"equal": "equal", "measured": "measured", "ideal": [SLOWER, 1]}
TARGETS = {"step_vs_ideal": 1.1, "speedup_vs_equal": 1.5, "steps_to_follow": 50}


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

    def epoch(self, slow_rank: int) -> Iterator[int]:
        """Worker 0's micro-batches after each step."""
        for batch in allstep.steps(self.loader, self._exchange):
            for (x,) in batch:
                for _ in range(SLOWER - 1 if self._comm.rank == slow_rank else 0):
                    self._spare(x).square().mean().backward()
                batch.backward(self.model(x).square().mean())
            self._optimizer.step()
            self._optimizer.zero_grad()
            yield len(self.loader.shares.parts(self.loader.num_micro_batches)[0])


def timed(training: Training, comm: Communicator, slow_rank: int) -> float:
    """Seconds of a step, of the slowest rank."""
    comm.barrier()
    start_s = time.perf_counter()
    for _ in training.epoch(slow_rank):
        pass
    own_s = torch.tensor((time.perf_counter() - start_s) / STEPS, dtype=torch.float64)
    return float(comm.all_reduce(own_s, "max"))


def measure(comm: Communicator, repeats: int) -> dict[str, Any]:
    trainings = {name: Training(comm, shares) for name, shares in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for repeat in range(-1, repeats):
        for name in list(trainings) if repeat % 2 else list(reversed(trainings)):
            step_s = timed(trainings[name], comm, slow_rank=1)
            if repeat >= 0:
                seconds[name].append(step_s)
    swapped = {"measured": trainings["measured"], "ideal": Training(comm, [1, SLOWER])}
    wanted = GLOBAL_BATCH // MICRO_BATCH // (SLOWER + 1)
    followed = [n for _ in range(4) for n in swapped["measured"].epoch(slow_rank=0)]
    for name, training in swapped.items():
        seconds[f"swapped {name}"] = []
        timed(training, comm, slow_rank=0)
    for _ in range(repeats):
        for name, training in swapped.items():
            seconds[f"swapped {name}"].append(timed(training, comm, slow_rank=0))
    steps = followed.index(wanted) + 1 if wanted in followed else len(followed)
    return {"seconds": seconds, "steps_to_follow": steps}


def work(file: Path, repeats: int) -> None:
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm:
        measured = measure(comm, repeats)
        if comm.rank == 0:
            file.write_text(json.dumps(measured))
        comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half a minute on two cores")
    parser.add_argument("--repeats", type=int, help="default: 9, quick 3")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    repeats = arguments.repeats or (3 if arguments.quick else 9)
    if arguments.worker:
        work(arguments.worker, repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, __file__, "--worker", file, "--repeats", repeats]
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
    write_results("bench_shares", {"targets": TARGETS, **keys, "repeats": repeats, "rows": seconds})
    print_headline(**keys)


if __name__ == "__main__":
    main()
