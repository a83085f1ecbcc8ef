"""Planted bugs are named, and the right scripts are not blamed: ranks as threads."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import allstep
from allstep.doctor import Diagnosis, Factor, RunRecord, diagnose
from allstep.doctor.verify.recorder import Recorder
from tests.doctor.recorded import leave, record_ranks
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.scripts import load_script

SCRIPT = Path(__file__).parents[1] / "verify_scripts" / "train.py"


TRAIN = load_script(SCRIPT)


@pytest.fixture
def attached(monkeypatch):
    """Lets each thread's recorder see what its rank attaches."""
    attach = allstep.exchange.attach
    recorders = {}

    def recorded(model, comm, policy=None):
        return recorders[comm.rank].attach(attach, model, comm, policy)

    monkeypatch.setattr(allstep.exchange, "attach", recorded)
    return recorders


@pytest.fixture
def compare(attached, thread_generators):  # noqa: F811
    """Diagnoses a bug of the script on some workers against one."""

    def record(
        loop: str, bug: str, size: int, num_steps: int, without: Sequence[Factor]
    ) -> RunRecord:
        recorders = [Recorder(rank, num_steps, leave, without) for rank in range(size)]
        attached.update(enumerate(recorders))
        train = partial(getattr(TRAIN, f"{loop}_loop"), bug)
        return record_ranks(recorders, train)

    def run(loop: str, bug: str, size: int = 2, num_steps: int = 4) -> Diagnosis:
        def rerun(without, steps):
            return record(loop, bug, 1, steps, without), record(loop, bug, size, steps, without)

        one = record(loop, bug, 1, max(num_steps, 2 * size + 1), ())
        return diagnose(one, record(loop, bug, size, num_steps, ()), rerun)

    return run


def names(diagnosis: Diagnosis) -> list[str]:
    return [cause.name for cause in diagnosis.causes]


@pytest.mark.parametrize("size", [2, 4])  # with four, a worker of `steps` has no samples
@pytest.mark.parametrize("loop", ["ddp", "steps"])
def test_verify_finds_nothing_in_a_right_script(compare, loop, size):
    diagnosis = compare(loop, "none", size, num_steps=20)
    assert diagnosis.is_same
    assert diagnosis == Diagnosis(None, [], is_explained=True)


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("learning_rate", "learning rate scaled"),
        ("sum", "loss summed"),
        ("sum_of_means", "loss summed"),
        ("random_state", "random state"),
        ("augmentation", "random state"),
        ("unequal_shards", "unequal shards"),
        ("batch_norm", "batch norm"),
        ("scheduler", "scheduler"),
        ("not_sharded", "data not sharded"),
        ("same_batch", "data not sharded"),
        ("per_worker_batch", "global batch"),
        ("int8_wire", "exchange policy"),
        ("weight_decay", "optimizer options"),
    ],
)
@pytest.mark.parametrize("loop", ["ddp", "steps"])
def test_verify_names_a_planted_bug(compare, loop, bug, cause):
    diagnosis = compare(loop, bug)
    assert names(diagnosis) == [cause]
    assert not diagnosis.is_same
    assert diagnosis.is_explained


def test_verify_names_workers_that_run_samples_of_others(compare):
    diagnosis = compare("ddp", "own_shuffle", num_steps=6)
    (cause,) = diagnosis.causes
    assert cause.name == "data not sharded"
    assert "samples were run by several of the 2 workers" in cause.evidence


def test_verify_names_two_bugs_at_once(compare):
    diagnosis = compare("ddp", "learning_rate_and_dropout")
    assert set(names(diagnosis)) == {"learning rate scaled", "random state"}
    diagnosis = compare("ddp", "batch_norm_and_dropout")
    assert set(names(diagnosis)) == {"batch norm", "random state"}


def test_verify_names_other_initial_parameters(compare):
    diagnosis = compare("ddp", "init")
    assert diagnosis.divergence.quantity == "initial parameters"
    assert names(diagnosis) == ["initial parameters"]
    assert "`0.bias` is another one" in diagnosis.causes[0].evidence


def test_verify_names_samples_that_fill_up_a_shard(compare):
    assert compare("ddp", "padded", size=4, num_steps=7).is_same
    diagnosis = compare("ddp", "padded", size=4, num_steps=8)
    assert diagnosis.divergence.step == 7
    assert names(diagnosis) == ["samples repeated"]
