"""The cost of each policy in accuracy, where it has been measured."""

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
    """Percentage points of accuracy lost against fp32 after equal epochs; negative is a gain.

    Attributes:
        mean: mean over seeds.
        std: standard deviation over seeds.
    """

    mean: float
    std: float

    def __str__(self) -> str:
        """The cost as a table shows it.

        >>> print(AccuracyCost(0.12, 0.2), AccuracyCost(-0.04, 0.1))
        0.12 +- 0.20 -0.04 +- 0.10
        """
        return f"{self.mean:.2f} +- {self.std:.2f}"


@dataclass(frozen=True)
class AccuracyTable:
    """The costs of policies, and the task on which they were measured.

    Attributes:
        task: description of the task; None if nothing has been measured.
        num_workers: workers of the measured training; local SGD may lose more with more workers.
        points_lost: name of a policy -> its cost.
    """

    task: str | None
    num_workers: int
    points_lost: Mapping[str, AccuracyCost]

    def cost(self, policy: PolicySpec) -> AccuracyCost | None:
        """The cost of a policy: 0 if it is lossless, else as measured; None if not measured."""
        if is_lossless(policy):
            return AccuracyCost(0.0, 0.0)
        return self.points_lost.get(policy.name)

    def describe(self, policy: PolicySpec) -> str:
        """The cost as text: "none", "not measured", or mean and deviation."""
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
    """The measured costs that come with the package, from `accuracy_cost.json`.

    Returns:
        Points of accuracy lost by each policy, and the task of the measurement. The file's format:

    {"task": "what was trained, epochs, seeds, workers", "num_workers": workers,
     "points_lost": {"name of a policy": {"mean": points, "std": points}, ...}}
    """
    text = (files("allstep.plan") / "accuracy_cost.json").read_text(encoding="utf-8")
    found: AccuracyTable = from_plain(AccuracyTable, json.loads(text))
    return found
