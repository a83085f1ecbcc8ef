"""Applies the settings of a published large-batch training to a recipe of this package."""

from collections.abc import Sequence
from dataclasses import fields, replace

import allstep
from allstep.recipes.base import Recipe


def apply_large_batch(recipe: Recipe, name: str) -> tuple[Recipe, allstep.optim.Rescaled]:
    """Sets optimizer, rate, warm-up, decay and stages as in a published training.

    They are rescaled to the recipe's own batch and epochs by the published training's rules.

    Args:
        recipe: the recipe, with its batch and epochs.
        name: one of `allstep.optim.PUBLISHED`.

    Returns:
        The recipe with these fields set, and a description of the rescaling.

    Raises:
        UsageError: if the name is unknown, or needs two stages that the recipe can't have.
    """
    rescaled = allstep.optim.rescale(
        name,
        global_batch=recipe.global_batch,
        epochs=recipe.epochs,
        micro_batch=recipe.micro_batch,
    )
    settings, published = rescaled.settings, rescaled.published
    if published.mixed is not None and settings.second is not None:
        recipe = recipe.with_second_stage(published.mixed, settings.second)
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "second"}
    return replace(recipe, **values, last_statistics=published.last_statistics), rescaled


def describe_changes(rescaled: allstep.optim.Rescaled) -> list[str]:
    """The message to the user: each setting before and after, its rule and its source."""
    published = rescaled.published
    kept = [change for change in rescaled.changes if change.rule == "kept"]
    moved = [change for change in rescaled.changes if change.rule != "kept"]
    rows = [(c.name, _shown(c.before), _shown(c.after), c.rule) for c in moved]
    rows.insert(0, ("setting", "published", "here", "rule"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{published.name}: {published.workload}, {published.epochs} epochs"]
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(["", *padded, row[3]]).rstrip())
    lines.append(f"As published: {', '.join(f'{c.name} {_shown(c.after)}' for c in kept)}.")
    lines += _sources(rescaled.changes)
    lines.append(
        f"It reached: {published.expected} ({published.expected_source};"
        f" {published.expected_trust})."
    )
    return lines


def _sources(changes: Sequence[allstep.optim.Change]) -> list[str]:
    """One line per source, with the settings from it; the most frequent source without them."""
    by_source: dict[str, list[str]] = {}
    for change in changes:
        by_source.setdefault(change.source, []).append(change.name)
    most = max(by_source, key=lambda source: len(by_source[source]))
    others = [f"  {', '.join(names)}: {s}." for s, names in by_source.items() if s != most]
    return [f"Source: {most}.", *others]


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
