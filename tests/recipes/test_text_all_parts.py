"""`text` with each combination of the ways to divide it: the run of one worker."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.compare import differing_names
from tests.helpers.divided import divisible_text, largest_difference, train_on

pytestmark = [pytest.mark.process, pytest.mark.slow]


def combinations() -> list[Any]:
    """(workers along data, parts), with two parts of each kind on at most eight workers."""
    found = []
    for tensor, pipeline, experts, replicate in product((1, 2), (1, 2), (None, 4), (0, 1, 2)):
        sharded = {"shard": True, "replicate": replicate} if replicate else {}
        parts = {"tensor_parallel": tensor, "pipeline": pipeline, "experts": experts, **sharded}
        num_data = max(2, 2 * replicate)
        if num_data * tensor * pipeline > 8:
            continue
        names = [f"{n} {x}" for n, x in parts.items() if x is True or x not in (1, None)]
        is_last = bool(experts) and (tensor, pipeline, replicate) in ((2, 2, 1), (1, 2, 2))
        marks = () if is_last else (pytest.mark.long,)
        found.append(pytest.param(num_data, parts, id=", ".join(names) or "data", marks=marks))
    return found


@pytest.mark.parametrize(("num_data", "parts"), combinations())
def test_text_divided_in_all_ways(
    folder: Path, tmp_path: Path, num_data: int, parts: dict[str, Any]
) -> None:
    """LAMB, dropout and clipping; with exact sums the bits of one worker along data, unsharded."""
    usual = {"depth": 2, "global_batch": 54, "train_share": 0.11}  # nine micro-batches
    recipe = divisible_text(folder, optimizer="lamb", **usual, **parts)
    whole = replace(recipe, shard=False, replicate=1)
    num_parts = recipe.tensor_parallel * recipe.pipeline
    one = train_on(1, whole, tmp_path / "one")
    assert largest_difference(one, train_on(num_data * num_parts, recipe, tmp_path / "all")) < 1e-10
    # Norms of shards and of whole gradients may differ in the last bit.
    exact = {"compression": "exact", "precision": "float32", "clip_norm": None}
    of_one, of_all = (
        train_on(size, replace(each, optimizer="adamw", **exact), tmp_path / name)
        for size, each, name in (
            (num_parts, whole, "exact one"),
            (num_data * num_parts, recipe, "exact all"),
        )
    )
    assert not differing_names(of_all[0], of_one[0])
    assert of_all[1].metrics == of_one[1].metrics
