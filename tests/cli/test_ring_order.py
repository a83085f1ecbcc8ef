"""The order of hosts in a ring, against all orders there are."""

from itertools import permutations

import numpy as np
import pytest

from allstep.cli.ring_order import best_ring, slowest_bps


@pytest.mark.parametrize("seed", range(40))
def test_a_ring_is_about_as_fast_as_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    hosts = list("abcdef"[: random.integers(1, 7)])
    pairs = [(one, other) for one in hosts for other in hosts if one != other]
    rates = {pair: float(random.choice([1e7, 1e8, 1e9])) for pair in pairs}
    found = best_ring(hosts, rates)
    assert sorted(found) == hosts
    assert found[0] == hosts[0]
    if len(hosts) > 1:
        best = max(slowest_bps([hosts[0], *rest], rates) for rest in permutations(hosts[1:]))
        assert slowest_bps(found, rates) == best


def test_a_ring_of_hosts_whose_links_are_alike_stays_as_it_is() -> None:
    random = np.random.default_rng(0)
    hosts = list("dacb")
    rates = {(a, b): float(random.uniform(8e8, 1e9)) for a in hosts for b in hosts if a != b}
    assert best_ring(hosts, rates) == hosts


def test_many_hosts_are_ordered_around_slow_links() -> None:
    random = np.random.default_rng(0)
    hosts = [f"host{number}" for number in range(32)]
    pairs = [(one, other) for one in hosts for other in hosts if one != other]
    rates = {pair: float(random.choice([1e7, 1e9], p=[0.2, 0.8])) for pair in pairs}
    assert slowest_bps(hosts, rates) == 1e7
    assert slowest_bps(best_ring(hosts, rates), rates) == 1e9
