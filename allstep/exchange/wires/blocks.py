"""Numbers in 8 bits, in blocks that share a scale, cut in equal parts for their owners."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BlockParts"]

_TINY = torch.finfo(torch.float32).tiny  # smaller scales have too few bits


@dataclass(frozen=True)
class BlockParts:
    """How a bucket is cut: each worker owns a part of whole blocks and a part of the tail.

    Attributes:
        num_elements: of the bucket's gradients.
        num_tail: elements behind them.
        size: the number of workers.
        block: elements of a block.
        num_blocks: blocks of a part.
    """

    num_elements: int
    num_tail: int
    size: int
    block: int
    num_blocks: int

    @classmethod
    def of(cls, num_elements: int, num_tail: int, size: int, block: int) -> "BlockParts":
        """Parts as equal as blocks of at most `block` elements allow.

        >>> BlockParts.of(1000, 0, 3, block=256).num_blocks  # 2 * 256 >= 1000 / 3
        2
        """
        shortest = -(-num_elements // size)
        block = max(1, min(block, shortest))
        return cls(num_elements, num_tail, size, block, max(1, -(-shortest // block)))

    @property
    def length(self) -> int:
        """Elements of a part, with those that fill the last one up."""
        return self.num_blocks * self.block

    @property
    def tail_length(self) -> int:
        """Elements of the tail that a worker owns."""
        return -(-self.num_tail // self.size)

    def owned(self, rank: int) -> slice:
        """Where a worker's part lies in the bucket."""
        start = min(rank * self.length, self.num_elements)
        return slice(start, min(start + self.length, self.num_elements))

    def split(self, values: Tensor) -> Tensor:
        """[num_elements] -> [size, num_blocks, block]."""
        return self._rows(values, self.length).view(self.size, self.num_blocks, self.block)

    def split_tail(self, tail: Tensor) -> Tensor:
        """[num_tail] -> [size, tail_length]."""
        return self._rows(tail, self.tail_length)

    def join(self, parts: Tensor) -> Tensor:
        """[size, num_blocks, block] -> [num_elements]."""
        return parts.reshape(-1)[: self.num_elements]

    def encode(self, values: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """One row of bytes a part: its numbers, its scales, its piece of the tail.

        A block that isn't finite gets a scale that isn't either, and so comes out as NaN.

        Args:
            values: [parts, num_blocks, block].
            tail: [parts, tail_length], whole numbers of at most 127.

        Returns:
            The message, [parts, bytes] of int8; and the values that `decode` will make of it.
        """
        largest = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))
        scale = (largest / 127).float()
        scale = torch.where(scale < _TINY, 0, torch.where(scale.isinf(), torch.nan, scale))
        sent = (values / torch.where(scale > 0, scale, 1)).round_()
        pieces = (sent.to(torch.int8), scale, tail.to(torch.int8))
        message = torch.cat([piece.flatten(1).view(torch.int8) for piece in pieces], 1)
        return message, sent.mul_(scale)

    def decode(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `encode` made rows of.

        Args:
            message: [parts, bytes] of int8.
            dtype: of the values.

        Returns:
            values [parts, num_blocks, block] and tail [parts, tail_length] of int8.
        """
        sizes = [self.length, 4 * self.num_blocks, self.tail_length]
        numbers, scale, tail = message.split_with_sizes(sizes, 1)
        scale = scale.clone(memory_format=torch.contiguous_format)  # aligned
        scale = scale.view(torch.float32).to(dtype)
        blocks = numbers.to(dtype).view(-1, self.num_blocks, self.block)
        return blocks.mul_(scale.unsqueeze(-1)), tail

    def _rows(self, x: Tensor, length: int) -> Tensor:
        rows = x
        if x.numel() < self.size * length:
            rows = x.new_empty(self.size * length)
            rows[: x.numel()] = x
            rows[x.numel() :] = 0
        return rows.view(self.size, length)
