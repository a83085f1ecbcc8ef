"""Parameter groups by module type: which parameters are decayed and adapted."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from allstep.errors import UsageError
from allstep.optim.checks import check_values

_NORMALISATION: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
# What these modules register besides their weights; by their definition, not by a guess. Modules
# whose biases have several dimensions say so themselves, in `bias_names`.
_BIASES: tuple[tuple[type[nn.Module], frozenset[str]], ...] = (
    (nn.MultiheadAttention, frozenset({"bias_k", "bias_v"})),
)


def groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.01,
    normalisation: tuple[type[nn.Module], ...] = (),
) -> list[dict[str, Any]]:
    """Two parameter groups: weights, and parameters that are neither decayed nor adapted.

    The second group holds all parameters of normalisation modules (batch, instance, group,
    layer and RMS norm, and their subclasses), the magnitudes of `weight_norm`, biases, and
    whatever else has fewer than two dimensions. A module of one's own whose bias has more names
    it in a class attribute: `bias_names = ("bias",)`. Tied parameters are listed once, in the
    first group if any of their owners would put them there; parameters without `requires_grad`
    are left out.

    Args:
        model: any module.
        weight_decay: of the first group.
        normalisation: further module classes that are to be treated as normalisation.

    Returns:
        Groups of (name, parameter) pairs with `weight_decay` and `adapt`, for any optimizer; one
        that would be empty is left out. `adapt` is read by `LARS`, `LAMB` and `LayerWise`, which
        fix the trust ratio at 1 where it is False; other optimizers keep the key and ignore it.

    Raises:
        UsageError: if nothing in `model` is trainable, a parameter has not got its shape yet, or an
            argument is not what it should be.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    >>> for group in groups(model):
    ...     print([name for name, _ in group["params"]], group["weight_decay"], group["adapt"])
    ['0.weight'] 0.01 True
    ['0.bias', '1.weight', '1.bias'] 0.0 False

    Source: Jia et al., 2018, arXiv:1807.11205, section 3.2 (no decay of biases and
    normalisation); the skip lists of MLPerf's LARS and of BERT's LAMB.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"`model` (a {type(model).__name__}) must be the module itself, not its parameters: its"
            " modules tell which are which."
        )
    if not isinstance(normalisation, tuple) or not all(isinstance(k, type) for k in normalisation):
        raise UsageError(f"`normalisation` (={normalisation!r}) must be a tuple of module classes.")
    check_values({"weight_decay": weight_decay})
    kinds = _NORMALISATION + normalisation
    names: dict[nn.Parameter, str] = {}
    decayed: set[nn.Parameter] = set()
    for name, module, own_name, parameter in _owned(model):
        if is_lazy(parameter):
            raise UsageError(
                f"`model`: parameter `{name}` has no shape yet; call the model once on a batch"
                " first."
            )
        if parameter.requires_grad:
            names.setdefault(parameter, name)
            if _is_weight(module, own_name, parameter, kinds):
                decayed.add(parameter)
    if not names:
        raise UsageError("`model` has no trainable parameter; check `requires_grad`.")
    weights = [(name, p) for p, name in names.items() if p in decayed]
    others = [(name, p) for p, name in names.items() if p not in decayed]
    made = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": others, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in made if group["params"]]


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, owner, name in the owner, parameter), each owner once, tied ones repeated."""
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{own_name}" if prefix else own_name, module, own_name, parameter


def _is_weight(
    module: nn.Module,
    own_name: str,
    parameter: nn.Parameter,
    normalisation: tuple[type[nn.Module], ...],
) -> bool:
    if isinstance(module, normalisation) or parameter.ndim < 2:
        return False
    if own_name in getattr(module, "bias_names", ()) or _is_magnitude(module, own_name):
        return False
    return not any(isinstance(module, kind) and own_name in biases for kind, biases in _BIASES)


def _is_magnitude(module: nn.Module, own_name: str) -> bool:
    """Whether this is the g of `weight_norm`'s w = g * v / norm(v), in its new form or its old."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and own_name == f"{hook.name}_g":
            return True
    return (
        isinstance(module, ParametrizationList)
        and own_name == "original0"
        and isinstance(module[0], parametrizations._WeightNorm)
    )
