"""Wire formats of gradients; see `WIRES`."""

from collections.abc import Mapping
from types import MappingProxyType

from allstep.errors import check_choice
from allstep.exchange.wires.base import FullPrecision, Transport, WireFormat, WireState
from allstep.exchange.wires.exact import Exact
from allstep.exchange.wires.half import BFloat16, Float16
from allstep.exchange.wires.int8 import Int8
from allstep.exchange.wires.powersgd import PowerSGD
from allstep.exchange.wires.topk import TopK

__all__ = [
    "BFloat16",
    "Exact",
    "Float16",
    "FullPrecision",
    "Int8",
    "PowerSGD",
    "TopK",
    "Transport",
    "WIRES",
    "WireFormat",
    "WireState",
    "make_wire",
]

WIRES: Mapping[str, type[WireFormat]] = MappingProxyType(
    {kind.name: kind for kind in (FullPrecision, Float16, BFloat16, Int8, PowerSGD, TopK, Exact)}
)


def make_wire(wire: str | WireFormat) -> WireFormat:
    """The format with a name and its default parameters; a format is returned unchanged.

    Raises:
        UsageError: if the name is unknown.

    >>> make_wire("int8")
    Int8(block=256, error_feedback=True)
    """
    if isinstance(wire, WireFormat):
        return wire
    check_choice("compression", wire, WIRES)
    return WIRES[wire]()
