"""What each policy costs in accuracy, as far as that has been measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from allstep.files import from_plain
from allstep.plan.compression import COMPRESSIONS
from allstep.plan.policies import PolicySpec


@dataclass(frozen=True)
class AccuracyCost:
    """Points of accuracy lost against fp32 at equal epochs; negative is a gain.

    Attributes:
        mean: over seeds.
        std: standard deviation over seeds.
    """

    mean: float
    std: float

    def __str__(self) -> str:
        """The cost in a table's words.

        >>> print(AccuracyCost(0.12, 0.2), AccuracyCost(-0.04, 0.1))
        0.12 +- 0.20 -0.04 +- 0.10
        """
        return f"{self.mean:.2f} +- {self.std:.2f}"


@dataclass(frozen=True)
class AccuracyTable:
    """Costs by the name of a policy, and the task they were measured on.

    Attributes:
        task: in words; None if nothing has been measured.
        num_workers: of the measured training; local SGD may lose more with more workers.
        points_lost: by policy name.
    """

    task: str | None
    num_workers: int
    points_lost: Mapping[str, AccuracyCost]

    def cost(self, policy: PolicySpec) -> AccuracyCost | None:
        """The cost of a policy: none by its nature, as measured, or None if not measured."""
        if is_lossless(policy):
            return AccuracyCost(0.0, 0.0)
        return self.points_lost.get(policy.name)

    def describe(self, policy: PolicySpec) -> str:
        """The cost in a few words."""
        if is_lossless(policy):
            return "none"
        cost = self.cost(policy)
        return "not measured" if cost is None else str(cost)


def is_lossless(policy: PolicySpec) -> bool:
    """Whether every update uses the mean of this step's gradients, up to rounding."""
    return (
        COMPRESSIONS[policy.compression].is_lossless
        and policy.staleness == 0
        and policy.sync_every == 1
    )


@cache
def measured_accuracy() -> AccuracyTable:
    """The costs that come with the package, from `accuracy_cost.json`.

    Returns:
        Points of accuracy lost by policy, and the task of the measurement.

    {"task": "what was trained, epochs, seeds, workers", "num_workers": workers,
     "points_lost": {"name of a policy": {"mean": points, "std": points}, ...}}
    """
    text = (files("allstep.plan") / "accuracy_cost.json").read_text(encoding="utf-8")
    found: AccuracyTable = from_plain(AccuracyTable, json.loads(text))
    return found
