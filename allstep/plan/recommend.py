"""Which policy, how many workers, and why; or «don't».

[Note: recommendation] A policy may be recommended if it costs nothing in accuracy, or at most the
points that the user can spare as measured, or if it has not been measured but still takes the mean
of everyone's gradients at every step; the sentence then says so. Averaging parameters now and then
changes the training too much for that, and the more the more workers do: it may be recommended for
as many workers as it was measured on. Of policies within 2 % of the fastest, the simplest wins.
Workers are added as long as each of them brings a quarter of what the first one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.plan.accuracy import AccuracyTable, is_lossless
from allstep.plan.bottlenecks import growing_bottleneck, largest_bottleneck
from allstep.plan.cluster import check_not_negative
from allstep.plan.policies import PolicySpec
from allstep.plan.predict import WORTH_ADDING, Prediction, worth_adding
from allstep.plan.time_to_target import Target

__all__ = ["Recommendation", "recommend", "simplest_fast"]

# Differences below this share are less than predictions are good for.
_AS_FAST = 0.02
# Up to here ImageNet kept its accuracy with plain SGD (Goyal et al., 2017).
_LARGE_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to do.

    Attributes:
        choice: the recommended cell of the table; None means «don't scale».
        sentence: what to do and why.
        best: of each number of workers beyond one, what may be recommended for it.
    """

    choice: Prediction | None
    sentence: str
    best: Sequence[Prediction] = ()


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
    several = [p for p in predictions if p.num_workers > 1]
    if not several:
        return Recommendation(choice=None, sentence="one worker has nobody to talk to.")
    allowed = [p for p in several if _is_allowed(p, accuracy, max_points_lost)]
    counts = sorted({p.num_workers for p in allowed})
    best = [simplest_fast([p for p in allowed if p.num_workers == count]) for count in counts]
    num_workers = worth_adding([(1, 1.0), *((p.num_workers, _gain(p, target)) for p in best)])
    choice = next((p for p in best if p.num_workers == num_workers), None)
    others = [p for p in several if p not in allowed]
    if choice is None:
        sentences = [_dont(best, target), _temptation(others, best, 1.0, accuracy, target)]
    else:
        sentences = [
            _do(choice, target),
            _batch_note(choice, target),
            _instead_of(choice, _simplest(predictions, num_workers)),
            _accuracy_note(choice.policy, accuracy),
            _limit(choice, best, target),
            _temptation(others, best, _gain(choice, target), accuracy, target),
        ]
    return Recommendation(
        choice=choice, sentence=" ".join(filter(None, sentences)), best=tuple(best)
    )


def _is_allowed(prediction: Prediction, accuracy: AccuracyTable, max_points_lost: float) -> bool:
    policy = prediction.policy
    cost = accuracy.cost(policy)
    if cost is None:
        return policy.sync_every == 1
    return cost.mean <= max_points_lost and not _is_beyond(prediction, accuracy)


def _is_beyond(prediction: Prediction, accuracy: AccuracyTable) -> bool:
    """Whether more workers train alone for some steps than when that was measured."""
    return prediction.policy.sync_every > 1 and prediction.num_workers > accuracy.num_workers


def simplest_fast(predictions: Sequence[Prediction]) -> Prediction:
    """The first of those that are as good as the fastest."""
    fastest_s = min(p.report.step_s for p in predictions)
    return next(p for p in predictions if p.report.step_s <= (1 + _AS_FAST) * fastest_s)


def _simplest(predictions: Sequence[Prediction], num_workers: int) -> Prediction:
    return next(p for p in predictions if p.num_workers == num_workers)


def _gain(prediction: Prediction, target: Target | None) -> float:
    """How many times as fast as one worker."""
    return prediction.speed_up if target is None else target.speed_up(prediction)


def _do(choice: Prediction, target: Target | None) -> str:
    workers = f"{choice.num_workers:,} workers with {choice.policy.name}"
    batch = ""
    if choice.global_batch != choice.single_worker_batch:
        batch = f"; the batch grows from {choice.single_worker_batch:,} to {choice.global_batch:,}"
    if target is None:
        gain = f"{choice.speed_up:,.1f}x one worker, {choice.efficiency:.0%} efficient"
    else:
        gain = (
            f"{target.speed_up(choice):,.1f}x one worker on the way to the target,"
            f" {choice.speed_up:,.1f}x in samples per second"
        )
    return f"{workers}: {gain}{batch}."


def _batch_note(choice: Prediction, target: Target | None) -> str:
    """Samples per second are not all: large batches may need more of them."""
    if target is not None or choice.global_batch <= max(_LARGE_BATCH, choice.single_worker_batch):
        return ""
    return (
        "Whether every sample of so large a batch still counts is not in these numbers: a noise"
        " scale would tell."
    )


def _instead_of(choice: Prediction, simplest: Prediction) -> str:
    if choice.policy.name == simplest.policy.name:
        return (
            f"Nothing that may be recommended is more than {_AS_FAST:.0%} faster, so keep it"
            " simple."
        )
    share, gain = simplest.report.exchange_share, simplest.report.step_s / choice.report.step_s
    return (
        f"With {simplest.policy.name} the exchange takes {share:.0%} of a step; this is"
        f" {gain:.2f}x as fast."
    )


def _accuracy_note(policy: PolicySpec, accuracy: AccuracyTable) -> str:
    if is_lossless(policy):
        return ""
    cost = accuracy.cost(policy)
    if cost is None:
        return "What it costs in accuracy is not measured: compare a short run with fp32."
    return f"It cost {cost} points of accuracy on {accuracy.task}."


def _limit(choice: Prediction, best: Sequence[Prediction], target: Target | None) -> str:
    """Why more workers don't pay: what grows most on the way to the next number of them."""
    following = next((p for p in best if p.num_workers > choice.num_workers), None)
    if following is None:
        return ""
    loss = growing_bottleneck(choice, following, target)
    return (
        f"More workers don't pay: {following.num_workers:,} would be"
        f" {_gain(following, target):,.1f}x one worker with {following.policy.name}, as"
        f" {loss.reason}."
    )


def _dont(best: Sequence[Prediction], target: Target | None) -> str:
    if not best:
        return "don't: none of these may be recommended."
    fastest = max(best, key=lambda p: _gain(p, target))
    loss = largest_bottleneck(fastest, target)
    way = "" if target is None else " on the way to the target"
    return (
        f"don't: {fastest.num_workers:,} workers with {fastest.policy.name}, the best that may be"
        f" recommended, come to {_gain(fastest, target):,.2f}x the speed of one{way}:"
        f" {loss.reason}. What would help: {loss.cure}."
    )


def _temptation(
    others: Sequence[Prediction],
    best: Sequence[Prediction],
    reached: float,
    accuracy: AccuracyTable,
    target: Target | None,
) -> str:
    """What else would pay if accuracy didn't matter."""
    gains = {p.num_workers: _gain(p, target) for p in best}
    tempting = [
        p
        for p in others
        if _gain(p, target) >= (1 + WORTH_ADDING) * max(reached, gains.get(p.num_workers, 0.0))
    ]
    if not tempting:
        return ""
    most = max(tempting, key=lambda p: _gain(p, target))
    cost = accuracy.cost(most.policy)
    if cost is None:
        price = "at a cost in accuracy that is not measured"
    elif _is_beyond(most, accuracy):
        price = f"at a cost in accuracy that is measured on {accuracy.num_workers} workers only"
    else:
        price = f"for {cost} points"
    gain = _gain(most, target)
    return (
        f"On {most.num_workers:,} workers {most.policy.name} would come to {gain:,.1f}x, {price}."
    )
