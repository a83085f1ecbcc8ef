"""A published large-batch recipe on another batch and other epochs, by the recipe's own rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allstep.errors import UsageError, nearest_names
from allstep.optim.published import PUBLISHED, MixedBatch, PublishedRecipe
from allstep.optim.scaling import linear_scaling, linear_warmup_epochs, sqrt_scaling
from allstep.optim.schedules import Schedule, check_counts
from allstep.optim.settings import SecondStage, Settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Change", "LargeBatch", "Rescaled", "find_published", "large_batch", "rescale"]

# A warm-up that grows with the batch would outgrow the run.
_LONGEST_WARMUP = 0.5


@dataclass(frozen=True)
class Change:
    """One setting as published and as it is used.

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
    """A published recipe for another batch and other epochs.

    Attributes:
        published: as it was.
        settings: what to train with.
        changes: every setting's way from the one to the other.
    """

    published: PublishedRecipe
    settings: Settings
    changes: Sequence[Change]


@dataclass(frozen=True)
class LargeBatch:
    """What a loop of one's own needs of a published recipe.

    Attributes:
        optimizer: over the model's parameters.
        schedule: multiplier of its rate, by step.
        changes: what was rescaled, by which rule, from which source.
        published: the recipe as it was. Where its `last_statistics` is set, the model wants
            `allstep.nn.keep_last_statistics(model)`; its `micro_batch` is what batch norm saw.
    """

    optimizer: "Optimizer"
    schedule: Schedule
    changes: Sequence[Change]
    published: PublishedRecipe


def find_published(name: str) -> PublishedRecipe:
    """The published recipe of this name.

    Args:
        name: a key of `PUBLISHED`, such as lars_32k.

    Returns:
        Its settings as published, with their sources.

    Raises:
        UsageError: if there is none; with the nearest names.
    """
    if not isinstance(name, str) or name not in PUBLISHED:
        raise UsageError(f"`large_batch` (={name!r}): {nearest_names(str(name), PUBLISHED)}")
    return PUBLISHED[name]


def rescale(
    name: str, *, global_batch: int, epochs: int, micro_batch: int | None = None
) -> Rescaled:
    """A published recipe's settings for another batch and other epochs.

    The rate follows the batch by the recipe's rule, from the nearest batch that its source tells
    of, and fractions of the run stay fractions.

    Args:
        name: a key of `PUBLISHED`, such as lars_32k.
        global_batch: samples of one step, over all workers.
        epochs: passes over the data.
        micro_batch: samples that batch norm sees at once, to be told beside the published ones.

    Returns:
        The new settings, and what was changed by which rule.

    Raises:
        UsageError: if the name is unknown, or a number is out of range.

    >>> rescaled = rescale("goyal_1h", global_batch=1024, epochs=18)
    >>> rescaled.settings.lr, rescaled.settings.warmup_epochs
    (0.4, 1.0)
    """
    published = find_published(name)
    check_counts(global_batch=global_batch, epochs=epochs)
    if micro_batch is not None:
        check_counts(micro_batch=micro_batch)
    nearest = published.nearest(global_batch)
    second = None if published.mixed is None else _second_epochs(published.mixed, epochs)
    lr, lr_rule = _rate(nearest, global_batch)
    warmup_epochs, warmup_rule = _warmup(nearest, global_batch, epochs, second or 0)
    start = min(1.0, nearest.warmup_start * nearest.global_batch / global_batch)
    settings = Settings(
        optimizer=nearest.optimizer,
        lr=lr,
        momentum=nearest.momentum,
        weight_decay=nearest.weight_decay,
        lr_schedule=nearest.lr_schedule,
        warmup_epochs=warmup_epochs,
        warmup_start=start,
        second=_second_stage(nearest, lr, global_batch, second),
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
    changes += _second_changes(published, settings, global_batch)
    return Rescaled(published, settings, changes)


def _kept(published: PublishedRecipe, nearest: PublishedRecipe, field: str) -> tuple[object, str]:
    value = getattr(nearest, field)
    if value == getattr(published, field):
        return value, "kept"
    return value, f"the one at {nearest.global_batch:,}"


def large_batch(
    name: str,
    model: "nn.Module",
    *,
    global_batch: int,
    epochs: int,
    steps_per_epoch: int,
    second_steps_per_epoch: int | None = None,
) -> LargeBatch:
    """Optimizer and schedule of a published recipe, for a loop of one's own.

    Args:
        name: a key of `PUBLISHED`, such as lars_32k.
        model: on its device.
        global_batch: samples of one step, over all workers; in the first stage.
        epochs: passes over the data.
        steps_per_epoch: optimizer steps of an epoch; in the first stage.
        second_steps_per_epoch: those of the second stage; only lamb_bert_76min has one.

    Returns:
        Optimizer, schedule, and what was changed by which rule.

    Raises:
        UsageError: if the name is unknown, or a number is out of range or missing.

    >>> import torch
    >>> model = torch.nn.Linear(8, 3)
    >>> made = large_batch("lamb_imagenet", model, global_batch=1024, epochs=9, steps_per_epoch=10)
    >>> type(made.optimizer).__name__, round(made.optimizer.param_groups[0]["lr"], 5)
    ('LAMB', 0.00707)
    >>> round(made.schedule(45), 3)
    0.506
    """
    rescaled = rescale(name, global_batch=global_batch, epochs=epochs)
    schedule = rescaled.settings.make_schedule(
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        second_steps_per_epoch=second_steps_per_epoch,
    )
    optimizer = rescaled.settings.make_optimizer(model, steps_per_epoch)
    return LargeBatch(optimizer, schedule, rescaled.changes, rescaled.published)


def _rate(published: PublishedRecipe, global_batch: int) -> tuple[float, str]:
    if published.lr_rule == "linear":
        lr = linear_scaling(published.lr, published.global_batch, global_batch)
    else:
        lr = sqrt_scaling(published.lr, published.global_batch, global_batch)
    return lr, f"{published.lr_rule} in the batch"


def _warmup(
    published: PublishedRecipe, global_batch: int, epochs: int, second_epochs: int
) -> tuple[float, str]:
    """Of the run, or of its first stage if there are two."""
    mixed, part = published.mixed, "run"
    published_epochs = float(published.epochs)
    if mixed is not None:
        epochs, part = epochs - second_epochs, "first stage"
        published_epochs *= 1 - mixed.epochs_share
    share = published.warmup_epochs / published_epochs
    share, rule = _warmup_share(published, share, global_batch)
    return share * epochs, f"fraction of the {part}{rule}"


def _warmup_share(published: PublishedRecipe, share: float, global_batch: int) -> tuple[float, str]:
    """The warm-up's share of its stage for another batch, and by which rule."""
    if not published.warmup_grows:
        return share, ""
    grown = linear_warmup_epochs(share, published.global_batch, global_batch)
    if grown > _LONGEST_WARMUP:
        return _LONGEST_WARMUP, ", linear in the batch, at most half"
    return grown, ", linear in the batch"


def _second_epochs(mixed: MixedBatch, epochs: int) -> int:
    if epochs < 2:
        raise UsageError(f"`epochs` (={epochs}) must be at least 2 for two stages.")
    return max(1, round(mixed.epochs_share * epochs))


def _second_stage(
    published: PublishedRecipe, lr: float, global_batch: int, second_epochs: int | None
) -> SecondStage | None:
    if published.mixed is None or second_epochs is None:
        return None
    share, _ = _warmup_share(published, published.mixed.warmup_share, global_batch)
    return SecondStage(
        epochs=second_epochs,
        lr=lr * published.mixed.lr_share,
        warmup_epochs=share * second_epochs,
    )


def _second_changes(
    published: PublishedRecipe, settings: Settings, global_batch: int
) -> list[Change]:
    mixed, second = published.mixed, settings.second
    if mixed is None or second is None:
        return []
    epochs = mixed.epochs_share * published.epochs
    batch = round(mixed.batch_share * published.global_batch)
    share = "share of the first stage's"
    _, warmup_rule = _warmup_share(published, mixed.warmup_share, global_batch)
    half = round(mixed.batch_share * global_batch)
    rows: list[tuple[str, object, object, str]] = [
        ("second_epochs", epochs, second.epochs, "fraction of the run, whole epochs"),
        ("second_global_batch", batch, half, share),
        ("second_lr", published.lr * mixed.lr_share, second.lr, share),
        (
            "second_warmup_epochs",
            mixed.warmup_share * epochs,
            second.warmup_epochs,
            f"fraction of the stage{warmup_rule}",
        ),
    ]
    return [Change(*row, _source(published, "second")) for row in rows]


def _source(published: PublishedRecipe, field: str) -> str:
    if field in published.sources:
        return published.sources[field]
    return f"{published.source} ({published.trust})"
