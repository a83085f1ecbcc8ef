"""The loop: precision, clipping, compilation, what it logs, reports and leaves behind."""

import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Task, TrainOptions
from allstep.data import GlobalBatch, MicroBatch
from allstep.errors import DisagreementError, UsageError
from allstep.optim import LAMB
from allstep.train import Batch, Logger, Update
from allstep.train.metrics import read_metrics
from allstep.train.report import Meter
from allstep.train.run import Run
from allstep.train.storage import read_checkpoint
from tests.helpers import same_model
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.ranks import run_ranks


def options_for(**changes: Any) -> TrainOptions:
    return replace(same_model.OPTIONS, **{"epochs": 1, "log_every_steps": 10} | changes)


def train(
    comm: Communicator,
    run_dir: Path,
    *,
    resume: bool = False,
    loggers: Sequence[Logger] = (),
    **changes: Any,
) -> dict[str, Tensor]:
    task = same_model.make_task("sgd", augment=False)
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    options = options_for(**changes)
    allstep.fit(task, options, comm, run_dir, resume=resume, loggers=loggers)
    return task.model.state_dict()


def test_meter_leaves_the_warm_up_out() -> None:
    meter = Meter()
    for step_s in (100.0, 100.0, 2.0, 6.0):
        update = Update(
            loss=torch.zeros(()), epoch=0, num_samples=10, data_wait_s=1.0, exchange_s=0.5
        )
        meter.add(update, step_s)
    assert meter.samples_per_s == 20 / 8
    assert meter.data_share == 2 / 8
    assert meter.exchange_share == 1 / 8


def test_clip_norm_bounds_the_global_gradient(tmp_path: Path) -> None:
    """With clipping to a tiny norm, one step of SGD moves the parameters by rate x norm."""
    before = same_model.make_task("sgd", augment=False).model.state_dict()

    def norm_of_move(comm: Communicator) -> float:
        after = train(comm, tmp_path / str(comm.size), clip_norm=1e-3, global_batch=336)
        moves = [after[n] - before[n] for n in before if n.endswith(("weight", "bias"))]
        return float(torch.cat([move.flatten() for move in moves]).norm())

    for size in (1, 3):
        for moved in run_ranks(size, norm_of_move):
            assert moved == pytest.approx(0.1 * 1e-3, rel=1e-3)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_lower_precision_is_close_and_different(precision: Any, tmp_path: Path) -> None:
    comm = Communicator.single_process()
    exact = train(comm, tmp_path / "exact")
    found = train(comm, tmp_path / "found", precision=precision)
    difference = state_difference(exact, found)
    assert 1e-9 < difference < (1e-4 if precision == "float32" else 0.2)
    assert found["0.weight"].dtype == torch.float32


def test_channels_last_changes_only_the_layout(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    plain = train(comm, tmp_path / "plain")
    found = train(comm, tmp_path / "found", channels_last=True)
    assert state_difference(plain, found) < 1e-12
    assert found["0.weight"].is_contiguous(memory_format=torch.channels_last)


def test_compiled_model_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="aot_eager"))
    comm = Communicator.single_process()
    plain = train(comm, tmp_path / "plain")
    assert state_difference(plain, train(comm, tmp_path / "c", compile=True)) < 1e-12


def test_fit_report_metrics_and_checkpoints(tmp_path: Path) -> None:
    def run(comm: Communicator) -> allstep.train.RunReport:
        task = same_model.make_task("adamw", augment=False)
        return allstep.fit(task, options_for(epochs=2, log_every_steps=3), comm, tmp_path)

    reports = run_ranks(2, run)
    assert reports[0] == reports[1]
    report = reports[0]
    assert (report.num_steps, report.num_epochs, report.interrupted) == (8, 2, None)
    assert report.totals["accuracy"][1] == 50
    assert report.metrics["accuracy"] == report.totals["accuracy"][0] / 50
    assert report.samples_per_s > 0
    assert report.single_worker_samples_per_s is not None
    # Two multiplications and additions for each weight and position, forward and backward.
    convolution = 2 * 4 * 2 * 9 * 16
    linear = 2 * 64 * 3
    assert report.flops_per_sample == 2 * convolution + 3 * linear
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3, 6]
    assert [line["step"] for line in lines if "test/accuracy" in line] == [4, 8]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_loggers_are_called_on_rank_0_and_end_nothing(fails: bool, tmp_path: Path) -> None:
    calls: list[tuple[int, int, list[str]]] = []

    def run(comm: Communicator) -> dict[str, Tensor]:
        def logger(scalars: dict[str, float], *, step: int) -> None:
            calls.append((comm.rank, step, sorted(scalars)))
            if fails:
                raise RuntimeError("the service is down")

        return train(comm, tmp_path / "run", loggers=[logger], epochs=2, log_every_steps=3)

    states = run_ranks(2, run)
    training = ["epoch", "loss", "samples_per_s"]
    assert [(rank, step) for rank, step, _ in calls] == [(0, step) for step in (3, 4, 6, 8)]
    assert [set(training) <= set(names) for _, _, names in calls] == [True, False] * 2
    assert [names == ["epoch", "test/accuracy"] for *_, names in calls] == [False, True] * 2
    plain = run_ranks(2, lambda comm: train(comm, tmp_path / "plain", epochs=2, log_every_steps=3))
    assert not differing_names(states[0], plain[0])


def test_resume_auto_begins_and_goes_on(tmp_path: Path) -> None:
    def fit(comm: Communicator, **changes: Any) -> int:
        task = same_model.make_task("sgd", augment=False)
        options = options_for(**changes)
        return allstep.fit(task, options, comm, tmp_path, resume="auto").num_steps

    assert run_ranks(2, lambda comm: fit(comm)) == [4, 4]
    assert run_ranks(2, lambda comm: fit(comm, epochs=2)) == [8, 8]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) == 8
    assert sum("test/accuracy" in record and record["step"] == 8 for record in records) == 1
    with pytest.raises(UsageError, match=r"`resume` .='Auto'. must be True, False or 'auto'"):
        arguments: Any = {"resume": "Auto"}
        task = same_model.make_task("sgd")
        allstep.fit(task, options_for(), Communicator.single_process(), tmp_path, **arguments)
    with pytest.raises(UsageError, match="holds a run's checkpoints"):  # the control
        train(Communicator.single_process(), tmp_path)


def test_logged_loss_is_the_global_mean(tmp_path: Path) -> None:
    """The same on one and on three workers, also over the short last batch."""

    def run(comm: Communicator) -> None:
        train(comm, tmp_path / str(comm.size), log_every_steps=4)

    losses = []
    for size in (1, 3):
        run_ranks(size, run)
        line = (tmp_path / str(size) / "metrics.jsonl").read_text().splitlines()[0]
        losses.append(json.loads(line)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_trust_ratios_are_logged(tmp_path: Path) -> None:
    task = same_model.make_task("sgd")
    made: list[LAMB] = []

    def optimizer(model: nn.Module) -> LAMB:
        made.append(LAMB(model.named_parameters(), lr=0.01))
        return made[0]

    task = replace(task, optimizer=optimizer)
    allstep.fit(task, options_for(log_every_steps=1), Communicator.single_process(), tmp_path)
    last = [record for record in read_metrics(tmp_path) if "loss" in record][-1]
    ratios = sorted(made[0].trust_ratios().values())
    found = [last[f"trust_ratio/{name}"] for name in ("min", "median", "max")]
    assert found == pytest.approx([ratios[0], statistics.median(ratios), ratios[-1]])
    assert ratios[0] < ratios[-1]


def test_interrupted_run_has_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    task = same_model.make_task("sgd", augment=False)
    steps = 0

    def interrupting_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 12:  # the last micro-batch of the first step
            os.kill(os.getpid(), signal.SIGINT)
        return same_model.loss_of(model, data)

    interrupted = Task(**{**vars(task), "loss": interrupting_loss})
    comm = Communicator.single_process()
    report = allstep.fit(interrupted, options_for(), comm, tmp_path)
    assert report.interrupted == signal.SIGINT
    assert report.num_steps == 2  # all agree one step later
    assert report.metrics == {}
    assert report.checkpoint == tmp_path / "checkpoints" / "step-00000002"
    again = same_model.make_task("sgd", augment=False)
    assert allstep.fit(again, options_for(), comm, tmp_path, resume=True).num_steps == 4
    whole = same_model.make_task("sgd", augment=False)
    allstep.fit(whole, options_for(), comm, tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        if name.endswith(("weight", "bias")):
            assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_clock_that_jumps_changes_nothing_but_what_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        comm = Communicator.single_process()
        state = train(comm, tmp_path / name, checkpoint_every_steps=1, keep_checkpoints=1)
        records = read_metrics(tmp_path / name)
        return state, [{k: v for k, v in r.items() if k in ("step", "train/loss")} for r in records]

    expected, records = run("steady")
    jumps, clock = itertools.cycle([-1e9, -86_400, 1, 86_400, 1e9]), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    state, found = run("jumping")
    assert found == records
    assert state_difference(state, expected) == 0
    assert len(list((tmp_path / "jumping" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("every_steps", [None, 1, 3])
def test_the_last_checkpoint_has_the_updates_that_were_in_flight(
    every_steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = Communicator.single_process()
    changes: dict[str, Any] = {"staleness": 1, "checkpoint_every_steps": every_steps}
    expected = train(comm, tmp_path / "whole", **changes)
    saved = read_checkpoint(tmp_path / "whole" / "checkpoints" / "step-00000004")["model"]
    assert not differing_names(saved, expected)
    # A run that ends before it has made them makes them when it goes on.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "flush", Mock(side_effect=KeyboardInterrupt))
        train(comm, tmp_path / "cut", **changes)
    found = train(comm, tmp_path / "cut", resume=every_steps is not None, **changes)
    assert not differing_names(found, expected)


def test_metrics_whose_names_differ_between_ranks(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        task = same_model.make_task("sgd", augment=False)
        name = "accuracy" if comm.rank == 0 else "acuracy"
        odd = Task(
            **{**vars(task), "metrics": lambda model, data: {name: (1.0, 1.0)}},
        )
        with pytest.raises(DisagreementError, match="acuracy"):
            allstep.fit(odd, options_for(), comm, tmp_path)

    run_ranks(2, run)


@pytest.mark.parametrize("num_micro_batches", [0, 1])
def test_loss_is_on_the_models_device_also_without_a_micro_batch(num_micro_batches: int) -> None:
    """An accelerator's workers would else meet in the log's sum with tensors of two backends."""
    task = same_model.make_task("sgd", augment=False)
    run = Run(task, options_for(nonfinite="propagate"), Communicator.single_process("meta"))
    data = torch.empty(4, 2, 6, 6), torch.empty(4, dtype=torch.long)
    micro_batches = [MicroBatch(0, 4, data, is_last=True)][:num_micro_batches]
    batch = GlobalBatch(0, 0, 4, iter(micro_batches), num_micro_batches, 1)
    update = run.train_step(Batch(batch, (run.exchange,), seed=0, replay=False))
    assert update.loss.device.type == "meta"
    run.close()


class Noisy(torch.optim.SGD):
    """Adds noise in each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def test_noise_of_late_updates_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """Those after the last epoch included, where no batch sets the random state."""

    def train(seed: int) -> dict[str, Tensor]:
        task = same_model.make_task("sgd", augment=False)
        task = replace(task, optimizer=lambda model: Noisy(model.parameters(), lr=0.01))
        comm = Communicator.single_process()
        torch.manual_seed(seed)
        allstep.fit(task, options_for(staleness=2), comm, tmp_path / str(seed))
        return task.model.state_dict()

    assert state_difference(train(1), train(2)) == 0


def test_shares_are_told_in_log_and_report_and_change_nothing(tmp_path: Path) -> None:
    """Training and evaluation; equal shares say nothing."""

    def run(comm: Communicator, shares: str) -> tuple[dict[str, Tensor], str | None]:
        task = same_model.make_task("sgd", augment=False)
        for module in task.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        options = options_for(shares=shares, log_every_steps=1)
        report = allstep.fit(task, options, comm, tmp_path / shares)
        return task.model.state_dict(), report.shares

    (equal, nothing), _ = run_ranks(2, lambda comm: run(comm, "equal"))
    for state, words in run_ranks(2, lambda comm: run(comm, "3,1")):
        assert state_difference(state, equal) < 1e-10
        assert words is not None and words.startswith("rank 1 is 3.0x slower: ")
    assert nothing is None
    lines = [line for line in read_metrics(tmp_path / "3,1") if "loss" in line]
    assert lines and all(
        line["micro_batches/rank_0"] > line["micro_batches/rank_1"] for line in lines
    )
    assert not any("micro_batches/rank_0" in line for line in read_metrics(tmp_path / "equal"))
