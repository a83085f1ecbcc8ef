"""The best checkpoint and early stopping: one decision for all workers, the same after a resume."""

import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Task, TrainOptions
from allstep.errors import CheckpointError, UsageError
from allstep.train import BestMetric, Checkpoints, Run, RunReport
from allstep.train.storage import read_checkpoint
from tests.helpers import same_model
from tests.helpers.compare import differing_names
from tests.helpers.ranks import run_ranks

SCORES = (0.1, 0.5, 0.4, 0.8, 0.8, 0.7, 0.9, 0.95)  # after each epoch of two steps
NUM_SAMPLES = 8
SKEW = torch.linspace(-1, 1, NUM_SAMPLES).double()  # whose mean is 0, but not that of a part


class Counter(nn.Module):
    """Its parameter is the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * 0 - self.num_updates


def score_of(model: nn.Module, scores: Sequence[float]) -> float:
    assert isinstance(model, Counter)
    epoch = round(float(model.num_updates.detach())) // 2
    return scores[max(epoch, 1) - 1]


def make_task(scores: Sequence[float] = SCORES, *, interrupt_at: int | None = None) -> Task:
    samples = TensorDataset(SKEW)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        assert isinstance(model, Counter)
        if interrupt_at is not None and round(float(model.num_updates.detach())) == interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)
        value: Tensor = model(batch[0])
        return value

    return Task(
        model=Counter(),
        train_set=samples,
        test_set=samples,
        loss=loss,
        metrics=lambda model, batch: {
            "score": ((score_of(model, scores) + batch[0]).sum(), len(batch[0]))
        },
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    )


def options_for(**changes: Any) -> TrainOptions:
    arguments: dict[str, Any] = {
        "epochs": len(SCORES),
        "global_batch": 4,
        "micro_batch": 2,
        "precision": "float64",
        "best_metric": "score",
        "best_mode": "max",
    }
    return TrainOptions(**arguments | changes)


def train(
    run_dir: Path,
    comm: Communicator | None = None,
    *,
    task: Task | None = None,
    resume: bool | Literal["auto"] = False,
    **changes: Any,
) -> RunReport:
    comm = comm or Communicator.single_process()
    return allstep.fit(task or make_task(), options_for(**changes), comm, run_dir, resume=resume)


def updates_in(checkpoint: Path) -> float:
    return float(read_checkpoint(checkpoint)["model"]["num_updates"])


@pytest.mark.parametrize(
    ("patience", "min_delta", "num_epochs"),
    [
        (None, 0.0, 8),
        (1, 0.0, 3),
        (2, 0.0, 6),  # 0.8 again is no gain
        (3, 0.0, 8),
        (2, 0.35, 4),  # 0.5 is the last gain, though 0.8 is the best
        (2, 0.45, 3),
        (5, 0.75, 6),
    ],
)
def test_early_stopping_after_evaluations_without_a_gain(
    patience: int | None, min_delta: float, num_epochs: int, tmp_path: Path
) -> None:
    report = train(tmp_path, patience=patience, min_delta=min_delta)
    assert (report.num_epochs, report.stopped_early) == (num_epochs, num_epochs < 8)
    # The best checkpoint asks for no `min_delta`.
    best = max(range(num_epochs), key=lambda epoch: SCORES[epoch])
    assert report.best_step == 2 * (best + 1)
    assert report.best_value == pytest.approx(SCORES[best])
    assert report.best_checkpoint == tmp_path / "checkpoints" / "best"
    assert updates_in(report.best_checkpoint) == report.best_step


def test_best_by_the_smallest_value(tmp_path: Path) -> None:
    task = make_task([-score for score in SCORES])
    report = train(tmp_path, task=task, best_mode="min", patience=2)
    assert (report.num_epochs, report.best_step) == (6, 8)
    wrong = train(tmp_path / "control", task=make_task(), best_mode="min", patience=2)
    assert (wrong.num_epochs, wrong.best_step) == (3, 2)


def test_best_checkpoint_stays_when_newer_ones_are_swept_away(tmp_path: Path) -> None:
    scores = (0.1, 0.9, *[0.2] * 6)
    train(tmp_path, task=make_task(scores), checkpoint_every_steps=1, keep_checkpoints=2)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best",
        "step-00000015",
        "step-00000016",
    ]
    comm = Communicator.single_process()
    for best, expected in ((True, 4), (False, 16)):
        task = make_task()
        run = Run(task, options_for(), comm)
        assert Checkpoints(folder, comm).restore(run, best=best) == expected
        assert float(task.model.state_dict()["num_updates"]) == expected
        run.close()


def test_all_workers_stop_at_the_same_step(tmp_path: Path) -> None:
    """By the metric of the whole test set; each worker's part has another mean."""

    def run(comm: Communicator) -> tuple[int, int | None]:
        report = train(tmp_path / str(comm.size), comm, patience=2)
        return report.num_steps, report.best_step

    for size in (1, 2, 3):
        assert run_ranks(size, run) == [(12, 8)] * size

    parts: list[float] = []

    def watch(comm: Communicator) -> None:
        task = make_task()

        def metrics(model: nn.Module, batch: Sequence[Tensor]) -> allstep.train.Metrics:
            parts.append(round(float(batch[0].mean()), 6))
            return task.metrics(model, batch)

        watched = Task(**{**vars(task), "metrics": metrics})
        train(tmp_path / "watched", comm, task=watched, epochs=1)

    run_ranks(2, watch)
    assert len(set(parts)) > 1  # a worker by itself would have found another value


@pytest.mark.parametrize("interrupt_at", range(12))
@pytest.mark.parametrize("every_steps", [None, 1, 3])
def test_resumed_run_stops_at_the_same_evaluation(
    interrupt_at: int, every_steps: int | None, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"patience": 2, "checkpoint_every_steps": every_steps}
    task = make_task(interrupt_at=interrupt_at)
    first = train(tmp_path, task=task, **changes)
    if first.interrupted is None:  # it had come to its end before all knew of the signal
        assert interrupt_at >= 10
    report = train(tmp_path, resume=True, **changes)
    assert (report.num_steps, report.best_step, report.stopped_early) == (12, 8, True)
    assert updates_in(tmp_path / "checkpoints" / "best") == 8


def test_without_its_state_a_resumed_run_would_stop_later(tmp_path: Path) -> None:
    """The control: the evaluations of before count only by what the checkpoint holds."""
    train(tmp_path, task=make_task(interrupt_at=9), patience=2)
    folder = tmp_path / "checkpoints"
    comm = Communicator.single_process()
    loaded = Checkpoints(folder, comm).load_latest()
    assert loaded is not None
    step, state = loaded
    Checkpoints(folder, comm).save(step, state | {"best": None})
    report = train(tmp_path, resume=True, patience=2, epochs=8)
    assert report.num_steps > 12


@pytest.mark.parametrize("size", [1, 2])
def test_stopped_run_goes_on_with_more_patience_only(size: int, tmp_path: Path) -> None:
    def run(comm: Communicator) -> list[tuple[int, bool]]:
        reports = [train(tmp_path, comm, patience=2)]
        reports += [train(tmp_path, comm, patience=n, resume=True) for n in (2, 2, 3)]
        return [(report.num_epochs, report.stopped_early) for report in reports]

    assert run_ranks(size, run) == [[(6, True), (6, True), (6, True), (8, False)]] * size


def test_updates_that_were_in_flight_at_the_end_are_in_the_resumed_runs_checkpoint(
    tmp_path: Path,
) -> None:
    """A signal in the last step comes before they are made."""
    num_steps = 2 * len(SCORES)
    task = make_task(interrupt_at=num_steps - 3)  # the workers agree on it one step later
    report = train(tmp_path, task=task, staleness=1)
    newest = tmp_path / "checkpoints" / f"step-{num_steps:08}"
    assert (report.interrupted, updates_in(newest)) == (signal.SIGTERM, num_steps - 1)
    assert train(tmp_path, staleness=1, resume=True).interrupted is None
    assert updates_in(newest) == num_steps


def test_going_back_to_an_older_checkpoint_finds_the_same_best(tmp_path: Path) -> None:
    train(tmp_path, patience=2)
    for step in (10, 12):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    report = train(tmp_path, resume=True, patience=2)
    assert (report.num_steps, report.best_step) == (12, 8)
    assert updates_in(tmp_path / "checkpoints" / "best") == 8


def test_no_worse_evaluation_takes_the_place_of_the_best_after_going_back(tmp_path: Path) -> None:
    """What is best lies on the disk; the checkpoint that is resumed may be of long before."""
    scores = (0.1, 0.5, 0.4, 0.9, *[0.2] * 4)
    train(tmp_path, task=make_task(scores), keep_checkpoints=8)
    for step in range(4, 17, 2):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    report = train(tmp_path, task=make_task(scores, interrupt_at=5), resume=True)
    assert report.num_steps < 8  # or the best would have come again
    assert (report.best_step, report.best_value) == (8, pytest.approx(0.9))
    assert updates_in(tmp_path / "checkpoints" / "best") == 8
    report = train(tmp_path, task=make_task(scores), resume=True, patience=4)
    assert (report.num_steps, report.best_step) == (16, 8)  # patience forgets what was undone


def test_no_worse_evaluation_takes_its_place_after_a_time_without_the_metric(
    tmp_path: Path,
) -> None:
    train(tmp_path, task=make_task(interrupt_at=9))
    without: dict[str, Any] = {"best_metric": None, "best_mode": None}
    train(tmp_path, task=make_task(interrupt_at=11), resume=True, **without)
    report = train(tmp_path, task=make_task(interrupt_at=13), resume=True)  # after one of 0.7
    assert (report.best_step, report.best_value) == (8, pytest.approx(0.8))
    assert updates_in(tmp_path / "checkpoints" / "best") == 8


@pytest.mark.parametrize("is_deleted", [True, False])
def test_best_checkpoint_that_was_lost_is_kept_anew(
    is_deleted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, task=make_task(interrupt_at=9))
    best = tmp_path / "checkpoints" / "best"
    if is_deleted:
        shutil.rmtree(best)
    else:
        (best / "tensors.safetensors").write_bytes(b"")

    report = train(tmp_path, task=make_task(interrupt_at=11), resume=True)
    assert report.best_step == 10  # of 0.8, as that of step 8 was
    assert updates_in(best) == 10
    assert ("best: tensors.safetensors has 0 bytes" in caplog.text) != is_deleted


def test_folder_with_nothing_but_a_best_checkpoint(tmp_path: Path) -> None:
    """Of a run that was killed before its first other one."""
    train(tmp_path, task=make_task((0.1, 0.9)), epochs=2, checkpoint_every_steps=100)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    with pytest.raises(UsageError, match=r"holds a run's checkpoints .`best` only"):
        train(tmp_path)
    with pytest.raises(CheckpointError, match="There is no whole checkpoint"):
        train(tmp_path, resume=True)
    report = train(tmp_path, task=make_task(interrupt_at=5), resume="auto")
    assert report.num_steps in (5, 6)
    assert (report.best_step, report.best_value) == (4, pytest.approx(0.9))


def test_following_a_metric_changes_no_parameter(tmp_path: Path) -> None:
    """Dropout and augmentation draw the same numbers, batch norm sees the same batches."""
    states = []
    for name, changes in (("plain", {"best_metric": None, "best_mode": None}), ("best", {})):
        task = same_model.make_task("adamw")
        metric: dict[str, Any] = {"best_metric": "accuracy", "epochs": 2, "global_batch": 96}
        report = train(tmp_path / name, task=task, **metric | {"micro_batch": 8} | changes)
        assert (report.best_step is None) == (name == "plain")
        states.append(task.model.state_dict())
    assert not differing_names(*states)


def test_unknown_metric_is_refused_before_the_first_step(tmp_path: Path) -> None:
    num_losses = 0
    task = make_task()

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        nonlocal num_losses
        num_losses += 1
        return task.loss(model, batch)

    counting = Task(**{**vars(task), "loss": loss})

    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"`best_metric` .='scor'.* did you mean `score`"):
            train(tmp_path / "run", comm, task=counting, best_metric="scor")

    run_ranks(2, run)
    assert num_losses == 0
    assert not (tmp_path / "run").exists()
    train(tmp_path / "run", task=counting, epochs=1)
    assert num_losses > 0


def test_metric_that_is_not_a_number_is_never_best(tmp_path: Path) -> None:
    scores = (math.nan, math.nan, 0.5, math.nan, math.nan, *[0.9] * 3)
    report = train(tmp_path / "run", task=make_task(scores), patience=3)
    assert (report.num_epochs, report.best_step) == (8, 12)
    report = train(tmp_path / "nan", task=make_task([math.nan] * 8), patience=3)
    assert (report.num_epochs, report.best_checkpoint) == (3, None)
    assert not (tmp_path / "nan" / "checkpoints" / "best").exists()


def test_other_metric_on_resume_is_refused(tmp_path: Path) -> None:
    train(tmp_path, task=make_task(interrupt_at=5))
    with pytest.raises(CheckpointError, match=r"`best_mode` .=min. differs"):
        train(tmp_path, resume=True, best_mode="min")
    assert train(tmp_path, resume=True).num_steps == 16


def test_best_checkpoint_that_is_missing_or_damaged(tmp_path: Path) -> None:
    train(tmp_path, epochs=2)
    best = tmp_path / "checkpoints" / "best"

    def load(comm: Communicator) -> tuple[int, Any] | None:
        return Checkpoints(best.parent, comm).load_best()

    assert [loaded and loaded[0] for loaded in run_ranks(2, load)] == [4, 4]
    (best / "state.msgpack").write_bytes(b"")

    def refused(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as error:
            load(comm)
        return str(error.value)

    assert all("best: state.msgpack has 0 bytes" in message for message in run_ranks(2, refused))
    for path in best.iterdir():
        path.unlink()
    best.rmdir()
    assert run_ranks(2, load) == [None, None]
    run = Run(make_task(), options_for(), Communicator.single_process())
    with pytest.raises(CheckpointError, match="keeps its best checkpoint if it is told"):
        Checkpoints(best.parent, Communicator.single_process()).restore(run, best=True)
    run.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_mode": None}, r"`best_mode` .=None. must be 'max' if more of `best_metric`"),
        ({"patience": 0}, r"`patience` .=0. must be at least 1; leave it out"),
        ({"min_delta": -1.0}, r"`min_delta` .=-1.0. must be a number of 0 or more"),
        ({"min_delta": math.nan}, r"`min_delta` .=nan. must be a number of 0 or more"),
        ({"best_metric": None}, r"`best_mode` .='max'. needs `best_metric`"),
        ({"best_metric": None, "best_mode": None, "patience": 0}, "`patience` .=0. needs"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options_for(**changes)


def test_metric_that_a_later_evaluation_lacks_is_named() -> None:
    best = BestMetric("score", "max")
    with pytest.raises(UsageError, match="is no metric of the evaluation; it gives none"):
        best.update(1, {})


def test_own_loop_keeps_it_in_an_auto_checkpoint(tmp_path: Path) -> None:
    def train_until(num_epochs: int, comm: Communicator) -> list[int]:
        model = Counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(TensorDataset(SKEW), comm, global_batch=4, micro_batch=2)
        best = BestMetric("score", "max", patience=2)
        state = {"optimizer": optimizer, "best": best}
        epochs = []
        with allstep.AutoCheckpoint(tmp_path, loader, exchange, state=state) as checkpoint:
            for epoch in checkpoint.epochs(len(SCORES)):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    for micro_batch in batch:
                        batch.backward(model(micro_batch[0]))
                    optimizer.step()
                    optimizer.zero_grad()
                best.update(loader.step, {"score": SCORES[epoch]})
                epochs.append(epoch)
                if best.is_exhausted or epoch + 1 == num_epochs:
                    break
        return epochs

    def run(comm: Communicator) -> list[list[int]]:
        return [train_until(3, comm), train_until(len(SCORES), comm)]

    first, second = run_ranks(2, run)[0]
    assert (first, second) == ([0, 1, 2], [2, 3, 4, 5])  # the last epoch's end is repeated


def test_look_for_names_draws_no_random_numbers_and_keeps_modes() -> None:
    """Of the caller's; and a worker without a part of the test set knows the names, too."""

    def metrics(model: nn.Module, batch: Sequence[Tensor]) -> allstep.train.Metrics:
        assert not model.training
        return {"noise": (torch.rand(()), 1), "score": (1, 1)}

    def names(comm: Communicator) -> list[str]:
        model = nn.Dropout()
        evaluator = allstep.Evaluator(metrics, TensorDataset(SKEW[:2]), comm, micro_batch=2)
        found = evaluator.names(model)
        assert model.training
        return found

    assert run_ranks(3, names) == [["noise", "score"]] * 3
    before = torch.get_rng_state()
    names(Communicator.single_process())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(())
    assert not torch.equal(torch.get_rng_state(), before)  # the control
    torch.set_rng_state(before)
