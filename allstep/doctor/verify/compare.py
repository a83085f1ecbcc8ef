"""The first divergence of two runs of a script.

[Note: what is rounding] Two sums of the same numbers in another order differ by a few rounding
units, epsilon, and by more where numbers cancel. Runs are taken to agree as long as

    |x - y| <= limit * (max(|x|, |y|) + min(1, 100 limit) * |all tensors|)    limit = sqrt(epsilon)

for each tensor: half of the digits agree (3.5e-4 in float32). The second term is for gradients
that are nothing but rounding, such as that of a bias before batch norm. Adam makes steps of full
length from these, so that their parameters aren't compared.

[Note: not finite] What isn't finite can't be compared: infinity less infinity is no number. Runs
diverge where a tensor is finite in only one of them; where it is in neither, it says nothing. If
the parameters of both stop being finite, steps are compared up to there.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from allstep.doctor.verify.record import RunRecord, StepRecord
from allstep.doctor.verify.sketch import Sketch

Quantity = Literal["initial parameters", "gradient", "options", "parameters"]

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

_FLOAT32_EPSILON = 2.0**-23
_NOISE = 100.0  # rounding units below which a gradient may be nothing but rounding
_OPTION_TOLERANCE = 1e-6  # schedules are computed in doubles


@dataclass(frozen=True)
class Divergence:
    """The first tensor in which two runs differ by more than rounding.

    Attributes:
        step: number of the optimizer step, from 0.
        quantity: what differs.
        name: the tensor, or the option and its parameter group.
        difference: relative to the larger one.
        limit: what might be rounding.
    """

    step: int
    quantity: Quantity
    name: str
    difference: float
    limit: float

    def __str__(self) -> str:
        """>>> str(Divergence(3, "gradient", "0.weight", 0.5, 3.5e-4))
        'step 3, in the gradient of `0.weight` (relative difference 0.5, limit 0.00035)'
        """
        of = "" if self.quantity == "options" else f"the {self.quantity} of "
        size = f"relative difference {self.difference:.2g}, limit {self.limit:.2g}"
        return f"step {self.step}, in {of}`{self.name}` ({size})"


def limit_of(one: RunRecord, other: RunRecord) -> float:
    """The largest relative difference that may be rounding. [Note: what is rounding]"""
    epsilons = [worker.epsilon for run in (one, other) for worker in run.workers]
    return math.sqrt(max(epsilons) or _FLOAT32_EPSILON)


def nonfinite_step(one: RunRecord, other: RunRecord) -> int | None:
    """The first step after which neither run's parameters are finite; None if there is none."""
    for step in range(min(one.num_steps, other.num_steps)):
        after = [run.first.steps[step].parameters for run in (one, other)]
        if not any(math.isfinite(total_norm(parameters)) for parameters in after):
            return step
    return None


def _tensor_differences(
    x: Mapping[str, Sketch], y: Mapping[str, Sketch], limit: float
) -> dict[str, float]:
    """Relative difference of each tensor, by name.

    Args:
        x, y: sketches of tensors; one that is missing counts as zero.
        limit: from `limit_of`.
    """
    names = [*x, *(name for name in y if name not in x)]
    largest = {name: max(_finite_norm(of.get(name)) for of in (x, y)) for name in names}
    total = math.hypot(*largest.values())
    floor = min(1.0, _NOISE * limit) * total
    return {
        name: _distance(x.get(name), y.get(name)) / ((largest[name] + floor) or 1.0)
        for name in names
    }


def _finite_norm(sketch: Sketch | None) -> float:
    return sketch.norm if sketch is not None and math.isfinite(sketch.norm) else 0.0


def _distance(x: Sketch | None, y: Sketch | None) -> float:
    finite = [math.isfinite(sketch.norm) for sketch in (x, y) if sketch is not None]
    if not all(finite):
        return 0.0 if len(finite) == 2 and not any(finite) else math.inf
    if x is None or y is None:
        return max(sketch.norm for sketch in (x, y) if sketch is not None)
    return math.dist(x.products, y.products) / math.sqrt(len(x.products))


def find_divergence(
    one: RunRecord, other: RunRecord, quantities: tuple[Quantity, ...] = QUANTITIES
) -> Divergence | None:
    """The first of `quantities` that differs, and in it the first tensor; None if all agree."""
    limit = limit_of(one, other)
    for step in range(min(one.num_steps, other.num_steps)):
        for quantity, found in _differences_at(one, other, step, limit):
            if quantity in quantities:
                for name, difference in found.items():
                    tolerated = _OPTION_TOLERANCE if quantity == "options" else limit
                    if not difference <= tolerated:
                        return Divergence(step, quantity, name, difference, tolerated)
    return None


def largest_difference(one: RunRecord, other: RunRecord, step: int) -> float:
    """The largest relative difference of any tensor, gradient or parameter, in a step."""
    found = _differences_at(one, other, step, limit_of(one, other))
    return max((d for _, of in found for d in of.values()), default=0.0)


def gradient_difference(one: RunRecord, other: RunRecord, step: int) -> float:
    """Relative difference of all gradients of a step together."""
    x, y = one.first.steps[step].gradients, other.first.steps[step].gradients
    distance = math.hypot(*(_distance(x.get(name), y.get(name)) for name in {*x, *y}))
    return distance / (max(total_norm(x), total_norm(y)) or 1.0)


def total_norm(sketches: Mapping[str, Sketch]) -> float:
    """Norm of all tensors together."""
    return math.hypot(*(sketch.norm for sketch in sketches.values()))


def _differences_at(
    one: RunRecord, other: RunRecord, step: int, limit: float
) -> Iterator[tuple[Quantity, dict[str, float]]]:
    """The differences in a step, in the order in which they arise."""
    if step == 0:
        mine, theirs = (run.first.initial_parameters for run in (one, other))
        yield "initial parameters", _tensor_differences(mine, theirs, limit)
    x, y = one.first.steps[step], other.first.steps[step]
    yield "gradient", _tensor_differences(x.gradients, y.gradients, limit)
    yield "options", _option_differences(x, y)
    noise = noise_tensors(one, step, limit) | noise_tensors(other, step, limit)
    parameters = _tensor_differences(x.parameters, y.parameters, limit)
    yield "parameters", {name: d for name, d in parameters.items() if name not in noise}


def _option_differences(x: StepRecord, y: StepRecord) -> dict[str, float]:
    return {
        x.option_name(key, i): _relative(mine[key], theirs[key])
        for i, (mine, theirs) in enumerate(zip(x.options, y.options, strict=False))
        for key in mine
        if key in theirs
    }


def _relative(x: float, y: float) -> float:
    is_same = x == y or (math.isnan(x) and math.isnan(y))
    return 0.0 if is_same else abs(x - y) / max(abs(x), abs(y))


def noise_tensors(run: RunRecord, last_step: int, limit: float) -> set[str]:
    """Tensors whose gradient was nothing but rounding in some step so far."""
    noise = set()
    for step in run.first.steps[: last_step + 1]:
        total = total_norm(step.gradients)
        for name, sketch in step.gradients.items():
            if 0 < sketch.norm < _NOISE * limit**2 * total:
                noise.add(name)
    return noise
