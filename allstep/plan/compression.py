"""The bytes that each compression sends, and the cost of encoding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.plan.algorithms import ALGORITHMS
from allstep.plan.phases import AllGather, AllToAll, Phase

FLOAT32_BYTES = 4  # the default size of a gradient's element


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A format in which gradients are sent.

    Args:
        element_bytes: bytes of an element on the wire, such as 1 for int8; None for the size that
            it has as a gradient.
        least_bytes: least size of an element in computations, and on the wire if `element_bytes` is
            None.
        num_passes: how often a gradient is read or written to encode and decode it.
        num_code_passes: how often its encoded form is read or written.
        block: number of elements that share a float32 scale; None for formats without scales.
        keep: share of the elements that are sent, each with a 4-byte index; None for all.
        rank: rank of PowerSGD's two factors; None for dense formats.
        is_lossless: whether the result is the sum of the original gradients, up to rounding.
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
        """Bytes on the wire per element; as a gradient it has `element_bytes`.

        >>> COMPRESSIONS["fp32"].sent_bytes(8), COMPRESSIONS["fp16"].sent_bytes(8)
        (8, 2)
        """
        if self.element_bytes is not None:
            return self.element_bytes
        return max(self.least_bytes, element_bytes)

    def touched_bytes(self, element_bytes: int) -> int:
        """Bytes of memory read and written per element to encode and decode it."""
        worked_on = max(self.least_bytes, element_bytes)
        return self.num_passes * worked_on + self.num_code_passes * self.sent_bytes(element_bytes)


# fp32 buckets are sent in the gradients' own dtype and summed in place; `exact` first reads and
# writes gradients once, to round them. fp16 reads gradients and writes codes, and the reverse. int8
# reads gradient and residual for the scale and again to round, writes codes and residual, decodes a
# sum and encodes it again. Top-k reads the gradient about three times to select. PowerSGD reads it
# twice for its factors, and writes the product and the residual. Formats that keep a residual
# compute in float32 or more.
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
    """The successive parts of an exchange after which all workers have the sum of a bucket.

    The algorithm doesn't matter for formats that can't be added on the way: int8 sends rows to
    their owners and the sums to all workers, top-k sends the kept elements to all workers.

    Returns:
        For each part its phases, the number of elements that they send, and the bytes of one.
    """
    found, row = COMPRESSIONS[compression], ALGORITHMS[algorithm]
    sent_bytes = found.sent_bytes(element_bytes)
    if found.rank is not None:
        # The factors of one nearly square matrix. A model's matrices are smaller, so that more is
        # sent, but shapes are unknown here.
        num_of_factor = min(num_elements // 2, found.rank * math.isqrt(num_elements))
        return 2 * [(row, num_of_factor, sent_bytes)]
    if found.keep is not None:
        return [((AllGather(),), math.ceil(found.keep * num_elements), sent_bytes + 4)]
    if found.block is not None:
        row_bytes = _row_bytes(found.block, sent_bytes, num_elements, num_workers)
        return [((AllToAll(), AllGather()), row_bytes, 1)]
    return [(row, num_elements, sent_bytes)]


def _row_bytes(block: int, code_bytes: int, num_elements: int, size: int) -> int:
    """Bytes of a worker's row: its part of the bucket, in whole blocks with a scale each."""
    shortest = math.ceil(num_elements / size)
    block = max(1, min(block, shortest))
    return math.ceil(shortest / block) * (block * code_bytes + 4)
