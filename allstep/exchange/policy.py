"""How gradients are exchanged, and what the exchange has cost so far."""

from dataclasses import dataclass
from typing import Literal

from allstep.errors import UsageError

__all__ = ["ExchangePolicy", "ExchangeStats"]


@dataclass(frozen=True, kw_only=True)
class ExchangePolicy:
    """How gradients are exchanged.

    Args:
        reduction: "mean" makes `p.grad` the mean of the workers' gradients, "sum" their sum.

    Raises:
        UsageError: for an unknown reduction.

    >>> ExchangePolicy(reduction="sum")
    ExchangePolicy(reduction='sum')
    """

    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f'`reduction` (={self.reduction!r}) must be "mean" or "sum".')


@dataclass(frozen=True)
class ExchangeStats:
    """What an exchange has done since `attach`; seconds are the host's.

    Attributes:
        num_exchanges: exchanges of gradients.
        sent_bytes: gradients handed to the collectives; the algorithm below decides how often
            they cross the wire, a ring 2 (size - 1) / size times.
        collective_s: seconds from the start to the end of the collectives.
        exposed_s: seconds of those in which the worker did nothing else.
    """

    num_exchanges: int = 0
    sent_bytes: int = 0
    collective_s: float = 0.0
    exposed_s: float = 0.0
