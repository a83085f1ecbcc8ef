"""The general layer-wise strategy over any base update."""

import math
from typing import Any, get_args

from torch import Tensor

from allstep.errors import UsageError
from allstep.optim.optimizer import Nonfinite
from allstep.optim.rules import Rule, Sgd
from allstep.optim.strategy import RatioOn, TrustRatioOptimizer
from allstep.optim.trust import Norm

__all__ = ["LayerWise"]


class LayerWise(TrustRatioOptimizer):
    """A base update whose learning rate is adapted layer by layer.

    With `ratio_on="update"`, for every parameter x (Algorithm 2 of the LAMB paper, where
    the base is Adam):

        u = base(gradient) + weight_decay * x
        x = x - lr * trust_coefficient * phi(norm(x)) / (norm(u) + trust_eps) * u

    With `ratio_on="gradient"` the ratio enters before the base's momentum (LARS as of 2017):

        ratio = trust_coefficient * phi(norm(x)) / (norm(gradient) + weight_decay * norm(x))
        x = x - base(lr * ratio * (gradient + weight_decay * x))

    The ratio is 1 where `phi(norm(x))` or the other norm is zero. A group may have its own value
    of any option from `lr` to `momentum_correction`, and `adapt=False` to have its ratio fixed
    at 1; `allstep.optim.groups` makes such groups.

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        base: the base update: `Adam()`, `Sgd(momentum=0.9)`, or a `Rule` of your own.
        lr: learning rate, a number or a tensor.
        weight_decay: joins the direction or the gradient, as the base says (`decoupled`).
        phi: bounds (low, high) of the norm of the weights.
        trust_coefficient: factor of every ratio (LARS's eta).
        trust_eps: added to the ratio's denominator.
        trust_clip: the largest ratio.
        always_adapt: if False, groups without weight decay are not adapted.
        momentum_correction: multiply the momentum by lr / previous lr when the rate changes; for
            `ratio_on="gradient"`, where the momentum holds the rate.
        norm: "l2", "l1" or "linf", for weights and updates alike.
        ratio_on: what the ratio scales, "update" or "gradient"; the latter needs `Sgd`.
        maximize: go up the gradient.
        capturable: the step may be captured in a CUDA graph.
        nonfinite: what a gradient that is not finite does: "raise", "skip" or "propagate".

    Raises:
        UsageError: if an option is out of range or does not fit the others.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LayerWise([weight], Sgd(), lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 100.0])
    >>> optimizer.step()
    >>> weight.tolist()
    [3.0, 3.5]

    Source: You et al., 2020, arXiv:1904.00962, section 3 (strategy) and Algorithm 2; You et
    al., 2017, arXiv:1708.03888; Goyal et al., 2017, arXiv:1706.02677, remark 2 (correction).
    """

    def __init__(
        self,
        params: Any,
        base: Rule,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        phi: tuple[float, float] = (0.0, math.inf),
        trust_coefficient: float = 1.0,
        trust_eps: float = 0.0,
        trust_clip: float | None = None,
        always_adapt: bool = True,
        momentum_correction: bool = False,
        norm: Norm = "l2",
        ratio_on: RatioOn = "update",
        maximize: bool = False,
        capturable: bool = False,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        parts = ("slots", "decoupled", "direction")
        if isinstance(base, type) or not all(hasattr(base, name) for name in parts):
            raise UsageError(
                f"`base` (={base!r}) must be a base update, such as `Adam()` or"
                " `Sgd(momentum=0.9)`."
            )
        if ratio_on not in get_args(RatioOn):
            raise UsageError(
                f"`ratio_on` (={ratio_on!r}) must be one of {', '.join(get_args(RatioOn))}."
            )
        if ratio_on == "gradient" and not isinstance(base, Sgd):
            raise UsageError(
                f"`base` (={base}) must be `Sgd` when the ratio is on the gradient; other bases"
                " undo a scaling of the gradient."
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "phi": phi,
                "trust_coefficient": trust_coefficient,
                "trust_eps": trust_eps,
                "trust_clip": trust_clip,
                "always_adapt": always_adapt,
                "momentum_correction": momentum_correction,
                "maximize": maximize,
                "capturable": capturable,
            },
            norm=norm,
            ratio_on=ratio_on,
            nonfinite=nonfinite,
            base=base,
        )

    def _slots(self) -> tuple[str, ...]:
        return self._rule({}).slots

    def _rule(self, group: dict[str, Any]) -> Rule:
        base: Rule = self._options["base"]
        return base
