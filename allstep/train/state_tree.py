"""A state as a skeleton of plain JSON and a flat dict of tensors, and back, exactly.

[Note: skeleton] None, bool, str, int of 64 bits and finite float stand for themselves, a list is
a JSON list; whatever JSON lacks is an object with a single key that says what it is:
{"dict": {name: value}}, {"items": [[key, value]]} (a dict with int keys), {"tuple": [value]},
{"int": "0x…"}, {"float": "nan"}, {"bytes": "base64"}, {"tensor": "its name"}.
"""

import base64
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from allstep.errors import UsageError

__all__ = ["flatten", "tensor_names", "unflatten"]

_MAX_DEPTH = 100
_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
}


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Takes the tensors out of a state.

    Args:
        state: nested dicts (keys of str or int), lists and tuples of None, bool, int, float, str,
            bytes and dense tensors. An OrderedDict comes back as a dict, a Parameter as a tensor.

    Returns:
        The skeleton, plain JSON (see [Note: skeleton]), and the tensors by their path in the
        state, contiguous, on the CPU and none sharing another's memory.

    Raises:
        UsageError: if there is anything else in `state`; the message names its path.

    >>> flatten({"model": {"weight": torch.ones(2)}, "steps": (1, float("inf"))})[0]
    {'dict': {'model': {'dict': {'weight': {'tensor': 'model/weight'}}}, 'steps': {'tuple': \
[1, {'float': 'inf'}]}}}
    """
    flattener = _Flattener()
    return flattener.encode(state, ()), flattener.tensors


def unflatten(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(skeleton, list):
        return [unflatten(value, tensors) for value in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, value),) = skeleton.items()
    match kind:
        case "dict":
            return {key: unflatten(child, tensors) for key, child in value.items()}
        case "items":
            return {key: unflatten(child, tensors) for key, child in value}
        case "tuple":
            return tuple(unflatten(child, tensors) for child in value)
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "bytes":
            return base64.b64decode(value)
        case "tensor":
            return tensors[value]
    raise ValueError(f"unknown kind {kind!r} in the state's skeleton")


def tensor_names(skeleton: Any) -> set[str]:
    """Names of the tensors that a skeleton asks for."""
    if isinstance(skeleton, list):
        return {name for value in skeleton for name in tensor_names(value)}
    if not isinstance(skeleton, dict):
        return set()
    ((kind, value),) = skeleton.items()
    if kind == "tensor":
        return {value}
    return tensor_names(list(value.values()) if kind == "dict" else value)


class _Flattener:
    """Walks one state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if len(path) > _MAX_DEPTH:
            raise UsageError(
                f"`state` is nested deeper than {_MAX_DEPTH} levels at `{_name(path)[:60]}…`."
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else {"int": hex(value)}
        if isinstance(value, float):  # numpy's float64 is one
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if kind is str:
            return _checked(value, path)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind in (list, tuple):
            children = [self.encode(child, (*path, i)) for i, child in enumerate(value)]
            return children if kind is list else {"tuple": children}
        if kind in (dict, OrderedDict):
            return self._encode_dict(value, path)
        if kind in (Tensor, nn.Parameter):
            return {"tensor": self._keep(value, path)}
        raise UsageError(
            f"`state` holds a {kind.__module__}.{kind.__qualname__} at `{_name(path)}`, which a "
            "checkpoint cannot store; it takes None, bool, int, float, str, bytes, tensors, and "
            "lists, tuples and dicts of them."
        )

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str | int, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise UsageError(
                    f"`state` has the key {key!r} at `{_name(path)}`; keys must be str or int."
                )
            if type(key) is str:
                _checked(key, path)
        items = [[key, self.encode(child, (*path, key))] for key, child in value.items()]
        if all(type(key) is str for key in value):
            return {"dict": dict(items)}
        return {"items": items}

    def _keep(self, tensor: Tensor, path: tuple[str | int, ...]) -> str:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
            raise UsageError(
                f"`state` holds a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} at "
                f"`{_name(path)}`, which a checkpoint cannot store; convert it first, for "
                "example with `.to_dense()` or `.to(dtype)`."
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in self._storages:
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        name = _name(path)
        while name in self.tensors or name == "__metadata__":  # safetensors keeps that one
            name += "'"
        self.tensors[name] = plain
        return name


def _name(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path)) or "state"


def _checked(text: str, path: tuple[str | int, ...]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"`state` holds a text at `{_name(path)!r}` that is no valid Unicode: {error}."
        ) from error
    return text
