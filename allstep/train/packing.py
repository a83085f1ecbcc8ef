"""Separates a state into bytes and a flat dict of tensors; `pieces.Selection` rejoins them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from allstep.comm.codec import DICTS, encode
from allstep.errors import UsageError
from allstep.nn import DividedTensor
from allstep.train.pieces import as_stored, is_reserved, name_suffix

_Path = tuple[object, ...]
_STAND_IN = torch.empty(0)  # in place of a divided tensor, for the codec
T = TypeVar("T")


def pack(state: Any) -> tuple[bytes, dict[str, Tensor | DividedTensor]]:
    """Separates the tensors of a state from the rest.

    Args:
        state: plain data as `allstep.comm.codec.encode` takes, with dense tensors on any device,
            or divided ones. A Parameter comes back as a tensor.

    Returns:
        The rest of the state, encoded, and path -> tensor: contiguous, on the CPU, and not sharing
        memory with each other; divided tensors are returned as they are.

    Raises:
        UsageError: if `state` holds anything else, with its path in the message, or if a tensor is
            in a set or is a key.

    >>> data, tensors = pack({"model": {"weight": torch.ones(2)}, "steps": (1, float("inf"))})
    >>> tensors
    {'model/weight': tensor([1., 1.])}
    """
    tensors: dict[str, Tensor | DividedTensor] = {}
    storages: set[int] = set()
    leaves = [(p, x) for p, x in _leaves(state) if isinstance(x, (Tensor, DividedTensor))]
    unnamed = iter(leaves)

    def store(tensor: Tensor) -> str:
        at, leaf = next(unnamed, ((), _STAND_IN))
        if tensor is not (_STAND_IN if isinstance(leaf, DividedTensor) else leaf):
            raise UsageError(
                f"`state` holds a tensor of shape {list(tensor.shape)} in a set, or as a dict's key"
                ", which a checkpoint cannot store; put it in a list, or take its name as the key."
            )
        path, suffix = _named(at), name_suffix(leaf.dtype)
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise UsageError(
                f"`state` holds a nested tensor at `{path}`, which a checkpoint cannot store; store"
                " `.unbind()` of it, a list of tensors."
            )
        while is_reserved(path, suffix) or path + suffix in tensors:
            path += "'"
        if not math.prod(leaf.shape):
            leaf = torch.empty(tuple(leaf.shape), dtype=leaf.dtype)
        if isinstance(leaf, Tensor):
            leaf = as_stored(_plain(leaf, path))
            if leaf.untyped_storage().data_ptr() in storages:
                leaf = leaf.clone()
            storages.add(leaf.untyped_storage().data_ptr())
        tensors[path + suffix] = leaf
        return path + suffix

    try:
        return encode(_with_stand_ins(state) if divided_in(state) else state, store), tensors
    except UsageError as error:
        raise _located(state, error) from error


def tensors_in(state: Any) -> dict[str, Tensor]:
    """A state's tensors, by path.

    >>> tensors_in({"model": {"weight": torch.ones(2)}, "steps": 3})
    {'model/weight': tensor([1., 1.])}
    """
    return _by_name(_leaves(state), Tensor)


def divided_in(state: Any) -> dict[str, DividedTensor]:
    """A state's divided tensors, by path."""
    return _by_name(_leaves(state), DividedTensor)


def _by_name(leaves: Iterable[tuple[_Path, Any]], kind: type[T]) -> dict[str, T]:
    """The leaves of one type; different paths may read alike: `{"a/b": x}`, `{"a": {"b": x}}`."""
    found: dict[str, T] = {}
    for path, value in leaves:
        if isinstance(value, kind):
            name = _named(path)
            while name in found:
                name += "'"
            found[name] = value
    return found


def _with_stand_ins(state: Any) -> Any:
    """The state with plain tensors in place of divided ones, for the codec."""
    if isinstance(state, DividedTensor):
        return _STAND_IN
    if type(state) in DICTS:
        return type(state)({key: _with_stand_ins(value) for key, value in state.items()})
    if type(state) in (list, tuple):
        return type(state)(map(_with_stand_ins, state))
    return state


def _leaves(state: Any) -> Iterator[tuple[_Path, Any]]:
    """The leaves of the dicts, lists and tuples that are encoded, in order, with their paths."""
    waiting: list[tuple[_Path, Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        if type(value) in DICTS:
            children = list(value.items())
        elif type(value) in (list, tuple):
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
    """The error, with the path in the state where it occurred."""
    for path, value in _leaves(state):
        try:
            encode(_with_stand_ins(value), lambda tensor: "")
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
