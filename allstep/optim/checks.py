"""Checks of optimizers' arguments."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import AllstepError, UsageError, first_few

Norm = Literal["l1", "l2", "linf"]

_NUM_LISTED = 5
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class NonfiniteGradientError(AllstepError, ArithmeticError):
    """Raised for gradients with NaN or infinity; the message names up to five parameters."""

    def __init__(self, names: Sequence[str], step: int | None = None) -> None:
        when = "" if step is None else f"Step {step}: "
        super().__init__(
            f"{when}the gradient of {first_few(names, _NUM_LISTED)}, or what it is added to, is not"
            " finite. Lower the learning rate, clip the gradient or look at the loss;"
            ' `nonfinite="skip"` would leave such steps out.'
        )


def check_values(values: Mapping[str, Any]) -> None:
    """Raises UsageError for invalid rates, decays and moments; other keys are not checked.

    A group's `trust_...` is checked as the field of `TrustRatio` that it is.
    """
    for key, value in values.items():
        holds, cure = _RULES.get(key.removeprefix("trust_"), (None, ""))
        if holds is not None and not _is_so(holds, value):
            shown = repr(value) if isinstance(value, str) else value
            raise UsageError(f"`{key}` (={shown}) {cure}")


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """The parameter's given name, or its position in the groups."""
    names = group.get("param_names")
    return names[index] if names else f"param_groups[{group_index}]['params'][{index}]"


def _is_so(holds: Callable[[Any], bool], value: Any) -> bool:
    try:
        return holds(value)
    except TypeError:  # a text, or None, where a number belongs
        return False


def _is_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        # A rate on a GPU is the user's to keep positive: to look would stop the GPU.
        return value.numel() == 1 and (is_accelerator(value.device) or bool(0 <= value < math.inf))
    return _is_finite(value)


def _is_finite(value: Any) -> bool:
    return bool(0 <= value < math.inf)


def _is_share(value: Any) -> bool:
    return bool(0 <= value < 1)


def _is_positive(value: Any) -> bool:
    return bool(0 < value < math.inf)


def _is_range(value: Any) -> bool:
    return len(value) == 2 and bool(0 <= value[0] <= value[1]) and bool(value[1] > 0)


def _are_betas(value: Any) -> bool:
    return len(value) == 2 and all(map(_is_share, value))


_Rule = tuple[Callable[[Any], bool] | None, str]

_RULES: dict[str, _Rule] = {
    "lr": (_is_rate, "must be a finite number, 0 or more; a step goes down the gradient already."),
    "weight_decay": (_is_finite, "must be finite and 0 or more; 0 switches it off."),
    "eps": (_is_finite, "must be finite and 0 or more."),
    "rmsprop_lr": (_is_finite, "must be finite and 0 or more; 3e-4 is usual."),
    "momentum": (_is_share, "must be at least 0 and below 1; 0.9 is usual."),
    "alpha": (_is_share, "must be at least 0 and below 1; 0.99 is usual."),
    "betas": (
        _are_betas,
        "must be two numbers, each at least 0 and below 1; (0.9, 0.999) is usual.",
    ),
    "norm": (lambda value: value in get_args(Norm), "must be one of l1, l2, linf."),
    "weight_norm_bounds": (_is_range, "must be (low, high) with 0 <= low <= high and high > 0."),
    "coefficient": (
        _is_positive,
        "must be finite and positive; 1 leaves the ratio of the norms as it is.",
    ),
    "clip": (
        lambda value: value is None or value > 0,
        "must be positive, the largest trust ratio, or None.",
    ),
    "maximize": (lambda value: value in (True, False), "must be True or False."),
    "center_steps": (_is_finite, "must be 0 or more and finite; 10 epochs are usual."),
    "period_steps": (_is_positive, "must be positive and finite; 5 epochs are usual."),
}


def check_parameters(group: Mapping[str, Any], group_index: int) -> None:
    """Raises UsageError for groups that are empty, repeat a parameter or have one without norm."""
    parameters = group["params"]
    if not parameters:
        raise UsageError(
            f"`params` of group {group_index} is empty; leave the group out, or check the filter"
            " that made it."
        )
    if len(set(parameters)) < len(parameters):
        raise UsageError(
            f"group {group_index} holds a parameter twice; list tied parameters once, as"
            " `allstep.optim.groups(model)` does."
        )
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor) or parameter.dtype not in _DTYPES:
            kind = parameter.dtype if isinstance(parameter, Tensor) else type(parameter).__name__
            raise UsageError(
                f"{parameter_name(group, group_index, index)} (={kind}) must be a tensor of real"
                f" floating-point numbers, of {', '.join(map(str, _DTYPES))}."
            )


def check_gradient(gradient: Tensor, name: str) -> None:
    """Raises UsageError for sparse gradients; names the parameter."""
    if gradient.layout != torch.strided:
        raise UsageError(
            f"the gradient of {name} (={gradient.layout}) must be dense: the norm of a layer needs"
            " all its rows. Use `nn.Embedding(..., sparse=False)`, or `torch.optim.SparseAdam`"
            " for this parameter."
        )


def find_nonfinite(gradients: Sequence[Tensor]) -> list[bool]:
    """The indices of the tensors with NaN or infinity.

    It computes their L2 norms, on a CPU in a tenth of the time of the largest magnitudes; these
    are computed only if a norm may be too large for its type. A sparse tensor's values count.
    """
    values = [x.coalesce().values() if x.is_sparse else x for x in gradients]
    bad = _nonfinite_norms(values, 2.0)
    suspects = [x for x, is_bad in zip(values, bad, strict=True) if is_bad]
    found = iter(_nonfinite_norms(suspects, math.inf))
    return [is_bad and next(found) for is_bad in bad]


def _nonfinite_norms(tensors: Sequence[Tensor], order: float) -> list[bool]:
    bad = [False] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, x in enumerate(tensors):
        if x.numel():
            alike.setdefault((x.device, x.dtype), []).append(index)
    for indices in alike.values():
        norms = torch._foreach_norm([tensors[index] for index in indices], order)
        for index, is_fine in zip(indices, torch.stack(norms).isfinite().tolist(), strict=True):
            bad[index] = not is_fine
    return bad
