"""A small training by `fit`, and whether two of its runs came to the same."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from allstep.train import read_checkpoint
from allstep.train.metrics import read_metrics
from tests.helpers import same_model
from tests.helpers.compare import differing_names

OPTIONS = replace(
    same_model.OPTIONS, epochs=same_model.NUM_EPOCHS, compression="exact", checkpoint_every_steps=3
)
NUM_STEPS = 4 * same_model.NUM_EPOCHS


def state_of(run_dir: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    state = read_checkpoint(newest)
    assert state["loader"]["steps"] == NUM_STEPS
    momenta = state["optimizer"]["state"]
    return {
        **state["model"],
        **{f"momentum {n}": own["momentum_buffer"] for n, own in momenta.items()},
    }


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    """All lines without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [_without_times(json.loads(line)) for line in lines]


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("time", "samples_per_s")}


def check_same(run_dir: Path, undisturbed: Path, *, was_resumed: bool = False) -> None:
    """Whether a run came to an undisturbed one's bits, and wrote its log.

    Args:
        run_dir, undisturbed: folders of runs.
        was_resumed: lines of the log may repeat then, or be torn.
    """
    assert differing_names(state_of(run_dir), state_of(undisturbed)) == []
    if was_resumed:
        one, other = (list(map(_without_times, read_metrics(d))) for d in (run_dir, undisturbed))
        assert one == other
    else:
        assert log_of(run_dir) == log_of(undisturbed)
