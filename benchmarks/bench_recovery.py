"""Seconds from the kill of a worker to the next finished step, ours and torchft's; elastic's price.

    python benchmarks/bench_recovery.py [--quick] [--rounds 5] [--parts kills overhead loop]

    kills     four workers train the recipe `fashion`'s model; two are killed by SIGKILL, one after
              the other: a random one at a random moment of a step. Ours, torchft with the settings
              of its README and example, and torchft with tuned ones take turns.
    overhead  two workers, a step of `fit(..., elastic=True)` over one without, in turns
    loop      the same of a loop of one's own, with `allstep.Elastic` and without

The step that counts is the first that the others finish without the one that was killed, on the
last of them, less their median step afterwards. Then they train to the end, and each one's
parameters are compared with those of one worker that nobody has disturbed: ours bit by bit;
torchft's by ||p - q|| / ||q||, where a run in which nobody is killed tells how much of it is
rounding. torchft averages gradients by `Manager.allreduce`: its DDP fails on the others when a
worker is killed within an all-reduce of Gloo's; how often is counted in runs of one kill.

Keys: `recovery_s`; `speedup_vs_torchft`, the tuned one's seconds over ours, kill by kill;
`speedup_vs_torchft_documented`; `differing_bits`; `torchft_difference`, of the tuned one;
`overhead_pct`, `overhead_cpu_pct`, `loop_overhead_pct`, `loop_overhead_cpu_pct`.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import recovery_worker
import torch
from common import estimate, print_headline, ratio, write_results
from recovery_worker import NUM_WORKERS, final_file, steps_file
from rich.console import Console
from rich.table import Table
from torch import Tensor

from allstep.cli.launch import Workers
from allstep.cli.worker import last_lines

PARTS = ("kills", "overhead", "loop")
TARGETS = {
    "overhead_pct": 1.0,
    "loop_overhead_pct": 1.0,
    "differing_bits": 0,
    "speedup_vs_torchft": 1.0,
}
# Milliseconds, of the lighthouse and of a worker. Documented: torchft's README and train_ddp.py,
# and its defaults for heartbeats. Tuned: ten heartbeats may be missing instead of fifty, of twice
# as many a second, and workers wait for each other in an all-reduce for some steps' time.
SETTINGS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "torchft, documented": (
        {"quorum_tick_ms": 100, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 5_000},
        {"heartbeat_interval_ms": 100, "gloo_timeout_ms": 5_000},
    ),
    "torchft, tuned": (
        {"quorum_tick_ms": 10, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 500},
        {"heartbeat_interval_ms": 50, "gloo_timeout_ms": 500},
    ),
}
VARIANTS = ("allstep", *SETTINGS)
STEPS_BETWEEN = 5  # two kills, at least
_PRELOAD = ["allstep", "torch._dynamo", "torch.utils.tensorboard", "torchft"]
_POLL_S = 0.05
_TIMEOUT_S = 120.0


class WorkerFailedError(RuntimeError):
    """A worker that was not killed; the message is what it said last."""


@dataclass
class Outcome:
    """Of a run's kills, and of its survivors' parameters."""

    recovery_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # workers that had a part in each step


class Watched:
    """Workers whose steps this process reads; as a context manager it leaves none."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.alive = list(range(NUM_WORKERS))

    def steps(self, rank: int) -> list[tuple[float, int]]:
        """When it has finished each, and with how many workers."""
        file = steps_file(self._workers.folder, rank)
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [(float(time_s), int(size)) for time_s, size in map(str.split, lines)]

    def own_steps(self, rank: int) -> list[float]:
        """When it has finished those that it made with all who are alive, and nobody else."""
        return [time_s for time_s, size in self.steps(rank) if size == len(self.alive)]

    def wait_for_steps(self) -> float:
        """Until all have made some with those who are alive; their median seconds."""
        self._wait(lambda: min(len(self.own_steps(r)) for r in self.alive) > STEPS_BETWEEN)
        seconds = [np.diff(self.own_steps(rank)) for rank in self.alive]
        return float(np.median(np.concatenate(seconds)))

    def kill(self, draw: random.Random, step_s: float) -> float:
        """Kills one of them within a step; returns when."""
        time.sleep(draw.random() * step_s)
        rank = draw.choice(self.alive)
        killed_s = time.monotonic()
        self._workers.send(SIGKILL, rank)
        self.alive.remove(rank)
        return killed_s

    def end(self) -> list[Tensor]:
        """Parameters of those who came to the end."""
        self._wait(lambda: all(self._workers.exit_codes[r] is not None for r in self.alive))
        folder = self._workers.folder
        return [torch.load(final_file(folder, rank)) for rank in self.alive]

    def _wait(self, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not happened():
            codes = self._workers.exit_codes
            is_late = time.monotonic() > deadline_s
            for rank in self.alive:
                if is_late or codes[rank]:
                    said = "\n".join(last_lines(self._workers.folder, rank, 30))
                    raise WorkerFailedError(f"worker {rank} (exit {codes[rank]}):\n{said}")
            time.sleep(_POLL_S)


@contextmanager
def starting(variant: str, has_ddp: bool) -> Iterator[Callable[[Path, int], Workers]]:
    """Makes the workers of a variant, in a folder, for so many steps; torchft's lighthouse, too."""
    if variant == "allstep":
        yield lambda folder, num_steps: make_workers("train_allstep", folder, num_steps=num_steps)
        return
    from torchft.coordination import LighthouseServer

    of_lighthouse, of_worker = SETTINGS[variant]
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **of_lighthouse)
    try:
        yield lambda folder, num_steps: make_workers(
            "train_torchft",
            folder,
            num_steps=num_steps,
            lighthouse=lighthouse.address(),
            has_ddp=has_ddp,
            **of_worker,
        )
    finally:
        lighthouse.shutdown()


def make_workers(
    function: str, folder: Path, num_workers: int = NUM_WORKERS, **arguments: Any
) -> Workers:
    """Forked from a process that has imported what they need, whose output goes to files."""
    return Workers(
        num_workers,
        f"{recovery_worker.__name__}:{function}",
        folder,
        arguments,
        preload=_PRELOAD,
        has_logs=True,
        min_workers=1,
    )


def run(
    variant: str, num_kills: int, num_steps: int, draw: random.Random, *, has_ddp: bool = False
) -> Outcome:
    """One training of a variant to its end.

    Raises:
        WorkerFailedError: if a worker that was not killed did not come to the end.
    """
    outcome = Outcome()
    with (
        tempfile.TemporaryDirectory() as folder,
        starting(variant, has_ddp) as make,
        make(Path(folder), num_steps) as workers,
    ):
        watched = Watched(workers)
        step_s = watched.wait_for_steps()
        for _ in range(num_kills):
            killed_s = watched.kill(draw, step_s)
            step_s = watched.wait_for_steps()
            first_s = max(watched.own_steps(rank)[0] for rank in watched.alive)
            outcome.recovery_s.append(first_s - killed_s - step_s)
            outcome.step_s.append(step_s)
        outcome.parameters = watched.end()
        outcome.sizes = [size for _, size in watched.steps(watched.alive[0])]
    return outcome


def differing_bits(a: Tensor, b: Tensor) -> int:
    """How many.

    >>> differing_bits(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]))
    1
    """
    different = a.numpy().view(np.uint32) ^ b.numpy().view(np.uint32)
    return int(np.bitwise_count(different).sum())


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def steps_of_run(num_kills: int) -> int:
    """Some before each kill, some after it, and those that pass before this process looks."""
    return (num_kills + 2) * (STEPS_BETWEEN + 5)


def measure_kills(rounds: int, num_kills: int) -> dict[str, Any]:
    """Variant -> what came of its runs, one a round, in alternating order."""
    num_steps = steps_of_run(num_kills)
    with tempfile.TemporaryDirectory() as folder:
        lone = recovery_worker.train_lone_allstep(num_steps, Path(folder) / "run")
    lone_torch = recovery_worker.train_lone_torch(num_steps)
    rows: dict[str, Any] = {
        variant: {"recovery_s": [], "step_s": [], "difference": [], "sizes": []}
        for variant in VARIANTS
    }
    undisturbed = run("torchft, documented", 0, num_steps, random.Random(0))
    for round_ in range(rounds):
        for variant in VARIANTS if round_ % 2 else reversed(VARIANTS):
            outcome = run(variant, num_kills, num_steps, random.Random(round_))
            row = rows[variant]
            row["recovery_s"] += outcome.recovery_s
            row["step_s"] += outcome.step_s
            row["sizes"].append(outcome.sizes)
            is_ours = variant == "allstep"
            compare = differing_bits if is_ours else relative_difference
            reference = lone if is_ours else lone_torch
            row["difference"] += [compare(p, reference) for p in outcome.parameters]
            print(f"round {round_}, {variant}: {np.round(outcome.recovery_s, 3)} s", flush=True)
    rows["torchft, nobody killed"] = {
        "difference": [relative_difference(p, lone_torch) for p in undisturbed.parameters],
        "sizes": [undisturbed.sizes],
    }
    return rows


def count_ddp(rounds: int) -> dict[str, int]:
    """In how many runs torchft's DDP came to the end without the one that was killed."""
    num_steps, num_survived = steps_of_run(1), 0
    for round_ in range(rounds):
        try:
            run("torchft, tuned", 1, num_steps, random.Random(round_), has_ddp=True)
            num_survived += 1
        except WorkerFailedError as error:
            print(f"round {round_}, torchft's DDP: {str(error).splitlines()[-1]}", flush=True)
    return {"num_kills": rounds, "num_survived": num_survived}


def measure_overhead(repeats: int, *, is_own_loop: bool) -> dict[str, dict[str, list[float]]]:
    """plain, elastic -> wall, cpu -> seconds of each step."""
    with (
        tempfile.TemporaryDirectory() as name,
        make_workers(
            "measure_overhead", Path(name), 2, repeats=repeats, is_own_loop=is_own_loop
        ) as workers,
    ):
        while not workers.wait(1.0):
            pass
        if any(workers.exit_codes):
            raise RuntimeError("\n".join(last_lines(Path(name), 0, 30)))
        return json.loads((Path(name) / "overhead.json").read_text())


def kill_keys(rows: Mapping[str, Any]) -> dict[str, float]:
    """The headline's, of the part `kills`."""
    ours = rows["allstep"]["recovery_s"]
    tuned, documented = (rows[name]["recovery_s"] for name in reversed(SETTINGS))
    return {
        "recovery_s": statistics.median(ours),
        "speedup_vs_torchft": ratio(tuned, ours).median,
        "speedup_vs_torchft_documented": ratio(documented, ours).median,
        "differing_bits": max(rows["allstep"]["difference"]),
        "torchft_difference": statistics.median(rows["torchft, tuned"]["difference"]),
    }


def kill_table(rows: Mapping[str, Any]) -> Table:
    """A row a variant."""
    ours = rows["allstep"]["recovery_s"]
    table = Table(
        "", "recovery, s", "over ours", "step, ms", "samples lost", "parameters differ by"
    )
    for name, row in rows.items():
        worst = max(row["difference"])
        if name == "allstep":  # which runs a step's samples again, whoever is there
            lost, difference = "0", f"{worst} bits"
        else:
            lost, difference = str(median_lost_samples(row["sizes"])), f"{worst:.2g}"
        cells = ["", "", ""]
        if "recovery_s" in row:
            over, step_s = ratio(row["recovery_s"], ours), statistics.median(row["step_s"])
            cells = [str(estimate(row["recovery_s"])), str(over), f"{1e3 * step_s:.0f}"]
        table.add_row(name, *cells, lost, difference)
    return table


def median_lost_samples(sizes: Sequence[Sequence[int]]) -> int:
    """Of torchft's runs, from the workers in each step: those of the others had no part in it."""
    lost = [sum(NUM_WORKERS - size for size in of_run) for of_run in sizes]
    return round(statistics.median(lost) * recovery_worker.MICRO_BATCH)


def overhead_table(title: str, seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """A row a clock."""
    table = Table("clock", "plain step, ms", "elastic over plain", title=title)
    for clock in ("wall", "cpu"):
        plain, elastic = seconds["plain"][clock], seconds["elastic"][clock]
        plain_ms = estimate([1e3 * s for s in plain])
        table.add_row(clock, str(plain_ms), str(ratio(elastic, plain)))
    return table


def overhead_keys(
    prefix: str, seconds: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, float]:
    """The headline's, of the parts `overhead` and `loop`."""
    return {
        f"{prefix}{name}": ratio(seconds["elastic"][clock], seconds["plain"][clock]).excess().median
        for name, clock in (("overhead_pct", "wall"), ("overhead_cpu_pct", "cpu"))
    }


def torchft_version() -> str:
    """Ends this process where there is none."""
    try:
        return version("torchft")
    except PackageNotFoundError:
        sys.exit("torchft is not installed: pip install -c constraints.txt -e '.[bench]'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores")
    parser.add_argument("--rounds", type=int, help="default: 5 of two kills, quick 1 of one")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part in (arguments.parts or PARTS)]
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    results: dict[str, Any] = {"targets": TARGETS}
    keys: dict[str, float] = {}
    torch.set_num_threads(1)
    os.environ.setdefault("RUST_LOG", "error")  # the lighthouse says each quorum otherwise
    if "kills" in parts:
        results["torchft"] = torchft_version()
        rows = measure_kills(rounds, 1 if arguments.quick else 2)
        keys |= kill_keys(rows)
        ddp = count_ddp(rounds)
        results |= {"settings": SETTINGS, "num_workers": NUM_WORKERS, "kills": rows}
        results["torchft_ddp"] = ddp
        Console().print(kill_table(rows))
        print(f"torchft's DDP went on after {ddp['num_survived']} of {ddp['num_kills']} kills")
    for part in parts[parts[0] == "kills" :]:
        seconds = measure_overhead(60 if arguments.quick else 500, is_own_loop=part == "loop")
        Console().print(overhead_table(part, seconds))
        keys |= overhead_keys("" if part == "overhead" else "loop_", seconds)
        results[part] = seconds
    name = "recovery" if parts == list(PARTS) else f"recovery_{'_'.join(parts)}"
    write_results(name, {**results, **keys})
    print_headline(**keys)


if __name__ == "__main__":
    main()
