"""What happens to a simulated training."""

import math
from dataclasses import dataclass, field
from random import Random

from tests.helpers.simulation.scheduler import Scheduler

_NUM_CALLS = 40  # of a worker that nobody disturbs, for each of the workers, about
_MOST_S = 0.4  # in which it is disturbed, for each of the workers


@dataclass
class Faults:
    """What happens to a training.

    Attributes:
        hosts: of the first workers, by rank.
        dies_at: rank -> at which of its calls it is killed.
        freezes_at: rank -> at which of its calls it is stopped, and for how many seconds.
        joins_at_s: when others come, and to which host.
        parts_at_s: when hosts are cut off, which, and for how long.
        store_ends_at_s: when the store is gone.
        unconnected_at_s: from when on hosts have the store alone, and which.
    """

    hosts: list[int]
    dies_at: dict[int, int] = field(default_factory=dict)
    freezes_at: dict[int, tuple[int, float]] = field(default_factory=dict)
    joins_at_s: list[tuple[float, int, float]] = field(default_factory=list)
    parts_at_s: tuple[float, frozenset[int], float] | None = None
    store_ends_at_s: float = math.inf
    unconnected_at_s: tuple[float, frozenset[int]] | None = None

    @classmethod
    def draw(cls, scheduler: Scheduler) -> "Faults":
        """Those of a seed."""
        random = scheduler.random
        size = random.choice((2, 3, 3, 4, 4, 5, 6, 8))
        num_hosts = random.choice((1, 1, 2, 3))
        num_calls, most_s = _NUM_CALLS * size, _MOST_S * size
        faults = cls(sorted(random.randrange(num_hosts) for _ in range(size)))
        for rank in random.sample(range(size), random.randrange(size)):
            faults.dies_at[rank] = random.randrange(1, num_calls)
        for rank in range(size):
            if random.random() < 0.15:
                faults.freezes_at[rank] = random.randrange(1, num_calls), random.choice((1.0, 20.0))
        first_s = most_s * random.random()
        spread_s = random.choice((0.1, 0.5, most_s))  # of one command, or of several
        for _ in range(random.choice((0, 0, 1, 2, 4, 8))):
            dies_at = random.choice((math.inf, random.randrange(1, num_calls)))
            at_s = first_s + spread_s * random.random()
            faults.joins_at_s.append((at_s, random.randrange(num_hosts), dies_at))
        if num_hosts > 1 and random.random() < 0.3:
            cut_off = frozenset(h for h in range(num_hosts) if random.random() < 0.5)
            faults.parts_at_s = most_s * random.random(), cut_off, random.choice((2.0, 60.0))
        if random.random() < 0.03:
            faults.store_ends_at_s = most_s * random.random()
        beside = Random()  # so that what seeds mean otherwise stays
        beside.setstate(random.getstate())
        others = sorted(set(range(num_hosts)) - set(faults.hosts))
        if others and beside.random() < 0.5:
            faults.unconnected_at_s = 0.0, frozenset(others[:1])
        elif num_hosts > 1 and beside.random() < 0.05:
            host = beside.randrange(num_hosts)
            faults.unconnected_at_s = most_s * beside.random(), frozenset({host})
        return faults

    @property
    def splits_workers(self) -> bool:
        """Whether workers that train together may lose each other, but not the store."""
        if self.unconnected_at_s is None:
            return False
        at_s, hosts = self.unconnected_at_s
        return at_s > 0 or not hosts.isdisjoint(self.hosts)
