"""Experts compared, wherever they are; ranks as threads."""

from pathlib import Path

import pytest

import allstep
from allstep.doctor import Diagnosis, RunRecord, diagnose
from allstep.doctor.verify.recorder import Recorder
from tests.doctor.recorded import leave, record_ranks
from tests.helpers.generators import seeded_thread, thread_generators  # noqa: F401
from tests.helpers.scripts import load_script

EXPERTS = load_script(Path(__file__).parents[1] / "verify_scripts" / "experts.py")


@pytest.fixture
def compare(monkeypatch, thread_generators):  # noqa: F811
    """Compares the script on one worker and on several."""
    attach, recorders = allstep.exchange.attach, {}

    def attached(model, comm):
        return recorders[comm.rank].attach(attach, model, comm)

    monkeypatch.setattr(allstep.exchange, "attach", attached)

    def record(size: int, has_factor: bool, num_steps: int, without=(), copies=1) -> RunRecord:
        made = [Recorder(rank, num_steps, leave, without) for rank in range(size)]
        recorders.update(enumerate(made))

        def train(comm):
            EXPERTS.train(comm, has_factor, seeded=seeded_thread, copies=min(copies, size))

        return record_ranks(made, train)

    def run(size: int, has_factor: bool, copies: int = 1) -> tuple[RunRecord, Diagnosis]:
        def both(without, num_steps):
            return tuple(record(n, has_factor, num_steps, without, copies) for n in (1, size))

        one, other = both((), 3)
        return other, diagnose(one, other, both)

    return run


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_verify_compares_experts_of_all_workers(compare, size, copies):
    record, found = compare(size, False, copies)
    assert found == Diagnosis(None, [], is_explained=True)
    for step in record.first.steps:
        numbers = {int(name.split(".")[2]) for name in step.gradients if "experts" in name}
        assert numbers == {0, 1, 2, 3}


def test_verify_finds_a_wrong_gradient_of_an_expert_of_another_worker(compare):
    _, found = compare(2, True)
    assert found.divergence.step == 0
    assert found.divergence.name.startswith("moe.experts.3.")
    assert [cause.name for cause in found.causes] == ["gradient changed"]
