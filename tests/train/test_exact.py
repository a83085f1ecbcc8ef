"""With the exact wire the workers' number does not even change the last bit."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import allstep
from allstep import Communicator, TrainOptions
from allstep.recipes import REGISTRY
from tests.helpers.compare import differing_names
from tests.helpers.processes import run_processes


def train_digits(comm: Communicator, run_dir: str, compression: str) -> dict[str, Tensor]:
    """100 float32 steps with batch norm and dropout, and a short last batch each epoch."""
    recipe = REGISTRY["digits"](
        global_batch=72, micro_batch=12, epochs=5, width=8, compression=compression
    )
    recipe = replace(recipe, evaluate_every_epochs=5, checkpoint_every_steps=100)
    task = recipe.task(comm)
    report = allstep.fit(task, recipe, comm, Path(run_dir))
    assert isinstance(recipe, TrainOptions)
    assert report.num_steps == 100
    return task.model.state_dict()


@pytest.mark.process
def test_exact_compression_gives_the_same_bits_on_one_to_five_workers(tmp_path: Path) -> None:
    alone = train_digits(Communicator.single_process(), str(tmp_path / "1"), "exact")
    for size in (2, 3, 4, 5):
        train = functools.partial(
            train_digits, run_dir=str(tmp_path / str(size)), compression="exact"
        )
        for state in run_processes(size, train, timeout_s=100):
            # Running statistics are added up in floating point; training doesn't read them.
            assert all("running" in name for name in differing_names(state, alone)), size
    rounded = functools.partial(train_digits, run_dir=str(tmp_path / "fp32"), compression="fp32")
    assert "classifier.weight" in differing_names(
        run_processes(3, rounded, timeout_s=100)[0], alone
    )
