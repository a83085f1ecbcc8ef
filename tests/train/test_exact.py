"""With exact sums a whole run is the same, to the last bit, on any number of workers."""

import contextlib
import functools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allstep
from allstep import Communicator, TrainOptions
from allstep.errors import CheckpointError, DisagreementError
from allstep.recipes import REGISTRY
from allstep.train import read_checkpoint
from allstep.train.packing import tensors_in
from allstep.train.threads import Threads
from tests.helpers.compare import differing_names
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

# `make same-bits` sets more.
SHIPPED = os.environ.get("RECIPES", "digits").split()
NUM_WORKERS = [int(number) for number in os.environ.get("NUM_WORKERS", "7").split()]
TIMES = {"samples_per_s", "time"}
Found = tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, float]]
CPU = torch.device("cpu")
TOLERANT = contextlib.nullcontext()


def train_digits(
    comm: Communicator, run_dir: str, compression: str = "exact", *, resume: bool = False
) -> Found:
    """100 steps with batch norm and dropout, and a short last batch each epoch.

    Returns:
        The model's state, the log without times, the evaluation.
    """
    recipe = REGISTRY["digits"](
        global_batch=72, micro_batch=12, epochs=5, width=8, compression=compression
    )
    recipe = replace(
        recipe, evaluate_every_epochs=2, checkpoint_every_steps=47, noise_scale_every_steps=5
    )
    task = recipe.task(comm)
    assert isinstance(recipe, TrainOptions)
    report = allstep.fit(task, recipe, comm, Path(run_dir), resume=resume)
    assert report.num_steps == 100
    return task.model.state_dict(), read_log(Path(run_dir)), report.metrics


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*"))


def train_as_shipped(comm: Communicator, name: str, run_dir: str, resume: bool = False) -> None:
    """A recipe as shipped, but that no checkpoint is deleted."""
    recipe = replace(REGISTRY[name](), keep_checkpoints=1000)
    assert isinstance(recipe, TrainOptions)
    allstep.fit(recipe.task(comm), recipe, comm, Path(run_dir), resume=resume)


def halved(run_dir: Path, other: Path) -> Path:
    """The run as it was half way, in another folder."""
    shutil.copytree(run_dir, other)
    steps = checkpoints(other)
    for later in steps[len(steps) // 2 :]:
        shutil.rmtree(later)
    last = int(steps[len(steps) // 2 - 1].name.removeprefix("step-"))
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= last]
    while any(name.startswith("test/") for name in json.loads(kept[-1])):
        if json.loads(kept[-1])["step"] < last:
            break
        kept.pop()  # the evaluation follows the checkpoint, and will be made again
    (other / "metrics.jsonl").write_text("".join(kept))
    return other


def assert_same_run(found: Path, expected: Path) -> None:
    """Every tensor of the last checkpoint, and every number of the log but times."""
    last, expected_last = checkpoints(found)[-1], checkpoints(expected)[-1]
    tensors, expected_tensors = (tensors_in(read_checkpoint(x)) for x in (last, expected_last))
    assert last.name == expected_last.name and tensors.keys() == expected_tensors.keys()
    assert len(tensors) > 40  # moments and units, too
    assert not differing_names(tensors, expected_tensors), found
    assert read_log(found) == read_log(expected), found  # with the evaluations


@pytest.mark.slow
@pytest.mark.process
def test_exact_runs_have_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    """Parameters, running statistics, losses, noise scale, metrics."""
    state, log, metrics = train_digits(Communicator.single_process(), str(tmp_path / "1"))
    assert any("noise_scale" in line for line in log)
    for size in (3, 7):
        train = functools.partial(train_digits, run_dir=str(tmp_path / str(size)))
        found = run_processes(size, train, timeout_s=100)
        for found_state, _, found_metrics in found:
            assert not differing_names(found_state, state), size
            assert found_metrics == metrics, size
        assert found[0][1] == log, size
    resumed = halved(tmp_path / "3", tmp_path / "3 then 2")  # between two lines of the log
    go_on = functools.partial(train_digits, run_dir=str(resumed), resume=True)
    run_processes(2, go_on, timeout_s=100)
    assert_same_run(resumed, tmp_path / "1")
    rounded = functools.partial(train_digits, run_dir=str(tmp_path / "fp32"), compression="fp32")
    other_state, other_log, _ = run_processes(3, rounded, timeout_s=100)[0]
    assert "classifier.weight" in differing_names(other_state, state)
    assert other_log != log


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("name", SHIPPED)
def test_recipes_as_shipped_are_the_same_on_any_number_of_workers(
    name: str, tmp_path: Path
) -> None:
    """Whole trainings, on processes, and resumed on another number half way.

    (Threads share the generator that dropout draws from.)
    """
    alone, half = tmp_path / "1", tmp_path / "half"
    train_as_shipped(Communicator.single_process(), name, str(alone))
    for size in NUM_WORKERS:
        run_dir = tmp_path / str(size)
        run_processes(size, train_as_shipped, name, str(run_dir), timeout_s=7200)
        assert_same_run(run_dir, alone)
    halved(run_dir, half)
    run_processes(2, train_as_shipped, name, str(half), True, timeout_s=7200)
    assert_same_run(half, alone)


# -- threads ----------------------------------------------------------------------------------


def test_an_exact_run_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a share of the cores, which depends on the number of workers."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for is_exact, wanted, num in [(True, None, 1), (True, 2, 2), (False, None, 3)]:
            threads = Threads(wanted, is_exact=is_exact, device=CPU)
            assert torch.get_num_threads() == num
            threads.give_back()
            assert torch.get_num_threads() == 3
        assert Threads(None, is_exact=True, device=torch.device("cuda")).num is None
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert Threads(None, is_exact=True, device=CPU).num == 2
    finally:
        torch.set_num_threads(before)


def test_a_resumed_run_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        threads = Threads(None, is_exact=True, device=CPU)
        threads.load_state_dict({"num": 2})
        assert torch.get_num_threads() == threads.num == 2
        with pytest.raises(CheckpointError, match=r"`threads` \(=3\) differs"):
            Threads(3, is_exact=True, device=CPU).load_state_dict({"num": 2})
    finally:
        torch.set_num_threads(before)


def test_workers_with_unlike_numbers_of_threads_are_refused_exact_sums() -> None:
    def attach(comm: Communicator, compression: str) -> str:
        torch.set_num_threads(1 + comm.rank)
        policy = allstep.Synchronous(compression=compression)
        with pytest.raises(DisagreementError) if compression == "exact" else TOLERANT as caught:
            allstep.attach(torch.nn.Linear(2, 1), comm, policy)
        return str(caught and caught.value)

    before = torch.get_num_threads()
    try:
        run_ranks(2, lambda comm: attach(comm, "fp32"))
        for message in run_ranks(2, lambda comm: attach(comm, "exact")):
            assert "`torch.get_num_threads()` is 1 on rank 0; 2 on rank 1" in message
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_of_another_number_of_threads_warns() -> None:
    def attached() -> allstep.exchange.Exchange:
        comm, policy = Communicator.single_process(), allstep.Synchronous(compression="exact")
        return allstep.attach(torch.nn.Linear(2, 1), comm, policy)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        state = attached().state_dict()
        torch.set_num_threads(1)
        with pytest.warns(UserWarning, match="computed with 2 threads each, these do with 1"):
            attached().load_state_dict(state)
    finally:
        torch.set_num_threads(before)
