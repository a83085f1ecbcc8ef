"""What measuring the gradient noise scale costs a step.

    python benchmarks/bench_noise_scale.py [--quick]

Steps of the recipe `fashion` (batch 128, on random pictures) as `allstep train` makes them: without
measuring, measuring at every tenth step, and at every step. One worker with micro-batches of 32;
two workers with as many, and with one each of 64: there worker 0 sees its gradient alone, and sends
nothing before its backward pass is over. Workers are processes of one thread; the variants take
turns, ten steps at a time. Key: `noise_scale_pct`, the worst at every tenth step.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from bench_overhead import GLOBAL_BATCH, STEPS_PER_EPOCH, fashion_task
from common import estimate, interleave, print_headline, ratio, write_results
from network import run_on_one_host
from rich.console import Console
from rich.table import Table

import allstep
from allstep import Communicator, TrainOptions
from allstep.optim import constant
from allstep.train import Run

TARGET_PCT = 2.0
EVERY_STEPS = (0, 10, 1)
TURN_STEPS = 10
CASES = ((1, 32), (2, 32), (2, 64))  # workers, micro-batch
TIMEOUT_S = 1800.0


def training(run: Run, comm: Communicator, log_every_steps: int) -> Iterator[None]:
    """The steps of `fit`, with the one collective that carries the measured norms."""
    while True:
        for batch in allstep.steps(run.loader, run.exchange):
            update = run.train_step(batch)
            if run.step % log_every_steps == 0:
                run.sum_losses(update.loss)
            yield


def turn(steps: Iterator[None]) -> Callable[[], None]:
    def make() -> None:
        for _ in range(TURN_STEPS):
            next(steps)

    return make


def work(file: Path, micro_batch: int, repeats: int) -> None:
    """As a rank: seconds of the turns, by steps between two measurements; rank 0 writes them."""
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm, ExitStack() as stack:
        turns = {}
        for every_steps in EVERY_STEPS:
            options = TrainOptions(
                epochs=1,
                global_batch=GLOBAL_BATCH,
                micro_batch=micro_batch,
                noise_scale_every_steps=every_steps,
            )
            torch.manual_seed(0)  # the same pictures everywhere
            task = replace(fashion_task(STEPS_PER_EPOCH * GLOBAL_BATCH), schedule=constant())
            run = Run(task, options, comm)
            stack.enter_context(closing(run))
            turns[str(every_steps)] = turn(training(run, comm, options.log_every_steps))
        seconds = interleave(turns, repeats)
        if comm.rank == 0:
            file.write_text(json.dumps(seconds))
        comm.barrier()


def measure(num_workers: int, micro_batch: int, repeats: int) -> dict[int, list[float]]:
    """Steps between two measurements -> seconds of each turn."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, "--work", file, "--micro-batch", micro_batch]
        run_on_one_host(num_workers, [*command, "--repeats", repeats], timeout_s=TIMEOUT_S)
        return {int(every): seconds for every, seconds in json.loads(file.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores")
    parser.add_argument("--repeats", type=int, help="default: 60, quick 7")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # as a rank
    parser.add_argument("--micro-batch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    repeats = arguments.repeats or (7 if arguments.quick else 60)
    if arguments.work:
        work(arguments.work, arguments.micro_batch, repeats)
        return

    table = Table("workers", "micro-batch", "measured", "step, ms", "cost, %", title="Noise scale")
    results = {}
    for num_workers, micro_batch in CASES:
        seconds = measure(num_workers, micro_batch, repeats)
        step_s = estimate(seconds[0]).median / TURN_STEPS
        for every_steps in EVERY_STEPS[1:]:
            slower = ratio(seconds[every_steps], seconds[0])
            cost_pct = slower.excess()
            measured = f"every {every_steps}" if every_steps > 1 else "always"
            row = (str(num_workers), str(micro_batch), measured, f"{1e3 * step_s:.1f}")
            table.add_row(*row, f"{cost_pct.median:.2f} [{cost_pct.low:.2f}, {cost_pct.high:.2f}]")
            results[f"workers_{num_workers}_micro_batch_{micro_batch}_every_{every_steps}"] = {
                "step_s": step_s,
                "cost_pct": cost_pct.median,
                "interval_pct": [cost_pct.low, cost_pct.high],
            }
    Console().print(table)
    worst_pct = max(row["cost_pct"] for name, row in results.items() if name.endswith("every_10"))
    path = write_results(
        "bench_noise_scale", {"repeats": repeats, "target_pct": TARGET_PCT, "rows": results}
    )
    print(f"target: at most {TARGET_PCT} % at every tenth step; written to {path.name}")
    print_headline(noise_scale_pct=worst_pct)


if __name__ == "__main__":
    main()
