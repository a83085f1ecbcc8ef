"""Saved states into models and optimizers, refused whole when they don't fit."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.errors import CheckpointError

__all__ = ["load_model_state", "load_optimizer_state"]

_NUM_LISTED = 5


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads parameters and buffers; nothing is changed if any of them doesn't fit.

    Args:
        model: the module to fill in place.
        state: what its `state_dict()` once gave.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected or of another shape.
    """
    expected = model.state_dict()
    misfits = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": [
            f"{name} {_shape(state[name])} instead of {_shape(expected[name])}"
            for name in expected
            if name in state and _shape(state[name]) != _shape(expected[name])
        ],
    }
    found = [f"{kind}: {_listed(names)}" for kind, names in misfits.items() if names]
    if found:
        raise CheckpointError(
            f"The checkpoint is for another model: {'; '.join(found)}. "
            "Build the model as it was when the checkpoint was written."
        )
    model.load_state_dict(state)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads an optimizer's state; nothing is changed if its groups differ.

    Args:
        optimizer: over the same parameters in the same groups.
        state: what its `state_dict()` once gave.

    Raises:
        CheckpointError: if the number of groups, or of parameters in one, differs.
    """
    expected = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if found != expected:
        raise CheckpointError(
            f"The checkpoint is for another optimizer: its groups have {_listed(found)} parameters "
            f"instead of {_listed(expected)}. Build the groups as when it was written."
        )
    optimizer.load_state_dict(dict(state))


def _shape(value: Any) -> object:
    return list(value.shape) if isinstance(value, Tensor) else None


def _listed(names: list[Any]) -> str:
    text = ", ".join(map(str, names[:_NUM_LISTED]))
    more = len(names) - _NUM_LISTED
    return f"{text} and {more} more" if more > 0 else text
