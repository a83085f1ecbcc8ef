"""Fits the error against the amount of training data, and predicts it for more data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from allstep.errors import UsageError, check_integer, check_share

_EXPONENTS = np.geomspace(0.01, 4.0, 65)  # published exponents are 0.05 to 1
_NUM_ZOOMS = 8
_NUM_ZOOMS_OF_PROFILE = 1
_NUM_REWEIGHTINGS = 4
_NUM_BISECTIONS = 16
_AMOUNTS_FOR_FLOOR = 4
_LEAST = 1e-300  # replaces a divisor of 0
_Vector = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOutErrors:
    """The measured error of a model trained on `num_samples`, on held-out samples.

    Several objects with the same `num_samples` are trainings with different seeds.

    Attributes:
        num_samples: samples of the training.
        num_wrong: wrong answers.
        num_held_out: held-out samples.
    """

    num_samples: int
    num_wrong: float
    num_held_out: float

    @property
    def error(self) -> float:
        """The share of wrong answers."""
        return self.num_wrong / self.num_held_out


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class LearningCurve:
    """error(n) = scale * n**-exponent + floor; made by `fit_learning_curve`.

    Args:
        measured: errors of trainings on at least two amounts of data.
        confidence: confidence of all intervals; these are 0 to 1 if there are no more trainings
            than fitted parameters.

    Attributes:
        scale, exponent, floor: fitted parameters; scale and floor are 0 or more, the exponent is
            above 0. With fewer than four amounts of data the floor is not fitted, but taken as 0.
        floor_interval: confidence interval of the floor.
        has_floor: whether the floor was fitted.
        is_floor_known: whether the floor's interval excludes 0.
        seed_deviation: standard deviation between seeds, relative to the error, beyond the
            deviation that the choice of held-out samples explains.
        dispersion: how much farther than expected the errors are from the curve: a ratio of
            variances, 1 or more.
    """

    def __init__(self, measured: Sequence[HeldOutErrors], confidence: float) -> None:
        num_samples = np.array([float(each.num_samples) for each in measured])
        amounts = np.unique(num_samples)
        self.confidence = confidence
        self._unit = float(amounts[-1])  # so that n**-exponent is near 1
        self._n = num_samples / self._unit
        self._errors = np.array([each.error for each in measured])
        self._held_out = np.array([float(each.num_held_out) for each in measured])
        self.has_floor = len(amounts) >= _AMOUNTS_FOR_FLOOR
        self.seed_deviation = self._measure_seed_deviation()
        self._weights, self._misfit, self.exponent, scale, self.floor = self._fit()
        self.scale = scale * self._unit**self.exponent
        num_free = len(measured) - 2 - self.has_floor
        self.dispersion = max(1.0, self._misfit / num_free) if num_free > 0 else 1.0
        # If there are no more trainings than parameters, their scatter is unknown.
        self._quantile = t_quantile(confidence, num_free) if num_free > 0 else math.inf
        self.floor_interval = self._interval(math.inf, self.floor)
        self.is_floor_known = self.has_floor and self.floor_interval.low > 0

    def error(self, num_samples: float) -> float:
        """The error that the curve predicts for a model trained on `num_samples`."""
        return float(self.scale * num_samples**-self.exponent + self.floor)

    def interval(self, num_samples: float, *, num_runs: int | None = None) -> Interval:
        """The confidence interval of the error of a model trained on `num_samples`.

        It is the interval of the profile likelihood: all errors for which some curve through
        them, of any exponent and floor, is not much farther from the measured errors than the best
        curve; the limit is a quantile of Student's t.

        Args:
            num_samples: samples of the training.
            num_runs: number of trainings with new seeds, for the interval of the mean error that
                they would measure on the held-out set, whose own scatter is then included; None
                for the interval of the curve.

        Returns:
            The interval with `confidence`.
        """
        expected = self.error(num_samples)
        found = self._interval(num_samples / self._unit, expected)
        if num_runs is None:
            return found
        check_integer("num_runs", num_runs)
        variance = self._variance(np.array([expected]), self._held_out[:1])[0] / num_runs
        own = self._quantile * math.sqrt(self.dispersion * variance)
        return Interval(
            max(0.0, expected - math.hypot(expected - found.low, own)),
            min(1.0, expected + math.hypot(found.high - expected, own)),
        )

    def _measure_seed_deviation(self) -> float:
        """The deviation between trainings on the same amount, less that of the held-out set."""
        excesses, weights = [], []
        for amount in np.unique(self._n):
            errors = self._errors[self._n == amount]
            if len(errors) > 1 and (mean := errors.mean()) > 0:
                held_out = self._held_out[self._n == amount].mean()
                excesses.append((errors.var(ddof=1) - mean * (1 - mean) / held_out) / mean**2)
                weights.append(len(errors) - 1)
        return math.sqrt(max(0.0, np.average(excesses, weights=weights))) if excesses else 0.0

    def _variance(self, expected: _Vector, held_out: _Vector) -> _Vector:
        """The variance of an error: that of a binomial share plus that between seeds."""
        least = 0.5 / held_out  # even if no answer is wrong, the true share need not be 0
        share = np.clip(expected, least, 1 - least)
        variance: _Vector = share * (1 - share) / held_out + (self.seed_deviation * share) ** 2
        return variance

    def _fit(self) -> tuple[_Vector, float, float, float, float]:
        """Weights, weighted sum of squared residuals, exponent, scale and floor.

        The weights depend on the curve, and the curve on the weights, so they are found in turns,
        a few times.
        """
        expected = np.array([self._errors[self._n == n].mean() for n in self._n])
        for _ in range(_NUM_REWEIGHTINGS):
            weights = 1 / self._variance(expected, self._held_out)
            exponent, misfit = _least(partial(self._misfits, weights), _NUM_ZOOMS)
            (scale,), (floor,), _ = self._lines(weights, np.array([exponent]))
            expected = scale * self._n**-exponent + floor
        return weights, misfit, exponent, float(scale), float(floor)

    def _misfits(self, w: _Vector, exponents: _Vector) -> _Vector:
        return self._lines(w, exponents)[2]

    def _lines(self, w: _Vector, exponents: _Vector) -> tuple[_Vector, _Vector, _Vector]:
        """For each exponent the least-squares scale and floor (0 or more) and sum of squares."""
        x, y = self._n ** -exponents[:, None], self._errors
        scale = np.maximum((x * y) @ w / (x**2 @ w), 0)
        floor = np.zeros(len(exponents))
        if self.has_floor:
            from_mean = x - (x @ w)[:, None] / w.sum()
            slope = np.maximum((from_mean * y) @ w / np.maximum(from_mean**2 @ w, _LEAST), 0)
            height = (y @ w - slope * (x @ w)) / w.sum()
            scale, floor = np.where(height > 0, (slope, height), (scale, floor))
        residuals = y - scale[:, None] * x - floor[:, None]
        return scale, floor, residuals**2 @ w

    def _interval(self, n: float, best: float) -> Interval:
        """The interval of the error at n, in units of the largest amount; n = inf is the floor."""
        least = min(self._misfit, self._profile(best, n))
        limit = least + self.dispersion * self._quantile**2

        def is_inside(value: float) -> bool:
            return self._profile(value, n) <= limit

        return Interval(_edge(is_inside, best, 0.0), _edge(is_inside, best, 1.0))

    def _profile(self, value: float, n: float) -> float:
        """The least sum of squares among all curves with this value at n.

        error(x) = value + scale * (x**-exponent - n**-exponent), where the floor, value - scale *
        n**-exponent, is 0 or more.
        """
        w, y = self._weights, self._errors - value

        def misfit(exponents: _Vector) -> _Vector:
            at_n = np.zeros(len(exponents)) if n == math.inf else n**-exponents
            x = self._n ** -exponents[:, None] - at_n[:, None]
            scale = np.maximum((x * y) @ w / np.maximum(x**2 @ w, _LEAST), 0)
            if n < math.inf:
                scale = np.minimum(scale, value / at_n)
            return np.asarray((y - scale[:, None] * x) ** 2 @ w)

        return _least(misfit, _NUM_ZOOMS_OF_PROFILE)[1]


def fit_learning_curve(
    measured: Sequence[HeldOutErrors], *, confidence: float = 0.95
) -> LearningCurve:
    """Fits the power law with a floor that explains measured errors best.

    error(n) = scale * n**-exponent + floor

    The fit takes least squares with weights 1 / variance. The variance is that of a binomial share
    on the held-out set plus, with several seeds, their variance beyond it.

    Args:
        measured: errors of trainings with the same recipe on at least two amounts of data.
        confidence: confidence of the intervals, between 0 and 1.

    Returns:
        The curve.

    Raises:
        UsageError: if there are fewer amounts, a number is out of range, or the error isn't
            smaller with the largest amount than with the smallest.

    >>> amounts = 100, 400, 1600, 6400
    >>> points = [HeldOutErrors(n, 1000 * (2 * n**-0.5 + 0.01), 1000) for n in amounts]
    >>> curve = fit_learning_curve(points)
    >>> round(curve.scale, 3), round(curve.exponent, 3), round(curve.floor, 3)
    (2.0, 0.5, 0.01)
    >>> round(curve.error(25_600), 4)
    0.0225

    Source: Cortes et al., 1993, "Learning curves: asymptotic values and rate of convergence",
    NeurIPS 6; Hestness et al., 2017, arXiv:1712.00409.
    """
    check_share("confidence", confidence, "(0, 1)", "0.95 is usual")
    for each in measured:
        if each.num_samples < 1 or not 0 <= each.num_wrong <= each.num_held_out:
            raise UsageError(
                f"`measured` (={each}) must have samples to train on, and at most as many wrong"
                " answers as were held out."
            )
    amounts = sorted({each.num_samples for each in measured})
    if len(amounts) < 2:
        raise UsageError(
            f"`measured` has trainings on {len(amounts)} amounts of data (={amounts}): a curve"
            " takes two or more, and four for its floor."
        )
    first, last = (
        np.mean([each.error for each in measured if each.num_samples == amount])
        for amount in (amounts[0], amounts[-1])
    )
    if not last < first:
        raise UsageError(
            f"`measured`: the error doesn't fall from {amounts[0]:,} samples ({first:.2%}) to"
            f" {amounts[-1]:,} ({last:.2%}), so that no curve follows; train on amounts that lie"
            " farther apart."
        )
    return LearningCurve(measured, confidence)


def t_quantile(confidence: float, num_free: float) -> float:
    """The bound that the absolute value of Student's t stays below with some confidence.

    It is accurate to about 1 % for a confidence of up to 0.95; at 0.99 it is too small by 3 % with
    3 degrees of freedom.

    Args:
        confidence: the confidence, between 0 and 1.
        num_free: degrees of freedom, 1 or more.

    Returns:
        The quantile, by a series in 1 / num_free; exact for 1 and 2 degrees of freedom.

    >>> [round(t_quantile(0.95, n), 2) for n in (1, 2, 9, math.inf)]
    [12.71, 4.3, 2.26, 1.96]

    Source: Abramowitz and Stegun, 1964, 26.7.3, 26.7.4 and 26.7.5.
    """
    if num_free == 1:
        return math.tan(math.pi * confidence / 2)
    if num_free == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return (
        z
        + (z**3 + z) / (4 * num_free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * num_free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * num_free**3)
    )


def _least(misfit: Callable[[_Vector], _Vector], num_zooms: int) -> tuple[float, float]:
    """The exponent with the least misfit, and this misfit, by search on ever finer grids."""
    exponents = _EXPONENTS
    for _ in range(num_zooms + 1):
        misfits = misfit(exponents)
        best = int(misfits.argmin())
        found = float(exponents[best]), float(misfits[best])
        low, high = exponents[max(best - 1, 0)], exponents[min(best + 1, len(exponents) - 1)]
        exponents = np.geomspace(low, high, 13)
    return found


def _edge(is_inside: Callable[[float], bool], inner: float, outer: float) -> float:
    """The end of an interval, by bisection between `inner`, which is inside, and `outer`."""
    if is_inside(outer):
        return outer
    for _ in range(_NUM_BISECTIONS):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if is_inside(middle) else (inner, middle)
    return inner
