"""The best order of hosts in a ring, by the rates of their links."""

import math
from collections.abc import Mapping, Sequence

_CLASS = 1.5  # rates that differ by less count as alike
_GAIN = 3.0  # for less, another order is not worth it
_MOST_STEPS = 100_000  # of the search for a ring, after which a slower one will do

Rates = Mapping[tuple[str, str], float]


def slowest_bps(order: Sequence[str], rates: Rates) -> float:
    """The rate of the slowest link of a ring, in bits a second.

    Args:
        order: each host sends to the next, the last one to the first.
        rates: (host, other) -> bits a second.

    >>> slowest_bps(["a", "b", "c"], {("a", "b"): 9e8, ("b", "c"): 1e8, ("c", "a"): 9e8})
    100000000.0
    """
    return min(rates[pair] for pair in zip(order, (*order[1:], order[0]), strict=True))


def best_ring(hosts: Sequence[str], rates: Rates) -> list[str]:
    """An order of the hosts, the first one fixed, with an approximately fastest slowest link.

    As they are, if no other order is three times as fast.

    Args:
        hosts: at least one.
        rates: (host, other) -> bits a second, of all pairs.

    >>> links = {(a, b): 9e8 for a in "abcd" for b in "abcd" if a != b}
    >>> best_ring("abcd", links | {("a", "b"): 1e8, ("b", "c"): 1e8})
    ['a', 'c', 'b', 'd']
    """
    given = list(hosts)
    if len(given) < 3:
        return given
    classes = {pair: math.floor(math.log(rate, _CLASS)) for pair, rate in rates.items()}
    for least in sorted(set(classes.values()), reverse=True):
        following = {
            host: [other for other in given if classes.get((host, other), least - 1) >= least]
            for host in given
        }
        ring = _ring(given, following)
        if ring:
            gain = slowest_bps(ring, rates) / slowest_bps(given, rates)
            return ring if gain >= _GAIN else given
    return given


def _ring(hosts: Sequence[str], following: Mapping[str, Sequence[str]]) -> list[str]:
    """A ring over a set of links; empty if none was found."""
    reached = {other for others in following.values() for other in others}
    if len(reached) < len(hosts) or not all(following.values()):
        return []
    first = hosts[0]
    path, untried = [first], [iter(following[first])]
    for _ in range(_MOST_STEPS):
        if not untried:
            break
        host = next((other for other in untried[-1] if other not in path), None)
        if host is None:
            path.pop()
            untried.pop()
        elif len(path) + 1 < len(hosts):
            path.append(host)
            untried.append(iter(following[host]))
        elif first in following[host]:
            return [*path, host]
    return []
