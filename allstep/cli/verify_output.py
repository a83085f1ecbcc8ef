"""The findings of `allstep verify`, as a table and sentences, or as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from allstep.cli.rows import make_console, make_table, print_json
from allstep.doctor import (
    Diagnosis,
    Divergence,
    Rounding,
    RunRecord,
    largest_difference,
    limit_of,
    mesh_text,
    nonfinite_step,
    total_norm,
)

_STEP_WIDTH, _NORM_WIDTH, _DIFFERENCE_WIDTH = 6, 17, 14
_KINK = 0.01  # relative difference of a gradient that one unit may make


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs, and the results of comparing them.

    Attributes:
        one: the run that all others are compared with.
        others: the others.
        diagnoses: of each of the others.
        num_steps: steps that were asked for.
    """

    one: RunRecord
    others: Sequence[RunRecord]
    diagnoses: Sequence[Diagnosis]
    num_steps: int

    @property
    def is_same(self) -> bool:
        """Whether all runs train the same model."""
        return all(diagnosis.is_same for diagnosis in self.diagnoses)

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, the first being the one with which others are compared."""
        return [self.one, *self.others]

    def num_made(self, run: RunRecord) -> int:
        """The number of a run's steps, at most those requested."""
        return min(self.num_steps, run.num_steps)

    def num_common(self, run: RunRecord) -> int:
        """The number of a run's steps that can be compared."""
        num_both = min(self.num_made(self.one), run.num_steps)
        nonfinite_at = nonfinite_step(self.one, run)
        return num_both if nonfinite_at is None else min(num_both, nonfinite_at)


def show(comparison: Comparison) -> None:
    """Prints the steps side by side, and the findings on each number of workers."""
    console = make_console()
    norms, differences = 2 * len(comparison.runs), len(comparison.others)
    wanted = _STEP_WIDTH + _NORM_WIDTH * norms + _DIFFERENCE_WIDTH * differences
    console.print(_wide(comparison) if wanted <= console.width else _long(comparison))
    for run, diagnosis in zip(comparison.others, comparison.diagnoses, strict=True):
        console.print()
        console.print(_sentences(comparison, run, diagnosis), markup=False)


def _wide(comparison: Comparison) -> Table:
    """Prints a line for each step."""
    sizes = [str(run) for run in comparison.runs]
    table = make_table(
        "step",
        *(f"gradient norm,\n{size}" for size in sizes),
        *(f"parameter norm,\n{size}" for size in sizes),
        *(f"difference,\n{size}" for size in sizes[1:]),
    )
    for step in range(max(map(comparison.num_made, comparison.runs))):
        norms = [_norms(comparison, run, step) for run in comparison.runs]
        table.add_row(
            str(step),
            *(gradient for gradient, _ in norms),
            *(parameters for _, parameters in norms),
            *(_difference(comparison, run, step) for run in comparison.others),
        )
    return table


def _long(comparison: Comparison) -> Table:
    """Prints a line for each step and number of workers, for narrow terminals."""
    table = make_table("step", "workers", "gradient norm", "parameter norm", "difference")
    for step in range(max(map(comparison.num_made, comparison.runs))):
        for run in comparison.runs:
            difference = "" if run is comparison.one else _difference(comparison, run, step)
            where = mesh_text(run.axes) or str(run.size)
            table.add_row(str(step), where, *_norms(comparison, run, step), difference)
    return table


def _norms(comparison: Comparison, run: RunRecord, step: int) -> tuple[str, str]:
    if step >= comparison.num_made(run):
        return "-", "-"
    record = run.first.steps[step]
    return f"{total_norm(record.gradients):.7g}", f"{total_norm(record.parameters):.7g}"


def _difference(comparison: Comparison, run: RunRecord, step: int) -> str:
    if step >= comparison.num_common(run):
        return "-"
    difference = largest_difference(comparison.one, run, step)
    checksums = {of.first.steps[step].checksum for of in (comparison.one, run)}
    if not difference and len(checksums) == 1:
        return "0, same bits"
    mark = "" if difference <= limit_of(comparison.one, run) else " *"
    return f"{difference:.1e}{mark}"


def _sentences(comparison: Comparison, run: RunRecord, diagnosis: Diagnosis) -> str:
    lines = [_conclusion(comparison, run, diagnosis)]
    if diagnosis.rounding is not None:
        lines += _rounding(diagnosis.rounding)
    if diagnosis.nonfinite_at is not None and diagnosis.divergence is None:
        lines.append(
            f"Its parameters are not finite after step {diagnosis.nonfinite_at}, on"
            f" {comparison.one} too: nothing was compared from there on."
        )
    for cause in diagnosis.causes:
        lines += [f"likely cause: {cause.name}: {cause.evidence}.", f"cure: {cause.cure}."]
    if diagnosis.divergence is not None and not diagnosis.is_explained:
        lines.append(f"likely cause: unknown. {_hint(comparison.one, run, diagnosis.divergence)}")
    if comparison.num_made(run) != comparison.num_made(comparison.one):
        lines.append(
            f"note: the script ended after {_steps(comparison.num_made(run))} on"
            f" {run}, after {comparison.num_made(comparison.one)} on {comparison.one}."
        )
    return "\n".join(lines)


def _conclusion(comparison: Comparison, run: RunRecord, diagnosis: Diagnosis) -> str:
    one = comparison.one
    if diagnosis.divergence is not None:
        without = "Without rounding it" if diagnosis.rounding is not None else "It"
        return f"{run}: not the same model. {without} diverges at {diagnosis.divergence}."
    num = comparison.num_common(run)
    same = f"{run}: the same model as on {one} for {_steps(num)}"
    but = ", but not as it should." if diagnosis.causes else "."
    if diagnosis.rounding is not None:
        return f"{same}, up to rounding, amplified by the training{but}"
    largest = max(largest_difference(one, run, step) for step in range(num))
    sizes = f"(largest relative difference {largest:.1e}, limit {limit_of(one, run):.1e})"
    return f"{same}, up to rounding {sizes}{but}"


def _rounding(found: Rounding) -> list[str]:
    """Describes a difference that disappears without rounding."""
    growth = "doesn't grow steadily"
    if found.growth is not None:
        growth = (
            f"grows {found.growth:.3g} times with each step; from about step"
            f" {found.unrelated_at} on two runs will look unrelated"
        )
    gone = "In float64 they agree."
    if found.vanishes_without == "order of sums":
        gone = 'In exact sums (`compression="exact"`) all bits are the same.'
    return [
        f"The gradients differ by {found.at_first:.1e} at first, which {growth}. The limit is"
        f" passed at {found.divergence}.",
        f"{gone} It is no mistake of the script.",
    ]


def _hint(one: RunRecord, other: RunRecord, divergence: Divergence) -> str:
    if divergence.quantity != "gradient":
        return "None of the known ones fits."
    mine, theirs = one.all_samples(divergence.step), other.all_samples(divergence.step)
    if mine == theirs:
        same = "The samples are the same, and neither batch norm nor torch's random numbers fit."
        if divergence.difference < _KINK:
            return (
                f"{same} So little may come of one unit that is zero up to rounding (ReLU): see"
                " whether another seed diverges at the same step."
            )
        return (
            f"{same} Is the loss a mean over something of which workers have unequal amounts"
            " (tokens, class weights)?"
        )
    has_other_lengths = _lengths(one, divergence.step) != _lengths(other, divergence.step)
    if mine.total() == theirs.total() and has_other_lengths:
        return (
            "The samples are of other lengths, as where each worker pads its own. Is the loss a"
            " mean over tokens? Then weigh it by the worker's share of them all."
        )
    return (
        f"The model is given other data: {mine.total()} and {theirs.total()} samples,"
        f" {(mine & theirs).total()} in common. Other samples, or random changes of them?"
    )


def _lengths(run: RunRecord, step: int) -> set[tuple[int, ...]]:
    """The sizes of the inputs' dimensions, except for the first."""
    return {tuple(shape[1:]) for shape in run.input_shapes(step)}


def show_json(script: Path, comparison: Comparison) -> None:
    """Prints everything as JSON."""
    print_json(_plain(script, comparison), indent=2)


def _plain(script: Path, comparison: Comparison) -> dict[str, Any]:
    return {
        "script": str(script),
        "is_same": comparison.is_same,
        "runs": [_plain_run(comparison, run) for run in comparison.runs],
        "results": [
            {
                "workers": run.size,
                "mesh": dict(run.axes),
                "is_same": diagnosis.is_same,
                "num_steps": comparison.num_common(run),
                "limit": limit_of(comparison.one, run),
                "differences": [
                    largest_difference(comparison.one, run, step)
                    for step in range(comparison.num_common(run))
                ],
                "nonfinite_at": diagnosis.nonfinite_at,
                "divergence": None
                if diagnosis.divergence is None
                else asdict(diagnosis.divergence),
                "causes": [{**asdict(cause), "cure": cause.cure} for cause in diagnosis.causes],
                "is_explained": diagnosis.is_explained,
                "rounding": None if diagnosis.rounding is None else asdict(diagnosis.rounding),
            }
            for run, diagnosis in zip(comparison.others, comparison.diagnoses, strict=True)
        ],
    }


def _plain_run(comparison: Comparison, run: RunRecord) -> dict[str, Any]:
    return {
        "workers": run.size,
        "mesh": dict(run.axes),
        "steps": [
            {
                "gradient_norm": total_norm(step.gradients),
                "parameter_norm": total_norm(step.parameters),
                "parameter_checksum": step.checksum,
                "options": step.options,
                "samples": [samples.total() for samples in run.samples(i)],
            }
            for i, step in enumerate(run.first.steps[: comparison.num_made(run)])
        ],
    }


def _steps(num: int) -> str:
    return f"{num} step{'s' * (num > 1)}"
