"""Elastic loops on simulated machines: whatever happens, one model, each sample once, no hang."""

import math

import pytest

from tests.helpers.compare import equal
from tests.helpers.simulation.faults import Faults
from tests.helpers.simulation.loop import undisturbed
from tests.helpers.simulation.seeds import check_training, chosen
from tests.helpers.simulation.training import Simulation


def test_few_seeds() -> None:
    for seed in range(20):
        check_training(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chosen(200), ids=str)
def test_seeds(seeds: range) -> None:
    for seed in seeds:
        check_training(seed)


def trace(seed: int) -> tuple[object, ...]:
    simulation = Simulation(seed)
    simulation.run()
    ends = [(o.process.num_calls, o.process.was_killed, str(o.error)) for o in simulation.outcomes]
    return ends, simulation.scheduler.now_s, simulation.scheduler.random.random()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_schedule_of_a_seed(seed: int) -> None:
    """A failure is one number: the same seed is the same order of everything."""
    assert trace(seed) == trace(seed)


def test_undisturbed() -> None:
    simulation = Simulation(0, Faults([0, 0, 1]))
    simulation.run()
    for outcome in simulation.outcomes:
        assert outcome.state is not None
        assert equal(outcome.state, undisturbed())


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]])
def test_hosts_are_cut_off_for_good(hosts: list[int]) -> None:
    """Those who reach the store go on, however few; the others end without another update."""
    simulation = Simulation(0, Faults(hosts, parts_at_s=(0.15, frozenset({1}), 900.0)))
    simulation.run()
    for host, outcome in zip(hosts, simulation.outcomes, strict=True):
        if host == 0:
            assert outcome.state is not None
        else:
            assert "The store" in str(outcome.error)


def test_worker_behind_a_firewall_joins() -> None:
    """It has the store alone: it ends after two attempts, and the others go on."""
    faults = Faults(
        [0, 0, 0], joins_at_s=[(0.02, 1, math.inf)], unconnected_at_s=(0.01, frozenset({1}))
    )
    simulation = Simulation(0, faults)
    simulation.run()
    *first, joins = simulation.outcomes
    for outcome in first:
        assert outcome.state is not None and equal(outcome.state, undisturbed())
    assert "could not connect with the other workers" in str(joins.error)


def test_others_join_beside_one_behind_a_firewall() -> None:
    """After an attempt in which not all could connect one is let in at a time."""
    joins_at_s = [(0.02, host, math.inf) for host in (1, 0, 2)]
    faults = Faults([0, 0, 0, 2, 2], joins_at_s=joins_at_s, unconnected_at_s=(0.01, frozenset({1})))
    simulation = Simulation(1, faults)
    simulation.run()
    for outcome in simulation.outcomes:
        assert (outcome.state is None) == (outcome.process.host == 1)


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1], [0, 1, 2]])
def test_hosts_lose_each_other_but_not_the_store(hosts: list[int]) -> None:
    """Nobody could say who is to go on; the run ends with one message in place of a hang."""
    simulation = Simulation(0, Faults(hosts, unconnected_at_s=(0.15, frozenset({1}))))
    simulation.run()
    for outcome in simulation.outcomes:
        assert "waited for each other in vain" in str(outcome.error)


@pytest.mark.parametrize("at_s", [0.01, 0.2, 0.6])
def test_the_store_is_lost(at_s: float) -> None:
    """Those that have met train on without it."""
    simulation = Simulation(0, Faults([0, 0, 1], store_ends_at_s=at_s))
    simulation.run()
    for outcome in simulation.outcomes:
        assert outcome.state is not None and equal(outcome.state, undisturbed())


def test_the_store_is_cut_off() -> None:
    """No step waits until the system says so."""
    faults = Faults([1, 1, 2], parts_at_s=(0.1, frozenset({0}), 900.0))
    simulation = Simulation(0, faults)
    simulation.run()
    for outcome in simulation.outcomes:
        assert outcome.state is not None and equal(outcome.state, undisturbed())


def test_a_worker_is_lost_after_the_store() -> None:
    """Nobody can say any more who may go on."""
    simulation = Simulation(0, Faults([0, 0, 1], dies_at={1: 60}, store_ends_at_s=0.2))
    simulation.run()
    first, lost, third = simulation.outcomes
    assert lost.process.was_killed
    for left in (first, third):
        assert left.state is None and "The store" in str(left.error)


def test_one_of_two_is_lost() -> None:
    simulation = Simulation(0, Faults([0, 0], dies_at={0: 30}))
    simulation.run()
    lost, left = simulation.outcomes
    assert lost.process.was_killed
    assert left.state is not None and equal(left.state, undisturbed())


def test_all_workers_of_other_hosts_are_lost() -> None:
    """Nobody sees their end; who waits to join learns it by their silence."""
    faults = Faults(
        [0, 1, 1],
        dies_at={0: 30},
        joins_at_s=[(1.0, 0, math.inf)],
        parts_at_s=(0.15, frozenset({1}), 900.0),
    )
    simulation = Simulation(0, faults)
    simulation.run()
    joiner = simulation.outcomes[-1]
    assert "no heartbeat" in str(joiner.error)
    assert "The store" in str(simulation.outcomes[1].error)
