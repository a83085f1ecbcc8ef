"""What the study tries: methods, their published ranges, and the points in them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.quasirandom import SobolEngine

__all__ = ["METHODS", "Method", "sobol_settings"]

Range = tuple[float, float]


@dataclass(frozen=True)
class Method:
    """An optimizer with its schedule, and the ranges in which it is tuned (log-uniform).

    Attributes:
        optimizer: of the recipe; "momentum" is SGD without Nesterov's look ahead.
        lr_schedule: of the recipe.
        lr: peak rates.
        is_lr_linear: whether these are rates for a batch of 256, scaled linearly.
        weight_decay, one_minus_momentum: their ranges.
        warmup: shares of the run.
    """

    optimizer: str
    lr_schedule: str
    lr: Range
    is_lr_linear: bool
    weight_decay: Range
    one_minus_momentum: Range
    warmup: Range = (0.02, 0.4)

    def lr_range(self, batch: int) -> Range:
        """Rates that are tried at a batch."""
        scale = batch / 256 if self.is_lr_linear else 1.0
        return scale * self.lr[0], scale * self.lr[1]

    def share_of_range(self, batch: int, lr: float) -> float:
        """Where a rate lies among them, on a logarithmic scale: 0 to 1."""
        low, high = map(math.log, self.lr_range(batch))
        return (math.log(lr) - low) / (high - low)


# Rates as published, and a factor of four or more around them: Goyal's 0.1 a 256 samples at any of
# the batches, MLPerf's 8.5 to 29 for LARS, LAMB's 1.8e-3 to 4e-2, Akiba's 0.1 a 256 samples.
METHODS = {
    "sgd": Method("momentum", "cosine", (0.01, 4.0), False, (1e-5, 1e-3), (0.02, 0.3)),
    "nesterov": Method("sgd", "cosine", (0.01, 4.0), False, (1e-5, 1e-3), (0.02, 0.3)),
    "adamw": Method("adamw", "cosine", (3e-4, 3e-2), False, (1e-3, 0.3), (0.02, 0.3)),
    "lars": Method("lars", "poly", (1.0, 32.0), False, (1e-5, 2e-3), (0.05, 0.15)),
    "lamb": Method("lamb", "linear", (1.5e-3, 5e-2), False, (1e-3, 0.1), (0.05, 0.3)),
    "rmsprop_warmup": Method(
        "rmsprop_warmup", "slow_start", (0.025, 0.4), True, (1e-5, 1e-3), (0.05, 0.2)
    ),
}


def sobol_settings(
    method: Method, *, batch: int, epochs: int, num_points: int
) -> Sequence[dict[str, Any]]:
    """The recipe's fields at the first points of a Sobol sequence, the same for every batch."""
    unit = SobolEngine(4, scramble=True, seed=1).draw(num_points).tolist()
    settings = []
    for lr, weight_decay, momentum, warmup in unit:
        settings.append(
            {
                "optimizer": method.optimizer,
                "lr_schedule": method.lr_schedule,
                "lr": _log_uniform(method.lr_range(batch), lr),
                "weight_decay": _log_uniform(method.weight_decay, weight_decay),
                "momentum": 1 - _log_uniform(method.one_minus_momentum, momentum),
                "warmup_epochs": epochs * _log_uniform(method.warmup, warmup),
            }
        )
    return settings


def _log_uniform(bounds: Range, share: float) -> float:
    low, high = map(math.log, bounds)
    return math.exp(low + share * (high - low))
