"""What each wire format puts on the wire, and what encoding costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.plan.traffic import Group, Traffic, all_reduce_traffic

__all__ = ["WIRES", "Wire", "wire_traffic"]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A format in which gradients travel.

    Args:
        element_bytes: bytes of an element; 1 of int8.
        touched_bytes: memory read and written per element to encode and decode it.
        block: elements that share a float32 scale; None for formats without scales.
        keep: share of the elements that are sent, each with a 4-byte index; None for all.
        rank: of PowerSGD's two factors; None for dense formats.
        is_lossless: whether the sum is the gradients' own, up to rounding.
    """

    element_bytes: int
    touched_bytes: float = 0.0
    block: int | None = None
    keep: float | None = None
    rank: int | None = None
    is_lossless: bool = False

    def num_low_rank(self, num_elements: int) -> int:
        """Elements of both factors if the gradient is one nearly square matrix.

        A model's own matrices are smaller, so that more is sent; shapes aren't known here.
        """
        assert self.rank is not None
        return min(num_elements, 2 * self.rank * math.isqrt(num_elements))


# `touched_bytes`: fp32 buckets are summed where they lie. fp16 reads 4 bytes and writes 2, twice.
# int8 reads gradient and residual for the scale and again to round, writes codes and residual,
# decodes a sum and encodes it again. `exact` reads 4 and writes 8, and back. Top-k reads the
# gradient about three times to select. PowerSGD reads it twice for its factors, and writes the
# product and the residual.
WIRES: Mapping[str, Wire] = {
    "fp32": Wire(element_bytes=4, is_lossless=True),
    "bf16": Wire(element_bytes=2, touched_bytes=12),
    "fp16": Wire(element_bytes=2, touched_bytes=12),
    "int8": Wire(element_bytes=1, touched_bytes=36, block=256),
    "powersgd": Wire(element_bytes=4, touched_bytes=32, rank=4),
    "topk": Wire(element_bytes=4, touched_bytes=32, keep=0.01),
    "exact": Wire(element_bytes=8, touched_bytes=24, is_lossless=True),
}


def _row_bytes(wire: Wire, block: int, num_elements: int, size: int) -> int:
    """A worker's part in whole blocks, each with its scale."""
    shortest = math.ceil(num_elements / size)
    block = max(1, min(block, shortest))
    return math.ceil(shortest / block) * (block * wire.element_bytes + 4)


def wire_traffic(wire_name: str, algorithm: str, group: Group, num_elements: int) -> Traffic:
    """What one worker sends so that all have the sum of `num_elements` gradients.

    Formats whose sum isn't taken in transit have no use for the algorithm: int8 sends rows to
    their owners and sums to all, top-k sends what it kept to all.

    >>> group = Group(rank=0, local_size=4)
    >>> wire_traffic("fp32", "ring", group, 1024).sent_bytes
    6144
    >>> wire_traffic("int8", "ring", group, 1024).sent_bytes
    1560
    """
    wire, size = WIRES[wire_name], group.size
    if size == 1:
        return Traffic()
    if wire.rank is not None:
        factor = wire.num_low_rank(num_elements) // 2
        sent = all_reduce_traffic(algorithm, group, factor, wire.element_bytes)
        return sent + sent
    if wire.keep is not None:
        kept_bytes = math.ceil(wire.keep * num_elements) * (wire.element_bytes + 4)
        return Traffic((size - 1) * kept_bytes, size - 1)
    if wire.block is not None:
        row_bytes = _row_bytes(wire, wire.block, num_elements, size)
        return Traffic(2 * (size - 1) * row_bytes, 2 * (size - 1))
    return all_reduce_traffic(algorithm, group, num_elements, wire.element_bytes)
