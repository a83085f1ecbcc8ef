"""A run in stages: other samples in other batches from an epoch on, resumed and on any workers."""

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import allstep
from allstep import Communicator, Stage, Task, TrainOptions, UsageError
from allstep.errors import AllstepError, CheckpointError
from tests.helpers import same_model
from tests.helpers.compare import state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

EPOCHS, SECOND_EPOCH = 5, 3
SECOND_BATCH, SECOND_MICRO_BATCH = 40, 4
NUM_SECOND = 90  # 3 steps an epoch, the last of 10 samples
NUM_STEPS = 4 * SECOND_EPOCH + 3 * (EPOCHS - SECOND_EPOCH)


def make_task(**changes: Any) -> Task:
    task = same_model.make_task("adamw")
    stage: dict[str, Any] = {
        "first_epoch": SECOND_EPOCH,
        "train_set": same_model.Images(NUM_SECOND),
        "test_set": same_model.Images(30),
        "global_batch": SECOND_BATCH,
        "micro_batch": SECOND_MICRO_BATCH,
    }
    return Task(**vars(task) | {"later_stages": [Stage(**stage | changes)]})


def make_options(**changes: Any) -> TrainOptions:
    usual = {"epochs": EPOCHS, "noise_scale_every_steps": 2}
    return replace(same_model.OPTIONS, **usual | changes)


def train(comm: Communicator, folder: Path, *, resume: bool = False, **changes: Any) -> Any:
    task = make_task()
    report = allstep.fit(task, make_options(**changes), comm, folder, resume=resume)
    return report, task.model.state_dict()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(Communicator.single_process(), tmp_path_factory.mktemp("reference"))


def test_stages_count_steps_and_epochs_on(reference: Any) -> None:
    report, _ = reference
    assert (report.num_steps, report.num_epochs) == (NUM_STEPS, EPOCHS)
    assert report.totals["accuracy"][1] == 30  # the second stage's test set


def test_stages_control_without_the_second_stage(reference: Any, tmp_path: Path) -> None:
    task = same_model.make_task("adamw")
    allstep.fit(task, make_options(), Communicator.single_process(), tmp_path)
    assert state_difference(task.model.state_dict(), reference[1]) > 1e-3


@pytest.mark.parametrize("num_workers", [2, 3])
def test_stages_give_the_same_model_on_any_workers(
    num_workers: int,
    reference: Any,
    tmp_path: Path,
    thread_generators: None,  # noqa: F811
) -> None:
    for report, state in run_ranks(num_workers, lambda comm: train(comm, tmp_path), timeout_s=60):
        assert state_difference(state, reference[1]) < 1e-10
        assert report.noise_scale == pytest.approx(reference[0].noise_scale, rel=1e-6)


# In the first stage, at its last step (the boundary), in the second, before the last step.
@pytest.mark.parametrize("last_step", [7, 4 * SECOND_EPOCH, 4 * SECOND_EPOCH + 2, NUM_STEPS - 1])
def test_stages_resume_across_the_boundary_bit_for_bit(
    last_step: int, reference: Any, tmp_path: Path
) -> None:
    task = make_task()

    def interrupting_schedule(step: int) -> float:
        if step == last_step - 2:  # workers agree to stop one step later
            signal.raise_signal(signal.SIGTERM)
        return task.schedule(step)

    interrupted = replace(task, schedule=interrupting_schedule)
    report = allstep.fit(interrupted, make_options(), Communicator.single_process(), tmp_path)
    assert report.interrupted == signal.SIGTERM
    assert report.num_steps == last_step
    report, state = train(Communicator.single_process(), tmp_path, resume=True)
    assert report.num_steps == NUM_STEPS
    assert all(torch.equal(state[name], value) for name, value in reference[1].items())
    assert report.noise_scale == reference[0].noise_scale
    assert report.mean_noise_scale == reference[0].mean_noise_scale


def test_stages_that_differ_on_resume_are_refused(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    allstep.fit(make_task(), make_options(), comm, tmp_path)
    with pytest.raises(CheckpointError, match=r"`stages` \(=.*\) differs from the checkpoint's"):
        allstep.fit(make_task(first_epoch=2), make_options(), comm, tmp_path, resume=True)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_epoch": 0}, r"`later_stages` must begin at increasing epochs from 1 to 4"),
        ({"first_epoch": 5}, r"they begin at \[5\]"),
        ({"train_set": Stream()}, r"`train_set` \(a Stream\) of a stage has no length"),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        allstep.fit(make_task(**changes), make_options(), Communicator.single_process(), tmp_path)


def poisoned(step: int, *, samples: bool = False) -> Task:
    """The task with a loss that is NaN at one step; or with samples that are."""
    task = make_task()
    num_calls = 0

    def loss(model: torch.nn.Module, data: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        factor = torch.nan if num_calls == 12 * step + 1 else 1.0
        if samples:
            images, labels = data
            return task.loss(model, (images * factor, labels))
        return task.loss(model, data) * factor

    return Task(**vars(task) | {"loss": loss})


def test_nonfinite_raise_names_step_and_parameter(tmp_path: Path) -> None:
    with pytest.raises(AllstepError, match=r"Step 2: the gradient of 0.weight, 1.weight"):
        allstep.fit(poisoned(2), make_options(), Communicator.single_process(), tmp_path)


def test_sparse_gradients_of_a_single_worker_are_looked_at(tmp_path: Path) -> None:
    """Several workers refuse them."""
    rows, comm = TensorDataset(torch.arange(8)[:, None]), Communicator.single_process()

    def task(factor: float) -> Task:
        return Task(
            model=nn.Embedding(8, 2, sparse=True),
            train_set=rows,
            test_set=rows,
            loss=lambda model, data: factor * model(data[0]).square().mean(),
            metrics=lambda model, data: {"rows": (0.0, len(data[0]))},
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )

    options = TrainOptions(epochs=1, global_batch=4, micro_batch=2)
    assert allstep.fit(task(1.0), options, comm, tmp_path / "fine").num_steps == 2
    with pytest.raises(AllstepError, match="Step 0: the gradient of weight, "):
        allstep.fit(task(torch.nan), options, comm, tmp_path / "bad")


def test_nonfinite_skip_counts_the_step(tmp_path: Path) -> None:
    task = poisoned(2)
    report = allstep.fit(
        task, make_options(nonfinite="skip"), Communicator.single_process(), tmp_path
    )
    assert report.num_skipped == 1
    assert all(value.isfinite().all() for value in task.model.state_dict().values())
    log = (tmp_path / "metrics.jsonl").read_text()
    assert '"skipped_steps": 1' in log


def test_nonfinite_skip_keeps_batch_norm_statistics(tmp_path: Path) -> None:
    """Here the samples are NaN, and with them the statistics."""
    task = poisoned(2, samples=True)
    report = allstep.fit(
        task, make_options(nonfinite="skip"), Communicator.single_process(), tmp_path
    )
    assert report.num_skipped == 1
    state = task.model.state_dict()
    assert any("running_mean" in name for name in state)
    assert all(value.isfinite().all() for value in state.values())
    assert report.metrics and all(map(math.isfinite, report.metrics.values()))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb", "rmsprop_warmup"])
def test_nonfinite_propagate(name: Any, tmp_path: Path) -> None:
    """Recipes' optimizers leave the looking to the step."""
    settings = allstep.optim.Settings(optimizer=name, lr=0.01, warmup_epochs=0.5)
    optimizer = partial(settings.make_optimizer, steps_per_epoch=4, nonfinite="propagate")
    task = replace(poisoned(2), optimizer=optimizer)
    allstep.fit(task, make_options(nonfinite="propagate"), Communicator.single_process(), tmp_path)
    assert not all(value.isfinite().all() for value in task.model.state_dict().values())


def test_nonfinite_skip_refuses_local_sgd() -> None:
    with pytest.raises(UsageError, match=r"`nonfinite` \(='skip'\) would leave out a step of one"):
        TrainOptions(nonfinite="skip", sync_every=4)
