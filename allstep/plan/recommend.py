"""Which policy, how many workers, and why; or «don't».

[Note: recommendation] A policy may be recommended if it costs nothing in accuracy, or at most the
points that the user can spare as measured, or if it has not been measured but still takes the mean
of everyone's gradients at every step; the sentence then says so. Averaging parameters now and then
changes the training too much for that. Of policies within 2 % of the fastest, the simplest wins.
Workers are added as long as each of them brings a quarter of what the first one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.plan.accuracy import AccuracyTable, is_lossless
from allstep.plan.cluster import check_not_negative
from allstep.plan.policy import Policy
from allstep.plan.scaling import WORTH_ADDING, Prediction, worth_adding
from allstep.plan.time_to_target import Target

__all__ = ["Recommendation", "recommend", "simplest_fast"]

# Differences below this share are less than predictions are good for.
_AS_FAST = 0.02


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to do.

    Attributes:
        choice: the recommended cell of the table; None means «don't scale».
        sentence: what to do and why.
    """

    choice: Prediction | None
    sentence: str


def recommend(
    predictions: Sequence[Prediction],
    accuracy: AccuracyTable,
    *,
    max_points_lost: float = 0.5,
    target: Target | None = None,
) -> Recommendation:
    """Chooses among predictions. See [Note: recommendation].

    Args:
        predictions: of policies, the simplest first, for several numbers of workers.
        accuracy: what the policies cost.
        max_points_lost: points of accuracy that may be lost.
        target: with it, what counts is time to the target and not samples per second.

    Raises:
        UsageError: if `max_points_lost` is negative.
    """
    check_not_negative("max_points_lost", max_points_lost, "0 takes what costs nothing")
    allowed = [p for p in predictions if _is_allowed(p.policy, accuracy, max_points_lost)]
    counts = sorted({p.num_workers for p in predictions if p.num_workers > 1})
    best = [simplest_fast([p for p in allowed if p.num_workers == count]) for count in counts]
    if not best:
        return Recommendation(choice=None, sentence="one worker has nobody to talk to.")
    rates = [(1, _lone_progress(predictions[0], target))]
    rates += [(p.num_workers, _progress(p, target)) for p in best]
    num_workers = worth_adding(rates)
    if num_workers == 1:
        fastest = max(best, key=lambda p: _progress(p, target))
        sentence = _dont(fastest, rates[0][1], target)
        others = [p for p in predictions if p not in allowed]
        return Recommendation(
            choice=None, sentence=sentence + _temptation(others, accuracy, rates[0][1], target)
        )
    choice = next(p for p in best if p.num_workers == num_workers)
    sentences = [
        _do(choice, _simplest(predictions, num_workers)),
        _accuracy_note(choice.policy, accuracy),
        _limit(choice, best, target),
    ]
    return Recommendation(choice=choice, sentence=" ".join(filter(None, sentences)))


def _is_allowed(policy: Policy, accuracy: AccuracyTable, max_points_lost: float) -> bool:
    cost = accuracy.cost(policy)
    return policy.every == 1 if cost is None else cost.mean <= max_points_lost


def simplest_fast(predictions: Sequence[Prediction]) -> Prediction:
    """The first of those that are as good as the fastest."""
    fastest_s = min(p.report.step_s for p in predictions)
    return next(p for p in predictions if p.report.step_s <= (1 + _AS_FAST) * fastest_s)


def _simplest(predictions: Sequence[Prediction], num_workers: int) -> Prediction:
    return next(p for p in predictions if p.num_workers == num_workers)


def _progress(prediction: Prediction, target: Target | None) -> float:
    if target is None:
        return prediction.samples_per_s
    return 1 / target.seconds(prediction)


def _lone_progress(prediction: Prediction, target: Target | None) -> float:
    rate = prediction.lone_samples_per_s
    if target is None:
        return rate
    return rate / target.samples(prediction.lone_batch)


def _do(choice: Prediction, simplest: Prediction) -> str:
    report = choice.report
    text = (
        f"{choice.num_workers:,} workers with {choice.policy.name}:"
        f" {choice.speed_up:.1f}x one worker, {choice.efficiency:.0%} efficient."
    )
    if choice.policy.name == simplest.policy.name:
        return f"{text} Nothing here is more than {_AS_FAST:.0%} faster, so keep it simple."
    waiting = simplest.report.exposed_s / simplest.report.step_s
    gain = simplest.report.step_s / report.step_s
    return (
        f"{text} {simplest.policy.name} waits for the wire in {waiting:.0%} of a step;"
        f" this is {gain:.1f}x as fast."
    )


def _accuracy_note(policy: Policy, accuracy: AccuracyTable) -> str:
    if is_lossless(policy):
        return ""
    cost = accuracy.cost(policy)
    if cost is None:
        return "What it costs in accuracy is not measured: compare a short run with fp32."
    return f"It cost {cost} points of accuracy on {accuracy.task}."


def _limit(choice: Prediction, best: Sequence[Prediction], target: Target | None) -> str:
    beyond = [p for p in best if p.num_workers > choice.num_workers]
    if not beyond:
        return ""
    following = beyond[0]
    if target is not None and choice.global_batch < following.global_batch:
        reason = (
            f"a batch of {following.global_batch:,} takes"
            f" {target.samples(following.global_batch) / target.samples(choice.global_batch):.1f}x"
            " the samples"
        )
    else:
        reason = f"{following.num_workers:,} would be {following.efficiency:.0%} efficient"
    return f"More workers don't pay: {reason}."


def _dont(fastest: Prediction, lone_progress: float, target: Target | None) -> str:
    report = fastest.report
    gain = _progress(fastest, target) / lone_progress
    what = "speed" if target is None else "time to the target"
    waiting = report.exposed_s / report.step_s
    return (
        f"don't: {fastest.num_workers:,} workers with {fastest.policy.name}, the best that may be"
        f" recommended, come to {gain:.2f}x the {what} of one; the wire keeps them waiting for"
        f" {waiting:.0%}"
        " of a step. One worker with a larger batch or a faster machine does more."
    )


def _temptation(
    others: Sequence[Prediction],
    accuracy: AccuracyTable,
    lone_progress: float,
    target: Target | None,
) -> str:
    """What would pay if accuracy didn't matter."""
    if not others:
        return ""
    best = max(others, key=lambda p: _progress(p, target))
    gain = _progress(best, target) / lone_progress
    if gain < 1 + WORTH_ADDING:
        return ""
    cost = accuracy.cost(best.policy)
    price = "at a cost in accuracy that is not measured" if cost is None else f"for {cost} points"
    return f" {best.policy.name} would come to {gain:.1f}x, {price}."
