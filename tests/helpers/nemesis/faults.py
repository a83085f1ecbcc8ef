"""What happens to a training, and when."""

import math
import random
from dataclasses import dataclass
from typing import Literal, get_args

from tests.helpers.elastic_runs import NUM_STEPS

Kind = Literal[
    "kill",
    "stop",
    "terminate",
    "link down",
    "drop",
    "slow link",
    "full disk",
    "full shm",
    "clock ahead",
    "clock back",
]
CUTS: tuple[Kind, ...] = ("link down", "drop")  # of the host of those that join
CLOCKS: tuple[Kind, ...] = ("clock ahead", "clock back")
_WEIGHTS: dict[Kind, int] = {"terminate": 1, "full disk": 1, "full shm": 1}  # of others: 4
_LONG_S = 8.0  # than workers wait for each other


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: what; see `disturb`.
        victim: a worker, by the order in which they start; for "full shm" the host of that worker.
            Links and the disk are one.
        at_step: once somebody has made the update of this step.
        for_s: until it is undone, if it can be; inf for the rest of the run.
    """

    kind: Kind
    victim: int
    at_step: int
    for_s: float


@dataclass(frozen=True)
class Schedule:
    """All that happens in a run.

    Attributes:
        num_first: workers that the launcher starts.
        num_joiners: those of the other host, which the first wait for at `joins_at_step`.
        joins_at_step: see there.
        faults: in the order of their steps.
    """

    num_first: int
    num_joiners: int
    joins_at_step: int
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int) -> "Schedule":
        """That of a seed."""
        draw = random.Random(seed)
        num_first, num_joiners = draw.choice((1, 2, 2, 3)), draw.choice((1, 1, 2))
        joins_at_step = draw.randrange(1, NUM_STEPS // 2)
        kinds = get_args(Kind)
        weights = [_WEIGHTS.get(kind, 4) for kind in kinds]
        faults = [
            Fault(
                kind=draw.choices(kinds, weights)[0],
                victim=draw.randrange(num_first + num_joiners),
                at_step=draw.randrange(joins_at_step, NUM_STEPS - 1),
                for_s=draw.choice((0.5, _LONG_S, math.inf)),
            )
            for _ in range(draw.choice((1, 1, 2, 3)))
        ]
        faults.sort(key=lambda fault: fault.at_step)
        return cls(num_first, num_joiners, joins_at_step, tuple(faults))

    def has(self, *kinds: Kind) -> bool:
        """Whether something of these kinds happens."""
        return any(fault.kind in kinds for fault in self.faults)

    def victims(self, kind: Kind, least_s: float = 0.0) -> set[int]:
        """Whom it happens to, for so long."""
        return {f.victim for f in self.faults if f.kind == kind and f.for_s >= least_s}
