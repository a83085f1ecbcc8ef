"""Learning curves in words, as plain data and as plots."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from allstep.cli.output_files import can_draw, new_figure, writing_errors
from allstep.cli.rows import make_console, make_table
from allstep.plan import HeldOutErrors, Interval, LearningCurve, fit_learning_curve
from allstep.recipes import Recipe, recipe_to_plain

_NUM_DRAWN = 16  # amounts at which curve and band are


@dataclass(frozen=True)
class Curve:
    """The measurements and the predictions from them.

    Attributes:
        recipe: on the whole training set.
        equal: what all shares had as many of: steps or epochs.
        num_samples: of the whole training set.
        num_seeds: trainings on each share.
        measured: held-out errors on parts of it.
        found: their curve.
        in_full: held-out errors on all of it; empty if it was not trained on.
    """

    recipe: Recipe
    equal: str
    num_samples: int
    num_seeds: int
    measured: Sequence[HeldOutErrors]
    found: LearningCurve
    in_full: Sequence[HeldOutErrors] = ()

    @property
    def predicted(self) -> tuple[float, Interval]:
        """The prediction for the whole set: the mean error of the seeds, and its interval."""
        interval = self.found.interval(self.num_samples, num_runs=self.num_seeds)
        return self.found.error(self.num_samples), interval

    @property
    def in_full_mean(self) -> float:
        """The mean error measured on the whole set."""
        return sum(each.error for each in self.in_full) / len(self.in_full)

    @cached_property
    def newest(self) -> LearningCurve:
        """The curve through all measurements, the whole set included."""
        if not self.in_full:
            return self.found
        return fit_learning_curve([*self.measured, *self.in_full])


def plain_curve(curve: Curve) -> dict[str, Any]:
    """All numbers as plain data; None for values that are not known or were not measured."""
    error, interval = curve.predicted
    newest, twice = curve.newest, 2 * curve.num_samples
    in_full = None
    if curve.in_full:
        in_full = {
            "errors": [each.error for each in curve.in_full],
            "mean": curve.in_full_mean,
            "is_in_interval": curve.in_full_mean in interval,
        }
    return {
        **recipe_to_plain(curve.recipe),
        "equal": curve.equal,
        "num_samples": curve.num_samples,
        "num_seeds": curve.num_seeds,
        "measured": [asdict(each) for each in curve.measured],
        "fit": _plain_fit(curve.found),
        "predicted": {"error": error, **asdict(interval)},
        "in_full": in_full,
        "newest_fit": _plain_fit(newest),
        "all_samples": {"error": newest.error(curve.num_samples)},
        "twice_the_samples": {"error": newest.error(twice), **asdict(newest.interval(twice))},
    }


def _plain_fit(found: LearningCurve) -> dict[str, Any]:
    return {
        "scale": found.scale,
        "exponent": found.exponent,
        "floor": found.floor if found.is_floor_known else None,
        "best_floor": found.floor,
        "floor_interval": asdict(found.floor_interval),
        "seed_deviation": found.seed_deviation,
        "dispersion": found.dispersion,
        "confidence": found.confidence,
    }


def show_prediction(curve: Curve) -> None:
    """Prints the errors measured on parts, and their prediction for the whole set."""
    table = make_table("samples", "share", "error", "seeds")
    for amount, errors in _by_amount(curve.measured).items():
        each = " ".join(f"{error:.2%}" for error in errors)
        mean = sum(errors) / len(errors)
        table.add_row(f"{amount:,}", f"{amount / curve.num_samples:.1%}", f"{mean:.2%}", each)
    make_console().print(table)
    small = [f"{n:,}" for n in _by_amount(curve.measured) if n < curve.recipe.global_batch]
    if small:
        print(
            f"Those on {' and '.join(small)} samples had smaller steps: a global batch has"
            f" {curve.recipe.global_batch}."
        )
    print(f"\n{_words_of_fit(curve.found)}")
    error, interval = curve.predicted
    held_out = curve.measured[0].num_held_out
    print(
        f"predicted on all {curve.num_samples:,} samples: {error:.2%}, {_between(interval)} (the"
        f" mean of {curve.num_seeds} seeds on {held_out:,.0f} held-out answers)",
        flush=True,
    )


def show_check(curve: Curve) -> None:
    """Prints the error measured on the whole set, if any, and the prediction for twice as much."""
    if curve.in_full:
        _, interval = curve.predicted
        where = "in" if curve.in_full_mean in interval else "outside"
        each = " ".join(f"{measured.error:.2%}" for measured in curve.in_full)
        print(
            f"measured on all {curve.num_samples:,} samples: {curve.in_full_mean:.2%} ({each}),"
            f" {where} the interval\nWith these, {_words_of_fit(curve.newest)}"
        )
    twice = 2 * curve.num_samples
    newest = curve.newest
    print(
        f"twice as many samples: {newest.error(twice):.2%}, {_between(newest.interval(twice))} for"
        " the curve"
    )


def _words_of_fit(found: LearningCurve) -> str:
    law = f"error(n) = {found.scale:.3g} * n^-{found.exponent:.3g}"
    between = _between(found.floor_interval)
    if found.is_floor_known:
        return f"{law} + {found.floor:.2%}: no amount of data goes below that, {between}"
    why = "" if found.has_floor else "; four shares are needed for that"
    return (
        f"{law} + {found.floor:.2%}, of which the last part is not known: these shares don't tell"
        f" from 0 what stays with any amount of data ({between}{why})"
    )


def _between(interval: Interval) -> str:
    return f"95 %: {interval.low:.2%} to {interval.high:.2%}"


def _by_amount(measured: Sequence[HeldOutErrors]) -> Mapping[int, list[float]]:
    found: dict[int, list[float]] = {}
    for each in sorted(measured, key=lambda each: each.num_samples):
        found.setdefault(each.num_samples, []).append(each.error)
    return found


def draw(curve: Curve, path: Path) -> list[str]:
    """Writes the plot, if matplotlib is installed; returns the files' names."""
    if not can_draw():
        return []
    figure = new_figure()
    axes = figure.subplots()
    least = min(each.num_samples for each in curve.measured)
    amounts = np.geomspace(least, 2 * curve.num_samples, _NUM_DRAWN)
    found = curve.found
    bands = [found.interval(float(amount)) for amount in amounts]
    axes.plot(amounts, [100 * found.error(float(amount)) for amount in amounts], label="fit")
    low, high = ([100 * getattr(band, end) for band in bands] for end in ("low", "high"))
    axes.fill_between(amounts, low, high, alpha=0.2, label="95 % for the curve")
    for label, color, measured in (
        ("parts", "tab:orange", curve.measured),
        ("whole set", "tab:green", curve.in_full),
    ):
        for amount, errors in _by_amount(measured).items():
            axes.plot([amount] * len(errors), [100 * x for x in errors], ".", color=color, ms=4)
        means = [(amount, 100 * sum(x) / len(x)) for amount, x in _by_amount(measured).items()]
        if means:
            axes.plot(*zip(*means, strict=True), "D", color=color, ms=5, label=f"{label}, mean")
    error, interval = curve.predicted
    ends = [[100 * (error - interval.low)], [100 * (interval.high - error)]]
    axes.errorbar(
        [curve.num_samples], [100 * error], ends, fmt="k_", capsize=5, label="predicted, 95 %"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="training samples", ylabel="held-out error (%)", title=curve.recipe.name)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    with writing_errors(str(path)):
        figure.savefig(path, dpi=120)
    return [path.name]
