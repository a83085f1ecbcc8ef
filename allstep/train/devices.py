"""The tensors of nested data: mapped, and moved to a device."""

from collections import UserDict
from collections.abc import Callable, Mapping
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from allstep.comm.codec import DICTS
from allstep.device import copy_stream, current_stream, has_streams, lend_to_current_stream


def map_tensors(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting of dicts, lists and tuples with `function` applied to each tensor.

    >>> map_tensors({"x": (torch.ones(2), "name")}, lambda x: 2 * x)
    {'x': (tensor([2., 2.]), 'name')}
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, PackedSequence):  # torch wants its batch_sizes on the CPU
        fields = data._asdict()
        del fields["batch_sizes"]
        return data._replace(**map_tensors(fields, function))
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in data.items()}
        kind: Any = type(data)
        if kind in DICTS:
            return kind(mapped)
        if not isinstance(data, (dict, UserDict)):
            return mapped
        kept = copy(data)  # a subclass, such as a tokenizer's batches
        for key, value in mapped.items():
            kept[key] = value
        return kept
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def map_held(
    optimizer: Optimizer,
    optimizer_state: Mapping[str, Any],
    function: Callable[[Any, Tensor], Any],
) -> dict[str, Any]:
    """The state with each value of a parameter p replaced by `function(value, p)`."""
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    saved = chain.from_iterable(group["params"] for group in optimizer_state["param_groups"])
    held = dict(optimizer_state["state"])
    for p, number in zip(own, saved, strict=False):  # what doesn't fit is refused later
        if isinstance(held.get(number), dict):
            held[number] = {key: function(value, p) for key, value in held[number].items()}
    return {**optimizer_state, "state": held}


def to_device(data: Any, device: torch.device) -> Any:
    """The same nested data with its tensors on `device`.

    Pinned memory is copied asynchronously: neither the device's work nor the host waits for it.

    Args:
        data: tensors in dicts, lists and tuples; anything else is left as it is.
        device: the device to copy to.
    """
    move = _copy_beside if has_streams(device) else Tensor.to
    return map_tensors(data, lambda tensor: move(tensor, device))


def _copy_beside(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a stream of its own: its reader waits for it, but it waits for nothing."""
    if tensor.device == device:
        return tensor
    stream = copy_stream(device)
    with stream:
        copied = tensor.to(device, non_blocking=True, copy=True)
    current_stream(device).wait_stream(stream)
    lend_to_current_stream(copied)
    return copied
