"""A state as bytes and a flat dict of tensors, and back, exactly."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from allstep.comm.codec import decode, encode
from allstep.comm.layout import dtype_name, dtype_of_name
from allstep.errors import CheckpointError, UsageError

# What a safetensors file can hold.
_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
}
# Ends the name of a tensor of another dtype, which is stored as bytes.
_OTHER_DTYPE = re.compile(r"\|(\w+)$")

_Path = tuple[object, ...]


def pack(state: Any) -> tuple[bytes, dict[str, Tensor]]:
    """Takes the tensors out of a state.

    Args:
        state: plain data as `allstep.comm.codec.encode` takes, with dense tensors on any device. A
            Parameter comes back as a tensor.

    Returns:
        The rest of the state, encoded, and the tensors by their path in it, contiguous, on the CPU
        and none sharing another's memory.

    Raises:
        UsageError: if there is anything else in `state`; the message names its path.

    >>> data, tensors = pack({"model": {"weight": torch.ones(2)}, "steps": (1, float("inf"))})
    >>> tensors
    {'model/weight': tensor([1., 1.])}
    >>> unpack(data, tensors)
    {'model': {'weight': tensor([1., 1.])}, 'steps': (1, inf)}
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    paths = (path for path, value in _leaves(state) if isinstance(value, Tensor))

    def store(tensor: Tensor) -> str:
        path = _named(next(paths, ()))
        plain = _plain(tensor, path)
        suffix = ""
        if plain.dtype not in _DTYPES:
            suffix = f"|{dtype_name(plain.dtype)}"
            plain = plain.unsqueeze(-1).view(torch.uint8)
        while _is_reserved(path, suffix) or path + suffix in tensors:
            path += "'"
        name = path + suffix
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        tensors[name] = plain
        return name

    try:
        return encode(state, store), tensors
    except UsageError as error:
        raise _located(state, error) from error


def unpack(data: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`.

    Raises:
        CheckpointError: if a tensor is missing.
    """

    def load(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"the tensor {name} is missing")
        other = _OTHER_DTYPE.search(name)
        if other is None:
            return tensors[name]
        return tensors[name].view(dtype_of_name(other[1])).squeeze(-1)

    return decode(data, load)


def _is_reserved(path: str, suffix: str) -> bool:
    """Whether a name means something else: to safetensors, or to `unpack`."""
    return path + suffix == "__metadata__" or (not suffix and bool(_OTHER_DTYPE.search(path)))


def tensors_in(state: Any) -> dict[str, Tensor]:
    """The tensors by their path in a state.

    >>> tensors_in({"model": {"weight": torch.ones(2)}, "steps": 3})
    {'model/weight': tensor([1., 1.])}
    """
    return {_named(path): value for path, value in _leaves(state) if isinstance(value, Tensor)}


def _leaves(state: Any) -> Iterator[tuple[_Path, Any]]:
    """What is in dicts, lists and tuples, in their order, with its path."""
    waiting: list[tuple[_Path, Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(value))
        else:
            yield path, value
            continue
        waiting += [((*path, key), child) for key, child in reversed(children)]


def _plain(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UsageError(
            f"`state` holds a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} at "
            f"`{path}`, which a checkpoint cannot store; convert it first, for example with"
            " `.to_dense()` or `.dequantize()`."
        )
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _located(state: Any, error: UsageError) -> UsageError:
    """The error, saying at which path of the state it is."""
    for path, value in _leaves(state):
        try:
            encode(value, lambda tensor: "")
        except UsageError:
            kind = type(value)
            return UsageError(
                f"`state` holds a {kind.__module__}.{kind.__qualname__} at `{_named(path)}`, which"
                " a checkpoint cannot store; it takes None, bool, int, float, complex, str, bytes,"
                " numpy arrays, tensors, and lists, tuples, sets and dicts of them."
            )
    return error


def _named(path: _Path) -> str:
    return "/".join(map(str, path)) or "state"
