"""The critical batch of a set of trainings: from their steps to one accuracy."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from points import Point

__all__ = ["fit_steps", "mean_curve", "steps_to"]


def mean_curve(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Steps and the seeds' mean accuracy after each epoch."""
    curves = [point["curve"] for point in points if point["accuracy"] is not None]
    steps = [step for step, _ in curves[0]] if curves else [0.0]
    means = [statistics.mean(curve[i][1] for curve in curves) for i in range(len(steps))]
    return steps, means if curves else [0.0]


def steps_to(target: float, curve: tuple[Sequence[float], Sequence[float]]) -> float:
    """Where a line between the epochs first reaches the target; inf if nowhere.

    >>> steps_to(0.75, ([10, 20], [0.5, 1.0]))
    15.0
    """
    before_step, before = 0.0, 0.0
    for step, accuracy in zip(*curve, strict=True):
        if accuracy >= target:
            share = (target - before) / (accuracy - before)
            return before_step + share * (step - before_step)
        before_step, before = step, accuracy
    return math.inf


def fit_steps(steps: Mapping[int, float]) -> tuple[float, float]:
    """(S_min, E_min) of S = S_min + E_min / B, by least squares of the relative error.

    That is (S / S_min - 1) (E / E_min - 1) = 1 for E = B S samples.

    >>> least = fit_steps({100: 1200.0, 1000: 300.0, 10_000: 210.0})
    >>> [round(value) for value in least]
    [200, 100000]
    """
    batches = np.array(list(steps), dtype=float)
    found = np.array(list(steps.values()))
    sides = np.stack([1 / found, 1 / (batches * found)], axis=1)
    least_steps, least_samples = np.linalg.lstsq(sides, np.ones(len(found)), rcond=None)[0]
    return float(least_steps), float(least_samples)
