"""8-bit numbers in blocks that share a scale, divided into equal parts for their owners."""

from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.device import is_accelerator

_SLICE_BYTES = 1 << 20  # of larger tensors each one is fetched from the kernel, page by page
_TINY = torch.finfo(torch.float32).tiny  # smaller scales have too few bits


@dataclass(frozen=True)
class BlockParts:
    """A bucket's division: each worker owns a part of the whole blocks and a part of the tail.

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
        """Parts that are as equal as blocks of at most `block` elements allow.

        >>> BlockParts.of(1000, 0, 3, block=256).num_blocks  # 2 * 256 >= 1000 / 3
        2
        """
        shortest = -(-num_elements // size)
        block = max(1, min(block, shortest))
        return cls(num_elements, num_tail, size, block, max(1, -(-shortest // block)))

    @property
    def length(self) -> int:
        """The number of a part's elements, with the padding of the last block."""
        return self.num_blocks * self.block

    @property
    def tail_length(self) -> int:
        """The number of the tail's elements that a worker owns."""
        return -(-self.num_tail // self.size)

    def owned(self, rank: int) -> slice:
        """The range of a worker's part in the bucket."""
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

    def encode_(self, values: Tensor, tail: Tensor) -> Tensor:
        """One row of bytes for each part: its numbers, scales and piece of the tail.

        A block that isn't finite gets a scale that isn't either, and so comes out as NaN.

        Args:
            values: [parts, num_blocks, block]; what the message doesn't tell is left in it.
            tail: [parts, tail_length], whole numbers of at most 127.

        Returns:
            The message, [parts, bytes] of int8.
        """
        message = values.new_empty((len(values), sum(self._sizes)), dtype=torch.int8)
        numbers, scale_bytes, tail_bytes = self._fields(message)
        scales = values.new_empty((len(values), self.num_blocks, 1), dtype=torch.float32)
        for some in self._slices(values):
            wanted = values[:, some]
            largest = torch.maximum(wanted.amax(-1, keepdim=True), -wanted.amin(-1, keepdim=True))
            scale = (largest / 127).float()
            scale = torch.where(scale < _TINY, 0, torch.where(scale.isinf(), torch.nan, scale))
            sent = (wanted / torch.where(scale > 0, scale, 1)).round_()
            numbers[:, some] = sent
            scales[:, some] = scale
            wanted.sub_(sent.mul_(scale))
        scale_bytes.copy_(scales.flatten(1).view(torch.int8))
        tail_bytes.copy_(tail)
        return message

    def decode(self, message: Tensor, values: Tensor) -> Tensor:
        """The inverse of `encode_`.

        Args:
            message: [parts, bytes] of int8.
            values: [parts, num_blocks, block]; overwritten.

        Returns:
            tail [parts, tail_length] of int8.
        """
        numbers, scale_bytes, tail = self._fields(message)
        scale_bytes = scale_bytes.clone(memory_format=torch.contiguous_format)  # aligned
        scales = scale_bytes.view(torch.float32).unsqueeze(-1)
        for some in self._slices(values):
            values[:, some] = numbers[:, some]
            values[:, some].mul_(scales[:, some])
        return tail

    @property
    def _sizes(self) -> list[int]:
        """The numbers of bytes of a part's numbers, scales and tail."""
        return [self.length, 4 * self.num_blocks, self.tail_length]

    def _fields(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of numbers [parts, num_blocks, block], and of the bytes of scales and tail."""
        numbers, scale_bytes, tail = message.split_with_sizes(self._sizes, 1)
        return numbers.view(-1, self.num_blocks, self.block), scale_bytes, tail

    def _slices(self, values: Tensor) -> list[slice]:
        """Slices of blocks for one pass; on a CPU small enough to need no new memory."""
        bytes_of_one = len(values) * self.block * values.itemsize
        step = max(1, _SLICE_BYTES // bytes_of_one)
        if is_accelerator(values.device):
            step = self.num_blocks
        return [slice(start, start + step) for start in range(0, self.num_blocks, step)]

    def _rows(self, x: Tensor, length: int) -> Tensor:
        rows = x
        if x.numel() < self.size * length:
            rows = x.new_empty(self.size * length)
            rows[: x.numel()] = x
            rows[x.numel() :] = 0
        return rows.view(self.size, length)
