"""Panel b: whether other numbers of workers train the same model, also after a kill -9."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allstep.cli.demo.crew import ChildError, Crew
from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.same_model_runs import NUM_STEPS, train_as_usual, train_the_same
from allstep.train import read_checkpoint

__all__ = ["measure"]

_SIZES = (2, 4)
_KILL_AFTER_STEP = 20
_KILL_TIMEOUT_S = 120.0
_KILLED = "4, kill -9, then 3"
_WAYS = ("allstep", "allstep, exact", "DDP as usual")
_COMPRESSIONS = {"allstep": "fp32", "allstep, exact": "exact"}

Differences = dict[str, dict[str, float]]


def measure(crew: Crew, folder: Path) -> Iterator[Panel]:
    """Trains every way on 1, 2 and 4 workers, and kills one of 4 to go on with 3."""
    differences: Differences = {way: {} for way in _WAYS}
    yield _panel(differences, "training on 1 worker", None)
    alone = {way: _train(crew, 1, way, folder) for way in _WAYS}
    for size in _SIZES:
        for way in _WAYS:
            yield _panel(differences, f"{way}: training on {size} workers", None)
            found = _train(crew, size, way, folder)
            differences[way][str(size)] = _largest_difference(alone[way], found)
    killed_at: dict[str, int] = {}
    for way in _COMPRESSIONS:
        yield _panel(differences, f"{way}: kill -9 of one of 4 workers", killed_at)
        run_dir = folder / f"{way}-killed"
        killed_at[way] = _train_and_kill(crew, way, run_dir)
        found = _load(crew.run_ranks(3, train_the_same, str(run_dir), _COMPRESSIONS[way], True))
        differences[way][_KILLED] = _largest_difference(alone[way], found)
    yield _panel(differences, "", killed_at)


def _train(crew: Crew, size: int, way: str, folder: Path) -> Mapping[str, Tensor]:
    run_dir = str(folder / f"{way}-{size}")
    if way not in _COMPRESSIONS:
        return _load(crew.run_ranks(size, train_as_usual, run_dir))
    return _load(crew.run_ranks(size, train_the_same, run_dir, _COMPRESSIONS[way], False))


def _load(path: str) -> Mapping[str, Tensor]:
    model: Mapping[str, Tensor] = read_checkpoint(path)["model"]
    return {name: x.double() for name, x in model.items() if "running" not in name}


def _largest_difference(model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((model[name] - other[name]).abs().max()) for name in model)


def _train_and_kill(crew: Crew, way: str, run_dir: Path) -> int:
    """Kills worker 2 of 4 once there are checkpoints; returns the last one's step."""
    children = crew.start_ranks(4, train_the_same, str(run_dir), _COMPRESSIONS[way], False)
    checkpoints = run_dir / "checkpoints"
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while not (checkpoints / f"step-{_KILL_AFTER_STEP:08d}").exists():
        if time.monotonic() > deadline_s:
            raise ChildError(f"no checkpoint came in {_KILL_TIMEOUT_S:g} s.")
        time.sleep(0.005)
    children[2].kill()
    for child in children:
        try:
            child.result()
        except ChildError:
            continue
        raise ChildError("the training was faster than the kill; run the panel again.")
    return max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))


def _panel(differences: Differences, status: str, killed_at: dict[str, int] | None) -> Panel:
    columns = [*map(str, _SIZES), _KILLED]
    return Panel(
        letter="b",
        title="Same model: largest difference of a parameter to the one that 1 worker trains",
        header=("workers", *columns),
        rows=[
            (way, *(_cell(way, found, c) for c in columns)) for way, found in differences.items()
        ],
        chart=Chart(
            "largest parameter difference to 1 worker",
            [
                Bar(way, value, "4, kill -9, 3" if size == _KILLED else f"{size} workers")
                for way, found in differences.items()
                for size, value in found.items()
            ],
            is_log=True,
        ),
        notes=(
            f"Digits, {NUM_STEPS} steps of 96 samples, with batch norm and dropout. DDP as usual"
            " has batch norm and dropout of each worker's own.",
            "fp32 sums differ in the last bits by the order in which workers add; `exact` adds"
            " without rounding.",
        ),
        status=status,
        conclusion="" if status else _conclude(differences, killed_at or {}),
        numbers={"largest_difference": differences, "killed_after_step": killed_at or {}},
    )


def _cell(way: str, found: dict[str, float], column: str) -> str:
    if column == _KILLED and way not in _COMPRESSIONS:
        return "-"
    if column not in found:
        return ""
    return f"{found[column]:.1e}" if found[column] else "0 (same bits)"


def _conclude(differences: Differences, killed_at: dict[str, Any]) -> str:
    ours = max(differences["allstep"].values())
    exact = max(differences["allstep, exact"].values())
    usual = max(differences["DDP as usual"].values())
    exact_text = "not one bit differs" if exact == 0 else f"it is {exact:.1e}"
    return (
        f"With allstep parameters differ by at most {ours:.1e}, also after kill -9 at step"
        f" {killed_at['allstep']} and going on with 3 workers; with compression exact {exact_text}."
        f" DDP as usual trains another model: {usual:.1e}."
    )
