"""Panel a: what 32 times the batch does to accuracy, and what keeps it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean, stdev

from allstep.cli.demo.crew import Crew
from allstep.cli.demo.large_batch_runs import EPOCHS, FACTOR, LINES, MICRO_BATCH, Line, train
from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.train import num_cores

__all__ = ["measure"]

_COLLAPSED = 2.0  # points lost
_KEPT = 0.5


def measure(crew: Crew, num_seeds: int) -> Iterator[Panel]:
    """Trains every line with every seed, as many at a time as there are cores."""
    jobs = [(line, seed) for seed in range(num_seeds) for line in LINES]
    calls = [(train, (line.settings, seed)) for line, seed in jobs]
    accuracies: dict[str, list[float]] = {line.name: [] for line in LINES}
    yield _panel(accuracies, f"training 1 of {len(jobs)}", num_seeds)
    for num_done, (number, found) in enumerate(crew.each(calls, num_cores()), start=1):
        accuracies[jobs[number][0].name].append(100 * found["accuracy"])
        if num_done < len(jobs):
            yield _panel(accuracies, f"training {num_done + 1} of {len(jobs)}", num_seeds)
    yield _panel(accuracies, "", num_seeds)


def _panel(accuracies: dict[str, list[float]], status: str, num_seeds: int) -> Panel:
    small = accuracies[LINES[0].name]
    return Panel(
        letter="a",
        title=f"Large batch: digits, {num_seeds} seed{'s' * (num_seeds > 1)}, test accuracy",
        header=("", "batch", "rate", "warm-up", "accuracy, %", "v. small"),
        rows=[_row(line, accuracies[line.name], small) for line in LINES],
        chart=Chart("test accuracy, %", _bars(accuracies)),
        notes=_NOTES,
        status=status,
        conclusion="" if status else _conclude(accuracies),
        numbers={
            "accuracy_pct": accuracies,
            "settings": {line.name: asdict(line.settings) for line in LINES},
        },
    )


_NOTES = (
    f"Same model, same {EPOCHS} epochs; batch norm sees {MICRO_BATCH} samples at a time in all"
    " lines. ± is the standard deviation over the seeds.",
    "Linear scaling and the old rate follow from the small batch's rate. All else was found in"
    " four trials a line on training digits held out, with other seeds and without the test set.",
)


def _bars(accuracies: dict[str, list[float]]) -> list[Bar]:
    return [
        Bar(name, mean(found), spread=_spread(found)) for name, found in accuracies.items() if found
    ]


def _row(line: Line, found: Sequence[float], small: Sequence[float]) -> tuple[str, ...]:
    settings = line.settings
    warmup = f"{settings.warmup_epochs:g} epochs" if settings.warmup_epochs else "none"
    cells = (line.name, f"{settings.global_batch}", f"{settings.lr:g}", warmup)
    if not found:
        return (*cells, "", "")
    accuracy = f"{mean(found):.1f} ± {_spread(found):.1f}" if len(found) > 1 else f"{found[0]:.1f}"
    difference = f"{mean(found) - mean(small):+.1f}" if small and line is not LINES[0] else ""
    return (*cells, accuracy, difference)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _conclude(accuracies: dict[str, list[float]]) -> str:
    lost = {name: mean(accuracies[LINES[0].name]) - mean(a) for name, a in accuracies.items()}
    naive, warm = lost["linear scaling"], lost["with warm-up"]
    verb = "collapses" if naive > _COLLAPSED else "loses little here"
    kept = [line.name for line in LINES[2:] if lost[line.name] <= _KEPT]
    keeping = ", ".join(kept) if kept else "none of the others"
    return (
        f"{FACTOR}x the batch with {FACTOR}x the rate {verb} ({-naive:+.1f} points); with the"
        f" warm-up it is {-warm:+.1f} points from the small batch."
        f" Within {_KEPT:g} points: {keeping}."
    )
