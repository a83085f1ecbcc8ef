"""Signatures of mistakes along the axes of a mesh on which workers share a copy of the model.

[Note: sharers] Workers that share a copy have the same samples. What is whole on each of them, a
parameter or its gradient, is the same on all; a layer's output is that of the whole layer, or,
where a sum over them follows, a term of it. Sketches are linear, so that such sums can be
compared with the other run.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from allstep.doctor.verify.causes import Cause, Series, agree
from allstep.doctor.verify.compare import Divergence, Quantity, limit_of
from allstep.doctor.verify.outputs import OutputSum
from allstep.doctor.verify.record import RunRecord, WorkerRecord
from allstep.doctor.verify.sketch import Sketch
from allstep.errors import first_few

_FACTOR_TOLERANCE = 10.0  # limits
_LEFT = 30.0  # limits: a difference of sums is less exact than they are


def axis_causes(one: RunRecord, other: RunRecord, divergence: Divergence | None) -> list[Cause]:
    """Causes along axes that are not for data; empty where no workers share a copy."""
    if len(other.sharers) < 2 or divergence is None:
        return []
    if divergence.quantity == "initial parameters":
        return _other_parts(one, other)
    if divergence.quantity == "options":
        return []
    return (
        _missing_sum(one, other, divergence.step)
        or _repeated_bias(one, other, divergence.step)
        or _scaled(one, other, divergence.step)
    )


def sharers_apart(run: RunRecord, quantity: Quantity = "parameters") -> tuple[int, str] | None:
    """The first step and tensor that differs between workers that share a copy; None if none.

    Args:
        run: of a mesh.
        quantity: "gradient" or "parameters".
    """
    first, *others = run.sharers
    for step in range(run.num_steps):
        for other in others:
            for name in _differing(_of(first, quantity, step), _of(other, quantity, step), 0.0):
                return step, name
    return None


def output_apart(one: RunRecord, other: RunRecord, step: int) -> str | None:
    """The first module whose output differs between workers that share a copy, in words.

    Args:
        one: the run in which outputs are whole.
        other: the one whose workers are compared.
        step: to look at.
    """
    whole = one.first.steps[step].outputs
    first, *others = [worker.steps[step].outputs for worker in other.sharers]
    for name, mine in first.items():
        theirs = [outputs[name] for outputs in others if name in outputs]
        widths = {of.width for of in (mine, *theirs, *([whole[name]] if name in whole else ()))}
        is_whole = len(widths) == 1 and not _is_cut(other, name)
        if is_whole and any(mine.products != of.products for of in theirs):
            return _module_text(name)
    return None


# -- parts ---------------------------------------------------------------------------------------


def _other_parts(one: RunRecord, other: RunRecord) -> list[Cause]:
    mine, theirs = one.first.initial_parameters, other.first.initial_parameters
    for name in _differing(mine, theirs, limit_of(one, other)):
        if name in other.first.same_parts:
            evidence = f"all workers along {other.shared_axes(name)} have the same part of `{name}`"
            return [Cause("wrong part", evidence)]
        if name in other.first.parts:
            norms = [_norm(of, name) for of in (mine, theirs)]
            if math.isclose(*norms, rel_tol=limit_of(one, other)):
                evidence = f"`{name}` has the values that it has on {one}, in other places"
                return [Cause("wrong part", f"{evidence}: workers have each other's parts")]
        elif any(_differing(theirs, of.initial_parameters, 0.0) for of in other.sharers[1:]):
            evidence = f"`{name}` is whole on each worker along {other.shared_axes()}"
            return [Cause("workers apart", f"{evidence}, and not the same before the first step")]
    return []


# -- gradients -----------------------------------------------------------------------------------


def _missing_sum(one: RunRecord, other: RunRecord, last_step: int) -> list[Cause]:
    """The cause, if the sharers' gradients are terms of the right one."""
    apart = sharers_apart(other, "gradient")
    if apart is None or apart[0] > last_step:
        return []
    step = apart[0]
    first, *others = [worker.steps[step].gradients for worker in other.sharers]
    limit = limit_of(one, other)
    names = list(dict.fromkeys(name for of in others for name in _differing(first, of, limit)))
    if not names:
        return []
    terms = [_joined(of, names) for of in (first, *others)]
    total, wanted = np.sum(terms, axis=0), _joined(one.first.steps[step].gradients, names)
    for divisor, what in ((1, "sum"), (len(terms), "mean")):
        if agree(total / divisor, wanted, limit):
            evidence = (
                f"each worker along {other.shared_axes()} has another gradient of"
                f" {_names_text(names)} at step {step}, and their {what} is that on {one}"
            )
            return [Cause("sum missing", evidence)]
    return []


def _scaled(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """The cause, if gradients are too large or too small by the number of sharers."""
    mine, theirs = one.first.steps[step].gradients, other.first.steps[step].gradients
    limit = limit_of(one, other)
    names = _differing(mine, theirs, limit)
    if not names:
        return []
    x, y = _joined(mine, names), _joined(theirs, names)
    factor = float(x @ y) / (float(x @ x) or 1.0)
    lengths = {*other.first.axes.values(), len(other.sharers)}
    is_length = any(
        math.isclose(factor, known, rel_tol=_FACTOR_TOLERANCE * limit)
        for length in lengths
        for known in (length, 1 / length)
    )
    if not is_length or not agree(factor * x, y, limit):
        return []
    times = f"{factor:.4g} times that on {one}"
    sharers = f"{len(other.sharers)} workers along {other.shared_axes()} share a copy"
    others = {_base(name) for name, sketch in mine.items() if sketch.norm} - {*names}
    if others:
        of = f"the gradient of {_names_text(names)}"
        evidence = f"{of} is {times}, and that of others is right; {sharers}"
        return [Cause("sum repeated" if factor > 1 else "sum missing", evidence)]
    return [Cause("loss scaled along an axis", f"every gradient is {times}; {sharers}")]


# -- outputs -------------------------------------------------------------------------------------


def _repeated_bias(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """The cause, if the first output that differs does so by a multiple of a bias."""
    found = _first_output_apart(one, other, step)
    if found is None:
        return []
    module, mine, differences = found
    before = one.first.steps[step - 1].parameters if step else one.first.initial_parameters
    limit = limit_of(one, other)
    for name, shape in one.first.shapes.items():
        bias = _products(before, name)
        if shape != [mine.width] or not bias.any():
            continue
        for difference in differences:
            times = float(bias @ difference) / float(bias @ bias) / mine.num_rows
            is_whole = round(times) != 0 and abs(times - round(times)) < _FACTOR_TOLERANCE * limit
            if is_whole and agree(times * mine.num_rows * bias, difference, _LEFT * limit):
                evidence = (
                    f"at step {step} the output of {_module_text(module)} is too large by"
                    f" {round(times)} times `{name}`"
                )
                return [Cause("bias repeated", evidence)]
    return []


def _first_output_apart(
    one: RunRecord, other: RunRecord, step: int
) -> tuple[str, OutputSum, list[Series]] | None:
    """The first module whose output differs: name, output in the first run, difference.

    A sharer's output may be a term of the right one. [Note: sharers]
    """
    few, many = _outputs(one.copies, step), _outputs(other.copies, step)
    of_all = _outputs(other.workers, step)
    limit = limit_of(one, other)
    for name, mine in few.items():
        theirs = many.get(name)
        if theirs is None or (theirs.width, theirs.num_rows) != (mine.width, mine.num_rows):
            continue
        found = [np.subtract(of.products, mine.products) for of in (theirs, of_all[name])]
        if min(map(np.linalg.norm, found)) > limit * mine.bound * math.sqrt(len(mine.products)):
            return name, mine, found
    return None


def _outputs(workers: Sequence[WorkerRecord], step: int) -> dict[str, OutputSum]:
    found: dict[str, OutputSum] = {}
    for worker in workers:
        for name, output in worker.steps[step].outputs.items():
            earlier = found.get(name)
            is_first = earlier is None or earlier.width != output.width
            found[name] = output if is_first or earlier is None else earlier + output
    return found


def _is_cut(run: RunRecord, module: str) -> bool:
    """Whether a module's own parameter is cut; its output may then be a part or a term."""
    return any(name.rpartition(".")[0] == module for name in run.first.parts)


def _module_text(name: str) -> str:
    return f"`{name}`" if name else "the model"


# -- sketches by parameter -----------------------------------------------------------------------


def _of(worker: WorkerRecord, quantity: Quantity, step: int) -> Mapping[str, Sketch]:
    record = worker.steps[step]
    return record.gradients if quantity == "gradient" else record.parameters


def _differing(x: Mapping[str, Sketch], y: Mapping[str, Sketch], limit: float) -> list[str]:
    """Parameters that differ by more than `limit` times their norm."""
    names = {_base(name): None for name in (*x, *y)}
    return [
        name
        for name in names
        if not np.linalg.norm(_products(x, name) - _products(y, name))
        <= limit * max(np.linalg.norm(_products(of, name)) for of in (x, y))
    ]


def _products(sketches: Mapping[str, Sketch], name: str) -> Series:
    """The products of a parameter's pieces, added up."""
    found = [
        np.array(sketch.products) for piece, sketch in sketches.items() if _base(piece) == name
    ]
    return np.sum(found, axis=0) if found else np.zeros(1)


def _joined(sketches: Mapping[str, Sketch], names: Sequence[str]) -> Series:
    """The products of several parameters, joined."""
    return np.concatenate([_products(sketches, name) for name in names])


def _norm(sketches: Mapping[str, Sketch], name: str) -> float:
    return math.hypot(*(sketch.norm for piece, sketch in sketches.items() if _base(piece) == name))


def _base(piece: str) -> str:
    """>>> _base("in_proj_bias[0:4]"), _base("0.weight")
    ('in_proj_bias', '0.weight')
    """
    return piece.partition("[")[0]


def _names_text(names: Sequence[str]) -> str:
    """>>> _names_text(["a", "b", "c"])
    '`a` and 2 more'
    """
    return first_few([f"`{name}`" for name in names], 1)
