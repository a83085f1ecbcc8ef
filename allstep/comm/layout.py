"""Layouts of tensor messages, which tell a receiver everything that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgpack
import torch
from torch import Tensor

from allstep.errors import CommunicationError, UsageError

Tensors = Tensor | tuple[Tensor, ...]

_ALIGN_BYTES = 16  # alignment of each tensor in a buffer, so that it can be viewed in place
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}


def dtype_name(dtype: torch.dtype) -> str:
    """>>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; ValueError if no dtype has that name."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's values as a flat uint8 tensor; a view of them if they are contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # torch calls a single element contiguous whatever its stride is, but `view` does not.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


@dataclass(frozen=True)
class Layout:
    """Structure, dtypes and shapes of a tensor or a tuple of tensors.

    >>> Layout.of((torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)))
    (float32[2, 3], int64[])
    """

    is_tuple: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, x: Tensor | Sequence[Tensor], name: str = "x") -> "Layout":
        """The layout of `x`; UsageError if it is neither a tensor nor a tuple of tensors."""
        is_tuple = not isinstance(x, Tensor)
        tensors = as_tuple(x, name)
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise UsageError(
                    f"`{name}` is a {tensor.layout} tensor of {tensor.dtype}, which cannot be "
                    "sent; send `.to_dense()` or `.dequantize()` of it."
                )
        return cls(
            is_tuple, tuple(t.dtype for t in tensors), tuple(tuple(t.shape) for t in tensors)
        )

    def __repr__(self) -> str:
        specs = zip(self.dtypes, self.shapes, strict=True)
        listed = ", ".join(f"{dtype_name(dtype)}{list(shape)}" for dtype, shape in specs)
        return f"({listed})" if self.is_tuple else listed

    def encode(self) -> bytes:
        """The layout as bytes, for a header."""
        names = [dtype_name(dtype) for dtype in self.dtypes]
        encoded: bytes = msgpack.packb([self.is_tuple, names, self.shapes])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> "Layout":
        """The inverse of `encode`; CommunicationError if `data` is no layout."""
        try:
            is_tuple, names, shapes = msgpack.unpackb(data)
            dtypes = tuple(dtype_of_name(name) for name in names)
            found = cls(bool(is_tuple), dtypes, tuple(tuple(map(int, shape)) for shape in shapes))
            num_tensors = len(found.dtypes)
            if len(found.shapes) != num_tensors or not (is_tuple or num_tensors == 1):
                raise ValueError(f"{num_tensors} dtypes and {len(found.shapes)} shapes")
            if any(length < 0 for shape in found.shapes for length in shape):
                raise ValueError(f"shapes {found.shapes}")
            return found
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise CommunicationError(f"received a header that is no layout: {error}") from error

    @property
    def _sizes_bytes(self) -> list[int]:
        return [
            prod(shape) * dtype.itemsize
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the packed buffer."""
        *heads, last = [*self._sizes_bytes] or [0]
        return sum(_aligned(size) for size in heads) + last

    def pack(self, x: Tensor | Sequence[Tensor], device: torch.device) -> Tensor:
        """The values as one flat uint8 tensor on `device`; a view of `x` where possible."""
        tensors = as_tuple(x)
        if len(tensors) == 1:
            return bytes_of(tensors[0]).to(device)
        buffer = self.empty_buffer(device)
        offset = 0
        for tensor, size in zip(tensors, self._sizes_bytes, strict=True):
            buffer[offset : offset + size].copy_(bytes_of(tensor))
            offset += _aligned(size)
        return buffer

    def unpack(self, buffer: Tensor) -> Tensors:
        """The inverse of `pack`: tensors that are views of `buffer`."""
        if self.dtypes and buffer.storage_offset() % max(dtype.itemsize for dtype in self.dtypes):
            buffer = buffer.clone()  # views need an aligned buffer
        tensors = []
        offset = 0
        for dtype, shape, size in zip(self.dtypes, self.shapes, self._sizes_bytes, strict=True):
            tensors.append(buffer[offset : offset + size].view(dtype).reshape(shape))
            offset += _aligned(size)
        return tuple(tensors) if self.is_tuple else tensors[0]

    def empty_buffer(self, device: torch.device) -> Tensor:
        """An uninitialised buffer for a packed message."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)


def as_tuple(x: Tensor | Sequence[Tensor], name: str = "x") -> tuple[Tensor, ...]:
    """`x` as a tuple of tensors; UsageError if it is neither a tensor nor several."""
    tensors = (x,) if isinstance(x, Tensor) else x
    if not isinstance(tensors, (tuple, list)):
        raise UsageError(
            f"`{name}` is a {type(x).__name__}; pass a tensor or a tuple of tensors, or use the "
            "form of this verb that ends in `_object`."
        )
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"`{name}` holds a {type(tensor).__name__}; pass a tensor or a tuple of tensors, "
                "or use the form of this verb that ends in `_object`."
            )
    return tuple(tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
