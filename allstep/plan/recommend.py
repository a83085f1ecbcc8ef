"""Recommends a policy and a number of workers, with the reasons; or one worker if that is better.

[Note: recommendation] The recommended policy costs no accuracy: compression is lossless, and every
update uses the mean of all gradients of its own step. Among such policies within 2 % of the
fastest, the simplest is chosen. Workers are added as long as each adds at least a quarter of the
first worker's speed. If the length of the training is known, several workers must save more time
than it takes to start them.

What a lossy policy would gain is reported separately, with its cost. Such a policy is proposed if
it is at least 10 % faster than the recommendation, and if it lost no more points of accuracy than
the user allows. A policy without a measurement is proposed, too, and called unmeasured, unless it
is local SGD: that changes the training the more, the more workers there are, so it is proposed only
up to the number of workers on which it was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.errors import check_not_negative
from allstep.plan.accuracy import AccuracyTable, is_lossless
from allstep.plan.bottlenecks import growing_bottleneck, largest_bottleneck
from allstep.plan.describe import seconds_text, times_text
from allstep.plan.predict import WORTH_ADDING, Prediction, worth_adding
from allstep.plan.price import work_s
from allstep.plan.time_to_target import Target

# Seconds until several workers have imported torch, connected, and started to train.
STARTUP_S = 10.0
# Relative differences below this are smaller than the errors of predictions.
AS_FAST = 0.02
# A lossy policy that gains less than this is not mentioned.
_WORTH_A_LOSS = 0.10
# Up to this batch plain SGD kept its accuracy on ImageNet (Goyal et al., 2017).
_LARGE_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to do, and a faster alternative that may cost accuracy.

    Attributes:
        choice: the recommended prediction, which costs no accuracy; None for one worker.
        sentence: what to do and why.
        lossy: a faster prediction that may cost accuracy; None if there is none.
        lossy_sentence: what `lossy` would bring and cost, and what would be faster still; "" if
            nothing would be faster.
        best: for each number of workers above one, the best prediction that costs no accuracy.
    """

    choice: Prediction | None
    sentence: str
    lossy: Prediction | None = None
    lossy_sentence: str = ""
    best: Sequence[Prediction] = ()


def recommend(
    predictions: Sequence[Prediction],
    accuracy: AccuracyTable,
    *,
    max_points_lost: float = 0.5,
    target: Target | None = None,
    startup_s: float = STARTUP_S,
) -> Recommendation:
    """Chooses among predictions. See [Note: recommendation].

    Args:
        predictions: predictions of policies, the simplest first, for several numbers of workers.
        accuracy: the policies' costs in accuracy.
        max_points_lost: points of accuracy that a lossy policy may cost.
        target: a target, to compare the time to it instead of samples per second.
        startup_s: seconds to start several workers; ignored if the predictions don't know the
            length of the training.

    Returns:
        What to do, and what a lossy policy would gain.

    Raises:
        UsageError: if `max_points_lost` or `startup_s` is negative.
    """
    check_not_negative("max_points_lost", max_points_lost, "0 allows only what costs nothing")
    check_not_negative("startup_s", startup_s, "10 is usual")
    several = [p for p in predictions if p.num_workers > 1]
    if not several:
        return Recommendation(choice=None, sentence="one worker has nobody to talk to.")
    best = _best_by_workers([p for p in several if is_lossless(p.policy)])
    choice = _largest_worth_adding(best, target)
    if choice is None:
        sentences = [_no_gain(best, target)]
    elif not _saves_startup(choice, target, startup_s):
        sentences = [_too_short(choice, target, startup_s)]
        choice = None
    else:
        sentences = [
            _do(choice, target),
            _duration(choice, target),
            _batch_note(choice, target),
            _instead_of(choice, predictions),
            _limit(choice, best, target),
        ]
    reached = 1.0 if choice is None else gain_of(choice, target)
    faster = [
        p
        for p in several
        if not is_lossless(p.policy)
        and gain_of(p, target) >= (1 + _WORTH_A_LOSS) * reached
        and _saves_startup(p, target, startup_s)
    ]
    allowed = [p for p in faster if _is_allowed(p, accuracy, max_points_lost)]
    lossy = _largest_worth_adding(_best_by_workers(allowed), target)
    lossy_sentences = [
        "" if lossy is None else _bring_and_cost(lossy, choice, accuracy, target),
        _temptation([p for p in faster if p not in allowed], best, lossy, accuracy, target),
    ]
    return Recommendation(
        choice=choice,
        sentence=" ".join(filter(None, sentences)),
        lossy=lossy,
        lossy_sentence=" ".join(filter(None, lossy_sentences)),
        best=tuple(best),
    )


def simplest_fast(predictions: Sequence[Prediction]) -> Prediction:
    """The first of the predictions that are about as fast as the fastest."""
    fastest_s = min(p.report.step_s for p in predictions)
    return next(p for p in predictions if p.report.step_s <= (1 + AS_FAST) * fastest_s)


def _best_by_workers(predictions: Sequence[Prediction]) -> list[Prediction]:
    """For each number of workers the simplest of the fastest predictions."""
    counts = sorted({p.num_workers for p in predictions})
    return [simplest_fast([p for p in predictions if p.num_workers == count]) for count in counts]


def _largest_worth_adding(best: Sequence[Prediction], target: Target | None) -> Prediction | None:
    """The prediction with the most workers that are worth adding; None for one worker."""
    num_workers = worth_adding([(1, 1.0), *((p.num_workers, gain_of(p, target)) for p in best)])
    return next((p for p in best if p.num_workers == num_workers), None)


def _is_allowed(prediction: Prediction, accuracy: AccuracyTable, max_points_lost: float) -> bool:
    cost = accuracy.cost(prediction.policy)
    if cost is None:
        return max_points_lost > 0 and prediction.policy.sync_every == 1
    return cost.mean <= max_points_lost and not _is_beyond(prediction, accuracy)


def _is_beyond(prediction: Prediction, accuracy: AccuracyTable) -> bool:
    """Whether the policy is local SGD on more workers than in the measurement."""
    return prediction.policy.sync_every > 1 and prediction.num_workers > accuracy.num_workers


def gain_of(prediction: Prediction, target: Target | None) -> float:
    """The speed-up over one worker: in time to the target, or without one in samples per second."""
    return prediction.speed_up if target is None else target.speed_up(prediction)


def _saves_startup(prediction: Prediction, target: Target | None, startup_s: float) -> bool:
    """Whether several workers save more of the whole training's time than their start takes."""
    one_s, several_s = prediction.single_worker_training_s, work_s(prediction, target)
    return one_s is None or several_s is None or one_s - several_s > startup_s


def _do(choice: Prediction, target: Target | None) -> str:
    workers = f"{choice.num_workers:,} workers with {choice.policy.name}"
    batch = ""
    if choice.global_batch != choice.single_worker_batch:
        batch = f"; the batch grows from {choice.single_worker_batch:,} to {choice.global_batch:,}"
    if target is None:
        gain = f"{times_text(choice.speed_up, 1)} one worker, {choice.efficiency:.0%} efficient"
    else:
        gain = (
            f"{times_text(target.speed_up(choice), 1)} one worker on the way to the target,"
            f" {times_text(choice.speed_up, 1)} in samples per second"
        )
    return f"{workers}: {gain}{batch}. The exchange costs no accuracy."


def _duration(choice: Prediction, target: Target | None) -> str:
    one_s, several_s = choice.single_worker_training_s, work_s(choice, target)
    if one_s is None or several_s is None:
        return ""
    return (
        f"The whole training takes {seconds_text(several_s)} instead of {seconds_text(one_s)} on"
        " one worker."
    )


def _batch_note(choice: Prediction, target: Target | None) -> str:
    """A warning that a batch this large may need more samples."""
    if target is not None or choice.global_batch <= max(_LARGE_BATCH, choice.single_worker_batch):
        return ""
    return (
        "Whether every sample of so large a batch still counts is not in these numbers: a noise"
        " scale would tell."
    )


def _instead_of(choice: Prediction, predictions: Sequence[Prediction]) -> str:
    simplest = next(p for p in predictions if p.num_workers == choice.num_workers)
    if choice.policy.name == simplest.policy.name:
        return f"No lossless policy is more than {AS_FAST:.0%} faster, so keep it simple."
    share, gain = simplest.report.exchange_share, simplest.report.step_s / choice.report.step_s
    return (
        f"With {simplest.policy.name} the exchange takes {share:.0%} of a step; this is"
        f" {times_text(gain)} as fast."
    )


def _limit(choice: Prediction, best: Sequence[Prediction], target: Target | None) -> str:
    """Why more workers don't pay: the bottleneck that grows most up to the next number of them."""
    following = next((p for p in best if p.num_workers > choice.num_workers), None)
    if following is None:
        return ""
    bottleneck = growing_bottleneck(choice, following, target)
    return (
        f"More workers don't pay: {following.num_workers:,} would be"
        f" {times_text(gain_of(following, target), 1)} one worker with {following.policy.name}, as"
        f" {bottleneck.reason}."
    )


def _no_gain(best: Sequence[Prediction], target: Target | None) -> str:
    if not best:
        return "stay on one worker: all of these policies may cost accuracy."
    fastest = max(best, key=lambda p: gain_of(p, target))
    bottleneck = largest_bottleneck(fastest, target)
    way = "" if target is None else " on the way to the target"
    return (
        f"stay on one worker: {fastest.num_workers:,} workers with {fastest.policy.name}, the best"
        f" that costs no accuracy, come to {times_text(gain_of(fastest, target))} the speed of"
        f" one{way}: {bottleneck.reason}. What would help: {bottleneck.cure}."
    )


def _too_short(choice: Prediction, target: Target | None, startup_s: float) -> str:
    one_s, several_s = choice.single_worker_training_s, work_s(choice, target)
    assert one_s is not None
    assert several_s is not None
    return (
        f"stay on one worker: it takes {seconds_text(one_s)} for the whole training."
        f" {choice.num_workers:,} workers with {choice.policy.name} would save"
        f" {seconds_text(one_s - several_s)}, but take about {seconds_text(startup_s)} to start."
    )


def _bring_and_cost(
    lossy: Prediction, choice: Prediction | None, accuracy: AccuracyTable, target: Target | None
) -> str:
    """The gain and the cost of a lossy policy, compared with the recommendation."""
    gain = gain_of(lossy, target)
    against = "" if choice is None else f", {times_text(gain / gain_of(choice, target))} the above"
    duration = work_s(lossy, target)
    whole = "" if duration is None else f", {seconds_text(duration)} for the whole training"
    cost = accuracy.cost(lossy.policy)
    if cost is None:
        price = "What it costs in accuracy is not measured: compare a short run with fp32."
    else:
        price = f"It lost {cost} points of accuracy on {accuracy.task}."
    return (
        f"{lossy.num_workers:,} workers with {lossy.policy.name} would be {times_text(gain, 1)} one"
        f" worker{against}{whole}. {price}"
    )


def _temptation(
    others: Sequence[Prediction],
    best: Sequence[Prediction],
    lossy: Prediction | None,
    accuracy: AccuracyTable,
    target: Target | None,
) -> str:
    """What would be fastest if accuracy didn't matter."""
    gains = {p.num_workers: gain_of(p, target) for p in best}
    reached = 1.0 if lossy is None else gain_of(lossy, target)
    tempting = [
        p
        for p in others
        if gain_of(p, target) >= (1 + WORTH_ADDING) * max(reached, gains.get(p.num_workers, 0.0))
    ]
    if not tempting:
        return ""
    most = max(tempting, key=lambda p: gain_of(p, target))
    cost = accuracy.cost(most.policy)
    if cost is None:
        price = "at a cost in accuracy that is not measured"
    elif _is_beyond(most, accuracy):
        price = f"at a cost in accuracy that is measured on {accuracy.num_workers} workers only"
    else:
        price = f"for {cost} points"
    gain = gain_of(most, target)
    return (
        f"On {most.num_workers:,} workers {most.policy.name} would come to"
        f" {times_text(gain, 1)}, {price}."
    )
