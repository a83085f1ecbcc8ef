"""Elastic loops whose disk fails: what was saved is there, and to go on from."""

import math

import pytest

from tests.helpers.simulation.disk import DiskFaults
from tests.helpers.simulation.faults import Faults
from tests.helpers.simulation.saving import Promised, SavingSimulation
from tests.helpers.simulation.scratch import scratch
from tests.helpers.simulation.seeds import check_checkpoints, chosen
from tests.helpers.simulation.volume import Volume


def test_few_seeds() -> None:
    for seed in range(2):
        check_checkpoints(seed)


@pytest.mark.parametrize("seed", [572, 669])
def test_writer_and_reader_sweep_at_once(seed: int) -> None:
    """What one is about to delete, the other has just deleted."""
    check_checkpoints(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chosen(24), ids=str)
def test_seeds(seeds: range) -> None:
    for seed in seeds:
        check_checkpoints(seed)


def trace(seed: int) -> tuple[object, ...]:
    with scratch() as folder:
        life = SavingSimulation(seed, Volume(folder), Promised())
        life.run()
    ends = [(o.process.num_calls, o.process.was_killed, type(o.error)) for o in life.outcomes]
    return ends, life.scheduler.now_s, life.scheduler.random.random()


def test_schedule_of_a_seed() -> None:
    assert trace(7) == trace(7)


def test_full_disk_takes_one_worker_after_the_other() -> None:
    with scratch() as folder:
        promised, faults = Promised(), DiskFaults(full=(40, math.inf))
        life = SavingSimulation(0, Volume(folder), promised, Faults([0, 0, 1]), faults)
        life.run()
    assert promised.steps == {1}
    assert ["No space left on device" in str(o.error) for o in life.outcomes] == [True] * 3
