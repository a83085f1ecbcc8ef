"""The fit of a learning curve: closed forms, coverage of its intervals, and what it won't say."""

import math

import numpy as np
import pytest

from allstep.errors import UsageError
from allstep.plan import HeldOutErrors, Interval, LearningCurve, fit_learning_curve
from allstep.plan.learning_curve import t_quantile

AMOUNTS = (600, 1800, 6000, 18_000)
WHOLE = 60_000
NUM_HELD_OUT = 10_000
SEED_DEVIATION = 0.03


def law(n: float, scale: float, exponent: float, floor: float) -> float:
    return float(scale * n**-exponent + floor)


def exact(
    scale: float, exponent: float, floor: float, amounts: tuple[int, ...] = AMOUNTS
) -> LearningCurve:
    points = [
        HeldOutErrors(n, NUM_HELD_OUT * law(n, scale, exponent, floor), NUM_HELD_OUT)
        for n in amounts
    ]
    return fit_learning_curve(points)


def drawn(
    rng: np.random.Generator, n: int, num_seeds: int, *parameters: float
) -> list[HeldOutErrors]:
    """As models of several seeds do on one held-out set."""
    found = []
    for _ in range(num_seeds):
        error = law(n, *parameters) * (1 + SEED_DEVIATION * rng.standard_normal())
        found.append(HeldOutErrors(n, int(rng.binomial(NUM_HELD_OUT, error)), NUM_HELD_OUT))
    return found


def mean_error(points: list[HeldOutErrors]) -> float:
    return float(np.mean([point.error for point in points]))


@pytest.mark.parametrize(
    ("scale", "exponent", "floor"),
    [(3.0, 0.35, 0.03), (2.0, 0.5, 0.0), (30.0, 0.9, 0.1), (0.9, 0.15, 0.01)],
)
def test_points_without_noise_give_the_law_back(
    scale: float, exponent: float, floor: float
) -> None:
    curve = exact(scale, exponent, floor)
    assert curve.exponent == pytest.approx(exponent, rel=1e-4)
    assert curve.scale == pytest.approx(scale, rel=1e-3)
    assert curve.floor == pytest.approx(floor, abs=1e-5)
    assert curve.error(WHOLE) == pytest.approx(law(WHOLE, scale, exponent, floor), abs=1e-6)
    assert curve.error(WHOLE) in curve.interval(WHOLE)
    assert floor == pytest.approx(curve.floor_interval.low, abs=1e-3) or (
        curve.floor_interval.low <= floor <= curve.floor_interval.high
    )


@pytest.mark.parametrize(
    ("floor", "num_draws"),
    [(0.08, 40), *(pytest.param(c, 300, marks=pytest.mark.slow) for c in (0.0, 0.03, 0.08))],
)
def test_intervals_hold_the_truth_as_often_as_they_say(floor: float, num_draws: int) -> None:
    """And a line through the logarithms, which has no floor, is too low where there is one."""
    rng = np.random.default_rng(0)
    parameters = 3.0, 0.35, floor
    truth = law(WHOLE, *parameters)
    of_curve = of_measurement = of_floor = 0
    of_lines = []
    for _ in range(num_draws):
        points = [point for n in AMOUNTS for point in drawn(rng, n, 3, *parameters)]
        curve = fit_learning_curve(points)
        of_curve += truth in curve.interval(WHOLE)
        measured = mean_error(drawn(rng, WHOLE, 3, *parameters))
        of_measurement += measured in curve.interval(WHOLE, num_runs=3)
        of_floor += floor in curve.floor_interval
        logs = np.log([[point.num_samples, point.error] for point in points])
        slope, height = np.polyfit(*logs.T, 1)
        of_lines.append(math.exp(height + slope * math.log(WHOLE)) - truth)
    deviation = math.sqrt(0.95 * 0.05 / num_draws)  # of how often an interval of 95 % holds it
    for number in (of_curve, of_measurement, of_floor):
        assert number / num_draws >= 0.95 - 4 * deviation
    bias, scatter = np.mean(of_lines), np.std(of_lines)
    if floor:
        assert bias < -2 * scatter  # nearly every line is too low
    else:
        assert abs(bias) < scatter


@pytest.mark.slow
def test_intervals_are_no_wider_than_they_need_to_be() -> None:
    """With a confidence of 50 % about half of them hold the truth."""
    rng = np.random.default_rng(1)
    parameters = 3.0, 0.35, 0.08
    held = 0
    for _ in range(200):
        points = [point for n in AMOUNTS for point in drawn(rng, n, 3, *parameters)]
        curve = fit_learning_curve(points, confidence=0.5)
        held += law(WHOLE, *parameters) in curve.interval(WHOLE)
    assert 0.35 < held / 200 < 0.65


def test_three_amounts_know_no_floor() -> None:
    """The curve takes 0 for it, but the interval leaves all floors open that fit."""
    curve = exact(3.0, 0.35, 0.08, AMOUNTS[:3])
    assert not curve.is_floor_known and curve.floor == 0
    assert 0.0 in curve.floor_interval and 0.08 in curve.floor_interval
    truth = law(WHOLE, 3.0, 0.35, 0.08)
    assert curve.error(WHOLE) < truth
    assert truth in curve.interval(WHOLE)


def test_two_amounts_leave_everything_open_from_the_line_to_the_last_error() -> None:
    curve = exact(3.0, 0.35, 0.0, AMOUNTS[:2])
    found = curve.interval(WHOLE)
    assert found.low < law(WHOLE, 3.0, 0.35, 0.0) < law(AMOUNTS[1], 3.0, 0.35, 0.0) < found.high


def test_two_trainings_leave_the_whole_interval_open() -> None:
    """Nothing says how far they scatter."""
    points = [HeldOutErrors(1000, 300, 10_000), HeldOutErrors(3000, 200, 10_000)]
    curve = fit_learning_curve(points)
    assert curve.interval(9000) == curve.interval(9000, num_runs=1) == Interval(0.0, 1.0)
    assert curve.floor_interval == Interval(0.0, 1.0)
    again = fit_learning_curve([*points, HeldOutErrors(3000, 210, 10_000)])
    assert again.interval(9000).high < 0.1


def test_a_large_floor_is_known_and_a_small_one_is_not() -> None:
    rng = np.random.default_rng(0)

    def found(floor: float) -> LearningCurve:
        points = [point for n in AMOUNTS for point in drawn(rng, n, 3, 30.0, 0.7, floor)]
        return fit_learning_curve(points)

    assert found(0.1).is_floor_known
    assert not found(0.0).is_floor_known


def test_more_held_out_samples_and_seeds_narrow_the_interval() -> None:
    rng = np.random.default_rng(0)

    def width(num_seeds: int, confidence: float = 0.95) -> float:
        points = [point for n in AMOUNTS for point in drawn(rng, n, num_seeds, 3.0, 0.35, 0.03)]
        found = fit_learning_curve(points, confidence=confidence).interval(WHOLE)
        return found.high - found.low

    assert width(12) < width(3) < width(3, confidence=0.999)


def test_what_scatters_between_seeds_is_found() -> None:
    rng = np.random.default_rng(0)
    points = [point for n in AMOUNTS for point in drawn(rng, n, 40, 3.0, 0.35, 0.03)]
    curve = fit_learning_curve(points)
    assert curve.seed_deviation == pytest.approx(SEED_DEVIATION, rel=0.2)
    assert curve.dispersion < 1.5


def test_no_wrong_answer_at_all_is_no_certainty() -> None:
    points = [
        HeldOutErrors(n, wrong, 360) for n, wrong in ((14, 100), (43, 30), (144, 5), (431, 0))
    ]
    found = fit_learning_curve(points).interval(1437)
    assert found.low == 0 < found.high


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([HeldOutErrors(10, 5, 100)] * 3, r"1 amounts of data \(=\[10\]\)"),
        ([HeldOutErrors(10, 5, 100), HeldOutErrors(20, 5, 100)], "doesn't fall from 10 samples"),
        ([HeldOutErrors(10, 500, 100)] * 2, "at most as many wrong"),
        ([HeldOutErrors(0, 5, 100)] * 2, "must have samples to train on"),
    ],
)
def test_what_gives_no_curve_is_refused(points: list[HeldOutErrors], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit_learning_curve(points)


def test_a_confidence_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`confidence` \(=1.0\)"):
        fit_learning_curve([HeldOutErrors(10, 5, 100)], confidence=1.0)


@pytest.mark.parametrize(
    ("num_free", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (9, 2.262)]
)
def test_quantiles_of_students_t(num_free: int, quantile: float) -> None:
    assert t_quantile(0.95, num_free) == pytest.approx(quantile, rel=0.01)
