"""What each compression sends, and what encoding costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.plan.algorithms import ALGORITHMS
from allstep.plan.phases import AllGather, AllToAll, Phase

FLOAT32_BYTES = 4  # of a gradient's element, where nobody says otherwise


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A format in which gradients travel.

    Args:
        element_bytes: bytes of an element on the wire, 1 of int8; None for as many as it has.
        least_bytes: of an element while it is worked on, and on the wire if it travels as it is.
        num_passes: how often a gradient is read or written to encode and decode it.
        num_code_passes: how often what travels in its place is.
        block: elements that share a float32 scale; None for formats without scales.
        keep: share of the elements that are sent, each with a 4-byte index; None for all.
        rank: of PowerSGD's two factors; None for dense formats.
        is_lossless: whether the sum is the gradients' own, up to rounding.
    """

    element_bytes: int | None = None
    least_bytes: int = 1
    num_passes: int = 0
    num_code_passes: int = 0
    block: int | None = None
    keep: float | None = None
    rank: int | None = None
    is_lossless: bool = False

    def sent_bytes(self, element_bytes: int) -> int:
        """Bytes on the wire of an element that has `element_bytes` as a gradient.

        >>> COMPRESSIONS["fp32"].sent_bytes(8), COMPRESSIONS["fp16"].sent_bytes(8)
        (8, 2)
        """
        if self.element_bytes is not None:
            return self.element_bytes
        return max(self.least_bytes, element_bytes)

    def touched_bytes(self, element_bytes: int) -> int:
        """Memory read and written per element to encode and decode it."""
        worked_on = max(self.least_bytes, element_bytes)
        return self.num_passes * worked_on + self.num_code_passes * self.sent_bytes(element_bytes)


# fp32 buckets travel in the gradients' own dtype and are summed where they lie; `exact` reads and
# writes gradients once before, to round them. fp16 reads gradients and writes codes, and back. int8
# reads gradient and residual for the scale and again to round, writes codes and residual, decodes a
# sum and encodes it again. Top-k reads the gradient about three times to select. PowerSGD reads it
# twice for its factors, and writes the product and the residual. What keeps a residual works in
# float32 or more.
COMPRESSIONS: Mapping[str, Compression] = {
    "fp32": Compression(is_lossless=True),
    "bf16": Compression(element_bytes=2, num_passes=2, num_code_passes=2),
    "fp16": Compression(element_bytes=2, num_passes=2, num_code_passes=2),
    "int8": Compression(element_bytes=1, least_bytes=4, num_passes=8, num_code_passes=4, block=256),
    "powersgd": Compression(least_bytes=4, num_passes=8, rank=4),
    "topk": Compression(least_bytes=4, num_passes=8, keep=0.01),
    "exact": Compression(num_passes=2, is_lossless=True),
}


def exchange_parts(
    compression: str, algorithm: str, num_workers: int, num_elements: int, element_bytes: int
) -> list[tuple[tuple[Phase, ...], int, int]]:
    """What workers do so that all have the sum of a bucket, one part after the other.

    Where the sum isn't taken in transit, the algorithm doesn't matter: int8 sends rows to their
    owners and sums to all, top-k sends what it kept to all.

    Returns:
        The phases of each part, the elements that they take, and the bytes of one.
    """
    found, row = COMPRESSIONS[compression], ALGORITHMS[algorithm]
    sent_bytes = found.sent_bytes(element_bytes)
    if found.rank is not None:
        # Of one nearly square matrix; a model's own are smaller, so that more is sent. Shapes
        # aren't known here.
        num_of_factor = min(num_elements // 2, found.rank * math.isqrt(num_elements))
        return 2 * [(row, num_of_factor, sent_bytes)]
    if found.keep is not None:
        return [((AllGather(),), math.ceil(found.keep * num_elements), sent_bytes + 4)]
    if found.block is not None:
        row_bytes = _row_bytes(found.block, sent_bytes, num_elements, num_workers)
        return [((AllToAll(), AllGather()), row_bytes, 1)]
    return [(row, num_elements, sent_bytes)]


def _row_bytes(block: int, code_bytes: int, num_elements: int, size: int) -> int:
    """A worker's part in whole blocks, each with its scale."""
    shortest = math.ceil(num_elements / size)
    block = max(1, min(block, shortest))
    return math.ceil(shortest / block) * (block * code_bytes + 4)
