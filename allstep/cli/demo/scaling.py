"""Panel d: how many workers are useful, and whether a second one pays on this machine."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.processes import Processes
from allstep.comm import Communicator
from allstep.env import num_cores
from allstep.plan import WORTH_ADDING
from allstep.recipes.digits import Digits
from allstep.train import fit

_NUM_REPEATS = 2
_NOISE_EPOCHS, _SPEED_EPOCHS = 6, 2
_PAIR = "2 workers, a thread each"

Speeds = dict[str, list[float]]


def measure(processes: Processes, folder: Path) -> Iterator[Panel]:
    """Measures the noise scale in a training, then one worker and two in turns."""
    teams = _teams()
    speeds: Speeds = {name: [] for name in teams}
    yield _panel(speeds, None, "training on 1 worker with the noise scale")
    noise = processes.run(
        1, train, run_dir=str(folder / "noise"), epochs=_NOISE_EPOCHS, noise_every_steps=2
    )
    for repeat in range(_NUM_REPEATS):
        for number, (name, (size, num_threads)) in enumerate(teams.items()):
            yield _panel(speeds, noise, f"timing {name}")
            report = processes.run(
                size,
                train,
                run_dir=str(folder / f"speed-{number}-{repeat}"),
                epochs=_SPEED_EPOCHS,
                num_threads=num_threads,
            )
            speeds[name].append(report["samples_per_s"])
    yield _panel(speeds, noise, "")


def _teams() -> dict[str, tuple[int, int]]:
    """Name -> workers, and threads of each; one worker may do best with any of two."""
    teams = {"1 worker, 1 thread": (1, 1), _PAIR: (2, 1)}
    if num_cores() > 1:
        teams = {f"1 worker, {num_cores()} threads": (1, num_cores()), **teams}
    return teams


def train(
    comm: Communicator,
    run_dir: str,
    epochs: int,
    noise_every_steps: int = 0,
    num_threads: int = 1,
) -> dict[str, Any]:
    """What a worker says of a short training of the recipe `digits`."""
    torch.set_num_threads(num_threads)
    recipe = Digits(
        epochs=epochs,
        warmup_epochs=1.0,
        evaluate_every_epochs=epochs,
        checkpoint_every_steps=1_000_000,
        noise_scale_every_steps=noise_every_steps,
    )
    report = fit(recipe.task(comm), recipe, comm, run_dir)
    return {
        "samples_per_s": report.samples_per_s,
        "noise_scale": report.noise_scale,
        "useful_batch": report.useful_batch,
    }


def _panel(speeds: Speeds, noise: dict[str, Any] | None, status: str) -> Panel:
    scale = "" if noise is None else f"{noise['noise_scale']:,.0f} samples"
    rows = [("noise scale of the gradient", scale)]
    rows += [
        (name, f"{median(found):,.0f} samples/s" if found else "") for name, found in speeds.items()
    ]
    ratio = None if status else _speed_up(speeds)
    rows.append(("2 workers v. the better single one", "" if ratio is None else f"{ratio:.2f}x"))
    recipe = Digits()
    return Panel(
        letter="d",
        title="Scaling: should digits be trained on more workers, on this machine?",
        header=("", "measured"),
        rows=rows,
        chart=Chart("samples a second", [_bar(name, s) for name, s in speeds.items() if s]),
        notes=(
            f"Batch {recipe.global_batch} in micro-batches of {recipe.micro_batch}, on"
            f" {num_cores()} core{'s' * (num_cores() > 1)}. Median of {_NUM_REPEATS} trainings"
            " each, in turns.",
        ),
        status=status,
        conclusion="" if noise is None or ratio is None else _conclude(noise, ratio),
        numbers={**(noise or {}), "samples_per_s": speeds, "speed_up": ratio},
    )


def _bar(name: str, found: list[float]) -> Bar:
    return Bar(name, median(found), spread=(max(found) - min(found)) / 2)


def _speed_up(speeds: Speeds) -> float:
    """Of two workers over the better way to have one."""
    return median(speeds[_PAIR]) / max(median(s) for name, s in speeds.items() if name != _PAIR)


def _conclude(noise: dict[str, Any], ratio: float) -> str:
    advice = "it pays" if ratio >= 1 + WORTH_ADDING else "stay with one"
    return (
        f"By the noise of the gradient: {noise['useful_batch']}."
        f" On this machine 2 workers are {ratio:.2f}x as fast as one: {advice}."
    )
