"""Meshes compared: the same model on any, and planted bugs named; ranks as threads."""

from pathlib import Path

import pytest

import allstep
from allstep.doctor import Diagnosis, RunRecord, diagnose
from allstep.doctor.verify.recorder import Recorder
from tests.doctor.recorded import leave, record_ranks
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.scripts import load_script

SCRIPT = Path(__file__).parents[1] / "verify_scripts" / "meshes.py"


MESHES = load_script(SCRIPT)

# What each bug is named, and the tensor in which it first shows.
NAMED = {
    "norm_not_summed": ("sum missing", "norm.weight"),
    "norm_summed_twice": ("sum repeated", "0.weight"),
    "whole_loss_each": ("loss scaled along an axis", "norm.weight"),
    "loss_divided_twice": ("loss scaled along an axis", None),
    "other_slice": ("wrong part", None),
    "same_slice": ("wrong part", "first.weight"),
    "bias_of_each": ("bias repeated", "norm.weight"),
    "mask_of_each": ("random state", None),
    "update_of_each": ("workers apart", None),
}


@pytest.fixture
def recorders(monkeypatch):
    """Lets each thread's recorder see what its rank makes."""
    attach, make_mesh = allstep.exchange.attach, allstep.Communicator.mesh
    found, of_group = {}, {}

    def attached(model, comm, policy=None):
        return found[of_group[comm]].attach(attach, model, comm, policy)

    def mesh(comm, **axes):
        made = make_mesh(comm, **axes)
        of_group.update(dict.fromkeys((comm, *(made[name] for name in axes)), comm.rank))
        found[comm.rank].see_mesh(made)
        return made

    monkeypatch.setattr(allstep.exchange, "attach", attached)
    monkeypatch.setattr(allstep.Communicator, "mesh", mesh)
    return found


@pytest.fixture
def compare(recorders, thread_generators):  # noqa: F811
    """Compares two meshes (data, tensor) of the script that divides by hand."""

    def record(data, tensor, bug, num_steps, without=(), shapes=None) -> RunRecord:
        axes = {"data": data, "tensor": tensor}
        made = [
            Recorder(rank, num_steps, leave, without, axes=axes, shapes=shapes)
            for rank in range(data * tensor)
        ]
        recorders.update(enumerate(made))

        def train(comm):
            MESHES.train(comm, tensor, "hand", bug)

        return record_ranks(made, train, axes)

    def run(bug: str, first=(2, 1), second=(1, 2), num_steps: int = 3) -> Diagnosis:
        def both(without, steps):
            one = record(*first, bug, steps, without)
            return one, record(*second, bug, steps, without, one.first.shapes)

        return diagnose(*both((), num_steps), both)

    return run


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 1), (1, 2)), ((1, 1), (2, 2)), ((1, 1), (1, 4)), ((1, 1), (2, 1))],
)
def test_verify_finds_nothing_in_a_right_script_on_any_mesh(compare, first, second):
    found = compare("none", first, second)
    assert found == Diagnosis(None, [], is_explained=True)


@pytest.mark.parametrize("bug", [bug for bug, by in MESHES.BUGS.items() if "hand" in by][1:])
def test_verify_names_a_bug_along_an_axis(compare, bug):
    found = compare(bug)
    cause, tensor = NAMED[bug]
    assert [named.name for named in found.causes] == [cause]
    assert found.is_explained and not found.is_same
    if found.divergence is not None:
        assert found.divergence.step == (1 if bug == "update_of_each" else 0)
        assert tensor is None or found.divergence.name == f"0.{tensor}"
