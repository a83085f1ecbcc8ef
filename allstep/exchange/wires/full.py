"""Gradients as they are."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from allstep.exchange.layout import BucketLayout
from allstep.exchange.transport import Transport
from allstep.exchange.wires.base import WireFormat, WireState

__all__ = ["FullPrecision"]


@dataclass(frozen=True)
class FullPrecision(WireFormat):
    """Sends gradients in their own dtype: float32, as a rule.

    sum = sum_r flat_r
    """

    name: ClassVar[str] = "fp32"
    is_lossless: ClassVar[bool] = True

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`."""
        transport.all_reduce(flat)
