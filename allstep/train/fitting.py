"""Checks that a checkpoint fits a model, an optimizer and a run, and loads it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.errors import CheckpointError, first_few
from allstep.nn import DividedTensor
from allstep.train.devices import map_held
from allstep.train.dtensors import laid_out, lay_out

_MOST = 5  # that an error names


def check_same(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    cure: str = "Resume with the checkpoint's value.",
) -> None:
    """Compares the options that a resumed run must have in common with its checkpoint.

    Args:
        saved: the checkpoint's options, by name.
        wanted: this run's options that must be the same.
        cure: what to do if they are not.

    Raises:
        CheckpointError: naming the first option that differs.
    """
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"`{name}` (={value}) differs from the checkpoint's (={saved.get(name)}):"
                f" the run would not be the same. {cure}"
            )


def check_same_data(
    state: Mapping[str, Any],
    wanted: Mapping[str, Any],
    cure: str = "Give it the data that it began with.",
) -> None:
    """Compares the description of the data in a `Run`'s checkpoint; older ones have less of it.

    Args:
        state: the checkpoint.
        wanted: name -> value that must be the same.
        cure: what to do if it is not.

    Raises:
        CheckpointError: naming the first value that differs.
    """
    check_same({**wanted, **state.get("data", {})}, wanted, cure)


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads parameters and buffers; nothing is changed if any of them doesn't fit.

    Args:
        model: the module to fill in place.
        state: what its `state_dict()` returned.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected or of another shape or
            dtype.
    """
    expected = model.state_dict(keep_vars=True)  # they are only compared
    state = lay_out(expected, state)
    check_model_state(expected, state)
    model.load_state_dict(state)


def check_model_state(expected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Compares a stored state dict with the model's own, in names, shapes and dtypes.

    Raises:
        CheckpointError: as `load_model_state`.
    """
    misfits = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
    }
    for what, of in (("shape", _shape), ("dtype", _dtype)):
        misfits[f"of another {what}"] = [
            f"{name} {of(state[name])} instead of {of(expected[name])}"
            for name in expected
            if name in state and of(state[name]) != of(expected[name])
        ]
    found = [f"{kind}: {first_few(names, _MOST)}" for kind, names in misfits.items() if names]
    if found:
        raise CheckpointError(
            f"The checkpoint is for another model: {'; '.join(found)}. "
            "Build the model as it was when the checkpoint was written."
        )


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads an optimizer's state; nothing is changed if its groups differ.

    Args:
        optimizer: over the same parameters in the same groups.
        state: what its `state_dict()` returned.

    Raises:
        CheckpointError: if the number of groups, or of parameters in one, differs.
    """
    check_groups([len(group["params"]) for group in optimizer.param_groups], state)
    optimizer.load_state_dict(map_held(optimizer, state, laid_out))


def check_groups(expected: list[int], state: Mapping[str, Any]) -> None:
    """Compares the groups of a stored optimizer with the expected numbers of parameters.

    Raises:
        CheckpointError: as `load_optimizer_state`.
    """
    found = [len(group["params"]) for group in state["param_groups"]]
    if found != expected:
        raise CheckpointError(
            f"The checkpoint is for another optimizer: its groups have"
            f" {first_few(found, _MOST)} parameters instead of {first_few(expected, _MOST)}. Build"
            " the groups as when it was written."
        )


def _shape(value: Any) -> object:
    return list(value.shape) if isinstance(value, Tensor | DividedTensor) else None


def _dtype(value: Any) -> object:
    return value.dtype if isinstance(value, Tensor | DividedTensor) else None
