"""Plain data as bytes and back; decoding is safe for bytes from any source.

[Note: safe encoding] msgpack holds only plain data; other types are sent as extension types, which
name no code to run, and whose contents are checked before numpy or torch see them.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from allstep.comm.layout import bytes_of, dtype_name, dtype_of_name
from allstep.errors import CommunicationError, UsageError

_TUPLE, _INT, _SET, _FROZENSET, _ARRAY, _SCALAR, _TENSOR, _ORDERED_DICT, _COMPLEX = range(1, 10)
_STORED_TENSOR, _COUNTER = 10, 11
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufcSU]\d+|[mM]8(\[\w+\])?)")
_KNOWN = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, "
    "numpy arrays and scalars, CPU tensors"
)

# Levels of nested extension types. Each is a call of msgpack, which takes some 50 KB of the
# thread's stack: 200 levels crash the process.
_MOST_NESTED = 32

DICTS = (dict, OrderedDict, Counter)  # the classes that are encoded; no subclasses are

Store = Callable[[Tensor], str]
Load = Callable[[str], Tensor]


def encode(obj: Any, store: Store | None = None) -> bytes:
    """Encodes plain data; see [Note: safe encoding].

    Args:
        obj: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, Counter,
            set, numpy arrays and scalars, CPU tensors, nested in each other.
        store: is called with each tensor of `obj`, in order, and returns a name, which the bytes
            hold instead of the tensor; by default they hold its values.

    Raises:
        UsageError: if `obj` holds anything else; the message names its type.

    >>> decode(encode({"steps": (1, 2**80), 3: [None, True, 0.5, b"x"]}))
    {'steps': (1, 1208925819614629174706176), 3: [None, True, 0.5, b'x']}
    """
    return _encode(obj, store, 0)


def _encode(obj: Any, store: Store | None, level: int) -> bytes:
    if level > _MOST_NESTED:
        raise UsageError(
            f"`obj` cannot be sent: its tuples, sets and the like are nested in more than"
            f" {_MOST_NESTED} levels; nest lists and dicts instead."
        )
    try:
        data: bytes = msgpack.packb(
            obj,
            default=partial(_extend, store=store, level=level),
            strict_types=True,
            unicode_errors="surrogatepass",
        )
    except UsageError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"`obj` cannot be sent ({error}); send flatter or smaller pieces: a tensor or a text "
            "may have 4 GiB, nesting 500 levels."
        ) from error
    return data


def decode(data: bytes | memoryview, load: Load | None = None) -> Any:
    """Decodes what `encode` returned.

    Args:
        data: the bytes.
        load: returns the tensor for a name that `store` returned.

    Raises:
        CommunicationError: if `data` is anything else.
    """
    return _decode(data, load, 0)


def _decode(data: bytes | memoryview, load: Load | None, level: int) -> Any:
    try:
        if level > _MOST_NESTED:
            raise ValueError(f"extension types in {level} levels")
        return msgpack.unpackb(
            data,
            ext_hook=partial(_restore, load=load, level=level),
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CommunicationError(
            f"received bytes that are no message of allstep: {error}"
        ) from error
    except msgpack.exceptions.UnpackException as error:
        raise CommunicationError("received bytes that are no message of allstep") from error


def _extend(obj: Any, store: Store | None, level: int) -> msgpack.ExtType:
    """An extension type for an object that msgpack does not support."""
    code, content = _plain(obj, store)
    return msgpack.ExtType(code, _encode(content, store, level + 1))


def _plain(obj: Any, store: Store | None) -> tuple[int, Any]:
    """The code of an object's type, and its contents as simpler types."""
    kind = type(obj)
    if kind is tuple:
        return _TUPLE, list(obj)
    if kind is int:
        return _INT, obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True)
    if kind in (set, frozenset):
        return _SET if kind is set else _FROZENSET, list(obj)
    if kind is OrderedDict:
        return _ORDERED_DICT, [list(item) for item in obj.items()]
    if kind is Counter:
        return _COUNTER, dict(obj)
    if kind is complex:
        return _COMPLEX, [obj.real, obj.imag]
    if kind is np.ndarray or isinstance(obj, np.generic):
        return _ARRAY if kind is np.ndarray else _SCALAR, _plain_array(np.asarray(obj))
    if kind in (Tensor, torch.nn.Parameter):
        return (_TENSOR, _plain_tensor(obj)) if store is None else (_STORED_TENSOR, store(obj))
    raise UsageError(
        f"`obj` holds a {kind.__module__}.{kind.__qualname__}, which cannot be sent; send plain "
        f"data: {_KNOWN}."
    )


def _plain_array(array: np.ndarray[Any, Any]) -> list[Any]:
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise UsageError(
            f"`obj` holds a numpy array of dtype {array.dtype}, which cannot be sent; send numbers "
            "or texts of fixed length, or `.tolist()`."
        )
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _plain_tensor(tensor: Tensor) -> list[Any]:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(
            f"`obj` holds a {tensor.layout} tensor on {tensor.device}, which cannot be sent as an "
            "object; send `.cpu()` or `.to_dense()` of it, or the tensor itself by `broadcast`."
        )
    return [dtype_name(tensor.dtype), list(tensor.shape), bytes_of(tensor).numpy().tobytes()]


def _restore(code: int, data: bytes, load: Load | None, level: int) -> Any:
    """The inverse of `_extend`."""
    restore = load if code == _STORED_TENSOR else _RESTORERS.get(code)
    if restore is None:
        raise ValueError(f"unknown extension type {code}")
    return restore(_decode(data, load, level + 1))


def _array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, values = content
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"numpy dtype {dtype!r}")
    if np.dtype(dtype).itemsize == 0:  # an array of empty strings
        return np.zeros(shape, dtype)
    return np.frombuffer(values, dtype).reshape(shape).copy()


def _tensor(content: Any) -> Tensor:
    name, shape, values = content
    dtype = dtype_of_name(name)
    if prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{len(values)} bytes for a tensor of shape {shape}")
    try:
        if not values:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)
    except RuntimeError as error:
        raise ValueError(f"no tensor has shape {shape}") from error


_RESTORERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _INT: partial(int.from_bytes, byteorder="big", signed=True),
    _SET: set,
    _FROZENSET: frozenset,
    _ORDERED_DICT: OrderedDict,
    _COUNTER: Counter,
    _COMPLEX: lambda parts: complex(*parts),
    _ARRAY: _array,
    _SCALAR: lambda content: _array(content)[()],
    _TENSOR: _tensor,
}
