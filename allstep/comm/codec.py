"""Plain data as bytes and back, so safely that the bytes may come from a stranger.

[Note: safe encoding] msgpack knows only plain data; what it lacks travels as extension types
that name no code to run, and whose contents are checked before numpy or torch see them.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from allstep.comm.layout import bytes_of, dtype_name, dtype_of_name
from allstep.errors import CommunicationError, UsageError

__all__ = ["decode", "encode"]

_TUPLE, _INT, _SET, _FROZENSET, _ARRAY, _SCALAR, _TENSOR, _ORDERED_DICT, _COMPLEX = range(1, 10)
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufcSU]\d+|[mM]8(\[\w+\])?)")
_KNOWN = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, "
    "numpy arrays and scalars, CPU tensors"
)


def encode(obj: Any) -> bytes:
    """Encodes plain data; see [Note: safe encoding].

    Args:
        obj: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set,
            numpy arrays and scalars, CPU tensors, nested as you like.

    Raises:
        UsageError: if there is anything else in `obj`; the message names its type.

    >>> decode(encode({"steps": (1, 2**80), 3: [None, True, 0.5, b"x"]}))
    {'steps': (1, 1208925819614629174706176), 3: [None, True, 0.5, b'x']}
    """
    try:
        data: bytes = msgpack.packb(
            obj, default=_extend, strict_types=True, unicode_errors="surrogatepass"
        )
    except UsageError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"`obj` cannot be sent ({error}); send flatter or smaller pieces: a tensor or a text "
            "may have 4 GiB, nesting 500 levels."
        ) from error
    return data


def decode(data: bytes | memoryview) -> Any:
    """Decodes what `encode` made.

    Raises:
        CommunicationError: if `data` is anything else.
    """
    try:
        return msgpack.unpackb(
            data, ext_hook=_restore, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CommunicationError(
            f"received bytes that are no message of allstep: {error}"
        ) from error
    except msgpack.exceptions.UnpackException as error:
        raise CommunicationError("received bytes that are no message of allstep") from error


def _extend(obj: Any) -> msgpack.ExtType:
    """What msgpack does not know, as an extension type."""
    kind = type(obj)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, encode(list(obj)))
    if kind is int:
        return msgpack.ExtType(_INT, obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))
    if kind in (set, frozenset):
        return msgpack.ExtType(_SET if kind is set else _FROZENSET, encode(list(obj)))
    if kind is OrderedDict:
        return msgpack.ExtType(_ORDERED_DICT, encode([list(item) for item in obj.items()]))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, encode([obj.real, obj.imag]))
    if kind is np.ndarray or isinstance(obj, np.generic):
        code = _ARRAY if kind is np.ndarray else _SCALAR
        return msgpack.ExtType(code, _encode_array(np.asarray(obj)))
    if kind in (Tensor, torch.nn.Parameter):
        return msgpack.ExtType(_TENSOR, _encode_tensor(obj))
    raise UsageError(
        f"`obj` holds a {kind.__module__}.{kind.__qualname__}, which cannot be sent; send plain "
        f"data: {_KNOWN}."
    )


def _encode_array(array: np.ndarray[Any, Any]) -> bytes:
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise UsageError(
            f"`obj` holds a numpy array of dtype {array.dtype}, which cannot be sent; send numbers "
            "or texts of fixed length, or `.tolist()`."
        )
    return encode([array.dtype.str, list(array.shape), array.tobytes()])


def _encode_tensor(tensor: Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(
            f"`obj` holds a {tensor.layout} tensor on {tensor.device}, which cannot be sent as an "
            "object; send `.cpu()` or `.to_dense()` of it, or the tensor itself by `broadcast`."
        )
    data = bytes_of(tensor).numpy().tobytes()
    return encode([dtype_name(tensor.dtype), list(tensor.shape), data])


def _restore(code: int, data: bytes) -> Any:
    """The inverse of `_extend`."""
    restore = _RESTORERS.get(code)
    if restore is None:
        raise ValueError(f"unknown extension type {code}")
    return restore(data)


def _decode_array(data: bytes) -> np.ndarray[Any, Any]:
    dtype, shape, values = decode(data)
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"numpy dtype {dtype!r}")
    if np.dtype(dtype).itemsize == 0:  # texts that are all empty
        return np.zeros(shape, dtype)
    return np.frombuffer(values, dtype).reshape(shape).copy()


def _decode_tensor(data: bytes) -> Tensor:
    name, shape, values = decode(data)
    dtype = dtype_of_name(name)
    if prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{len(values)} bytes for a tensor of shape {shape}")
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


_RESTORERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: lambda data: tuple(decode(data)),
    _INT: lambda data: int.from_bytes(data, "big", signed=True),
    _SET: lambda data: set(decode(data)),
    _FROZENSET: lambda data: frozenset(decode(data)),
    _ORDERED_DICT: lambda data: OrderedDict(decode(data)),
    _COMPLEX: lambda data: complex(*decode(data)),
    _ARRAY: _decode_array,
    _SCALAR: lambda data: _decode_array(data)[()],
    _TENSOR: _decode_tensor,
}
