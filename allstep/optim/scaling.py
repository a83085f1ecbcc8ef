"""Scaling rules of rates and warm-ups for other batches, applied to published recipes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.errors import check_choice, check_integer, check_positive
from allstep.optim.published import PUBLISHED, PublishedRecipe
from allstep.optim.settings import SecondStage, Settings

# A warm-up that grows with the batch would outgrow the run.
_LONGEST_WARMUP = 0.5


def linear_scaling(base_lr: float, base_batch: int, global_batch: int) -> float:
    """A rate proportional to the batch, so that an epoch's steps cover the same distance.

    lr = base_lr * global_batch / base_batch

    LAMB's warm-up follows the same rule: its epochs grow as the batch does, so that its steps stay
    the same.

    Args:
        base_lr: a rate, or epochs of a warm-up, that is good for `base_batch`.
        base_batch: in samples.
        global_batch: in samples, over all workers.

    Returns:
        The same for `global_batch`.

    Raises:
        UsageError: if an argument is not positive.

    >>> linear_scaling(0.1, 256, 8192)
    3.2

    Source: Goyal et al., 2017, arXiv:1706.02677, section 2.1; You et al., 2020, arXiv:1904.00962,
    section 4 (warm-up).
    """
    _check(base_lr, base_batch, global_batch)
    return base_lr * global_batch / base_batch


def sqrt_scaling(base_lr: float, base_batch: int, global_batch: int) -> float:
    """A rate proportional to the batch's square root, so that a step's noise stays the same.

    lr = base_lr * sqrt(global_batch / base_batch)

    Args:
        base_lr: a rate that is good for `base_batch`.
        base_batch: in samples.
        global_batch: in samples, over all workers.

    Returns:
        The rate for `global_batch`.

    Raises:
        UsageError: if an argument is not positive.

    >>> sqrt_scaling(0.1, 256, 1024)
    0.2

    Source: Krizhevsky, 2014, arXiv:1404.5997; You et al., 2020, arXiv:1904.00962, section 4.
    """
    _check(base_lr, base_batch, global_batch)
    return base_lr * math.sqrt(global_batch / base_batch)


@dataclass(frozen=True)
class Change:
    """A setting's published value and the value used.

    Attributes:
        name: of the setting.
        before, after: its published value, and the one for this batch and these epochs.
        rule: what turned the one into the other.
        source: of value and rule.
    """

    name: str
    before: object
    after: object
    rule: str
    source: str


@dataclass(frozen=True)
class Rescaled:
    """A published recipe, rescaled to another batch and number of epochs.

    Attributes:
        published: as it was. Where its `last_statistics` is set, the model wants
            `allstep.nn.keep_last_statistics(model)`; its `micro_batch` is what batch norm saw.
        settings: what to train with; makes optimizer and schedule.
        changes: every setting's way from the one to the other.
    """

    published: PublishedRecipe
    settings: Settings
    changes: Sequence[Change]


def rescale(
    name: str, *, global_batch: int, epochs: int, micro_batch: int | None = None
) -> Rescaled:
    """Rescales a published recipe's settings to another batch and number of epochs.

    The rate follows the batch by the recipe's rule, from the nearest batch that its source
    has, and fractions of the run stay fractions.

    Args:
        name: a key of `PUBLISHED`, such as lars_32k.
        global_batch: samples of one step, over all workers.
        epochs: passes over the data.
        micro_batch: samples that batch norm sees at once, to be listed beside the published ones.

    Returns:
        The new settings, and what was changed by which rule.

    Raises:
        UsageError: if the name is unknown, or a number is out of range.

    >>> rescaled = rescale("goyal_1h", global_batch=1024, epochs=18)
    >>> rescaled.settings.lr, rescaled.settings.warmup_epochs
    (0.4, 1.0)
    >>> schedule = rescaled.settings.make_schedule(epochs=18, steps_per_epoch=50)
    >>> [round(schedule(step), 3) for step in (0, 49, 300)]
    [0.265, 1.0, 0.1]
    """
    check_choice("large_batch", name, PUBLISHED)
    published = PUBLISHED[name]
    check_integer("global_batch", global_batch)
    check_integer("epochs", epochs)
    if micro_batch is not None:
        check_integer("micro_batch", micro_batch)
    nearest = published.nearest(global_batch)
    lr, lr_rule = _rate(nearest, global_batch)
    second, second_changes = _second_stage(nearest, lr, global_batch, epochs)
    first_epochs = epochs if second is None else epochs - second.epochs
    warmup_epochs, warmup_rule = _warmup(nearest, global_batch, first_epochs)
    start = min(1.0, nearest.warmup_start * nearest.global_batch / global_batch)
    settings = Settings(
        optimizer=nearest.optimizer,
        lr=lr,
        momentum=nearest.momentum,
        weight_decay=nearest.weight_decay,
        lr_schedule=nearest.lr_schedule,
        warmup_epochs=warmup_epochs,
        warmup_start=start,
        second=second,
    )
    origin = "" if nearest is published else f", from the one at {nearest.global_batch:,}"
    after: dict[str, tuple[object, str]] = {
        "global_batch": (global_batch, "yours"),
        "epochs": (epochs, "yours"),
        "lr": (lr, lr_rule + origin),
        "warmup_epochs": (warmup_epochs, warmup_rule + origin),
    }
    if published.warmup_start:
        after["warmup_start"] = (start, "the small batch's rate, as a share of lr")
    if micro_batch is not None:
        after["micro_batch"] = (micro_batch, "yours; so many samples batch norm sees at once")
    after |= {field: _kept(published, nearest, field) for field in ("momentum", "weight_decay")}
    kept = ("optimizer", "lr_schedule", "exclusions")
    after |= {field: (getattr(published, field), "kept") for field in kept}
    if published.last_statistics:
        after["last_statistics"] = (True, "kept")
    changes = [
        Change(field, getattr(published, field), value, rule, _source(published, field))
        for field, (value, rule) in after.items()
    ]
    return Rescaled(published, settings, changes + second_changes)


def _kept(published: PublishedRecipe, nearest: PublishedRecipe, field: str) -> tuple[object, str]:
    value = getattr(nearest, field)
    if value == getattr(published, field):
        return value, "kept"
    return value, f"the one at {nearest.global_batch:,}"


def _rate(published: PublishedRecipe, global_batch: int) -> tuple[float, str]:
    if published.lr_rule == "linear":
        lr = linear_scaling(published.lr, published.global_batch, global_batch)
    else:
        lr = sqrt_scaling(published.lr, published.global_batch, global_batch)
    return lr, f"{published.lr_rule} in the batch"


def _warmup(published: PublishedRecipe, global_batch: int, epochs: int) -> tuple[float, str]:
    """The warm-up of the run, or of the first of two stages."""
    mixed, part = published.mixed, "run"
    published_epochs = float(published.epochs)
    if mixed is not None:
        part = "first stage"
        published_epochs *= 1 - mixed.epochs_share
    share = published.warmup_epochs / published_epochs
    share, rule = _warmup_share(published, share, global_batch)
    return share * epochs, f"fraction of the {part}{rule}"


def _warmup_share(published: PublishedRecipe, share: float, global_batch: int) -> tuple[float, str]:
    """The warm-up's share of its stage for another batch, and by which rule."""
    if not published.warmup_grows:
        return share, ""
    grown = linear_scaling(share, published.global_batch, global_batch)
    if grown > _LONGEST_WARMUP:
        return _LONGEST_WARMUP, ", linear in the batch, at most half"
    return grown, ", linear in the batch"


def _second_stage(
    published: PublishedRecipe, lr: float, global_batch: int, epochs: int
) -> tuple[SecondStage | None, list[Change]]:
    """The second stage of LAMB's mixed batch, and its rescaled settings."""
    mixed = published.mixed
    if mixed is None:
        return None, []
    check_integer("epochs", epochs, 2, "each of two stages takes one")
    own_epochs = max(1, round(mixed.epochs_share * epochs))
    share, warmup_rule = _warmup_share(published, mixed.warmup_share, global_batch)
    second = SecondStage(
        epochs=own_epochs, lr=lr * mixed.lr_share, warmup_epochs=share * own_epochs
    )
    before = mixed.epochs_share * published.epochs
    batch, own_batch = (
        round(mixed.batch_share * n) for n in (published.global_batch, global_batch)
    )
    of_first, of_stage = "share of the first stage's", f"fraction of the stage{warmup_rule}"
    before_lr, before_warmup = published.lr * mixed.lr_share, mixed.warmup_share * before
    source = _source(published, "second")
    return second, [
        Change("second_epochs", before, own_epochs, "fraction of the run, whole epochs", source),
        Change("second_global_batch", batch, own_batch, of_first, source),
        Change("second_lr", before_lr, second.lr, of_first, source),
        Change("second_warmup_epochs", before_warmup, second.warmup_epochs, of_stage, source),
    ]


def _source(published: PublishedRecipe, field: str) -> str:
    if field in published.sources:
        return published.sources[field]
    return f"{published.source} ({published.trust})"


def _check(base_lr: float, base_batch: int, global_batch: int) -> None:
    check_positive("base_lr", base_lr, "0.1 is usual for SGD")
    check_positive("base_batch", base_batch, "it counts samples")
    check_positive("global_batch", global_batch, "it counts samples")
