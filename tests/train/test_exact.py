"""With exact sums a whole run is the same, to the last bit, on any number of workers."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import allstep
from allstep import Communicator, TrainOptions
from allstep.recipes import REGISTRY
from tests.helpers.compare import differing_names
from tests.helpers.processes import run_processes

TIMES = {"samples_per_s", "time"}
Found = tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, float]]


def train_digits(comm: Communicator, run_dir: str, compression: str = "exact") -> Found:
    """100 steps with batch norm and dropout, and a short last batch each epoch.

    Returns:
        The model's state, the log without times, the evaluation.
    """
    recipe = REGISTRY["digits"](
        global_batch=72, micro_batch=12, epochs=5, width=8, compression=compression
    )
    recipe = replace(
        recipe, evaluate_every_epochs=2, checkpoint_every_steps=50, noise_scale_every_steps=5
    )
    task = recipe.task(comm)
    assert isinstance(recipe, TrainOptions)
    report = allstep.fit(task, recipe, comm, Path(run_dir))
    assert report.num_steps == 100
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    log = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return task.model.state_dict(), log, report.metrics


@pytest.mark.process
def test_exact_runs_have_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    """Parameters, running statistics, losses, noise scale, metrics."""
    state, log, metrics = train_digits(Communicator.single_process(), str(tmp_path / "1"))
    assert any("noise_scale" in line for line in log)
    for size in (2, 3, 4, 7):
        train = functools.partial(train_digits, run_dir=str(tmp_path / str(size)))
        found = run_processes(size, train, timeout_s=100)
        for found_state, _, found_metrics in found:
            assert not differing_names(found_state, state), size
            assert found_metrics == metrics, size
        assert found[0][1] == log, size
    rounded = functools.partial(train_digits, run_dir=str(tmp_path / "fp32"), compression="fp32")
    other_state, other_log, _ = run_processes(3, rounded, timeout_s=100)[0]
    assert "classifier.weight" in differing_names(other_state, state)
    assert other_log != log
