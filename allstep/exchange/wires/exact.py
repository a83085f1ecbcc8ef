"""Gradients on a grid, whose float32 sums don't depend on the order."""

from dataclasses import dataclass
from typing import ClassVar

from allstep.exchange.wires.base import FullPrecision


@dataclass(frozen=True)
class Exact(FullPrecision):
    """Sends gradients unchanged, after each micro-batch's gradients were rounded to a grid.

    sum = sum_k u round(g_k / u)

    Every float addition of such numbers is exact, so that the sum has the same bits however
    micro-batches are spread over workers. It holds in the loops of `steps`, where a global batch
    consists of the same micro-batches on any number of workers; elsewhere it is "fp32".
    [Note: grid] says how the units u come about.
    """

    name: ClassVar[str] = "exact"
