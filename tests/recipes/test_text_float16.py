"""`text` in float16 with parts of the model on several workers, which skip the same steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep import Communicator
from allstep.recipes.text import Text
from allstep.torch_classes import local_part
from tests.helpers.divided import divisible_text, largest_difference, train_on, trainings_on
from tests.helpers.texts import write_topics

PARTS: dict[str, dict[str, Any]] = {
    "fsdp": {"shard": True},
    "tensor": {"tensor_parallel": 2},
    "experts": {"experts": 2, "capacity_factor": 1.0},
    "pipeline": {"pipeline": 2, "depth": 2},
}


def small(folder: Path, **changes: Any) -> Text:
    usual: dict[str, Any] = {
        "precision": "float16",
        "depth": 1,
        "optimizer": "sgd",
        "lr": 0.5,
        "train_share": 0.07,
    }
    return divisible_text(folder, **usual | changes)


def overflow(model: nn.Module) -> None:
    """Spoils each gradient of a parameter, or what the last worker has of it."""

    def spoil(p: nn.Parameter) -> None:
        assert p.grad is not None
        local_part(p.grad).fill_(math.inf)

    group = torch.distributed
    if not group.is_initialized() or group.get_rank() == group.get_world_size() - 1:
        *_, weight = (p for n, p in model.named_parameters() if n.endswith("output.weight"))
        weight.register_post_accumulate_grad_hook(spoil)


@pytest.mark.process
@pytest.mark.slow
def test_workers_with_parts_skip_the_same_steps(tmp_path: Path) -> None:
    """Those of one worker: some at first, as the scale is too large then, or all."""
    folder = write_topics(tmp_path / "texts", 4)
    recipes = {name: small(folder, **fields) for name, fields in PARTS.items()}
    runs = [(recipe, tmp_path / name) for name, recipe in recipes.items()]
    runs += [(recipe, tmp_path / f"no-{name}", overflow) for name, recipe in recipes.items()]
    found = iter(trainings_on(2, *runs))
    for name, recipe in recipes.items():
        one = train_on(1, recipe, tmp_path / f"one-{name}")
        assert largest_difference(one, next(found)) < 2e-3
        float32 = train_on(1, replace(recipe, precision="float32"), tmp_path / f"float32-{name}")
        assert largest_difference(one, float32) > 0.02
    for recipe in recipes.values():
        initial = recipe.task(Communicator.single_process()).model.state_dict()
        skipped, report = next(found)
        assert report.num_steps
        assert all(torch.equal(skipped[n], initial[n]) for n in skipped)
