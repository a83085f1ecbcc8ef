"""LARS: momentum SGD with layer-wise rates, in the three forms that have this name."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import UsageError, check_choice
from allstep.optim import momentum_correction
from allstep.optim.fused import sums_by_blocks
from allstep.optim.layer_wise import TrustRatioOptimizer, adapts
from allstep.optim.leaves import Batch
from allstep.optim.optimizer import Nonfinite
from allstep.optim.rules import SGDRule
from allstep.optim.trust import TrustRatio

LarsVariant = Literal["paper", "lamb_paper", "mlperf"]

_TRUST_RATIOS: dict[LarsVariant, TrustRatio] = {
    "paper": TrustRatio(coefficient=0.001),
    "lamb_paper": TrustRatio(),
    "mlperf": TrustRatio(coefficient=0.001, eps=1e-7),  # what Keras puts in place of MLPerf's 0
}

# 1 - (1 - scale) is off by 1e-16: so much above it that no digit of the dtype is lost.
_SMALLEST_SCALE = {torch.float32: 1e-8, torch.float64: 1e-3}


class LARS(TrustRatioOptimizer):
    """Momentum SGD whose rate is scaled by the norms of every layer's weights and gradient.

    `variant="paper"`, of 2017; the rate is part of the momentum:

        ratio = 0.001 * norm(x) / (norm(gradient) + weight_decay * norm(x))
        v = momentum * v + lr * ratio * (gradient + weight_decay * x)
        x = x - v

    `variant="mlperf"`, of the reference implementation: the same with 1e-7 added to the
    denominator, and neither ratio nor weight decay for groups with `adapt=False`.

    `variant="lamb_paper"`, Algorithm 1 of the LAMB paper; here it is the momentum that is
    normalised, and rates are hundreds of times smaller:

        m = momentum * m + (1 - momentum) * (gradient + weight_decay * x)
        x = x - lr * norm(x) / norm(m) * m

    The ratio is 1 where one of its norms is zero, and in groups with `adapt=False`, as
    `allstep.optim.groups` makes them. All are `LayerWise` over `SGDRule`, in fewer passes over
    memory.

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        lr: learning rate, a number or a tensor.
        momentum: decay of the momentum.
        weight_decay: added to the gradient, times the weights.
        variant: "paper", "lamb_paper" or "mlperf".
        nesterov: look ahead by one momentum step; not for "lamb_paper".
        trust_ratio: how the ratio is formed. By default the variant's: a `coefficient` of 0.001,
            for "mlperf" with `eps=1e-7`, and `TrustRatio()` for "lamb_paper".
        momentum_correction: multiply the momentum by lr / previous lr when the rate changes; not
            for "lamb_paper", whose momentum holds no rate.
        maximize: go up the gradient.
        fused: use torch's fused SGD kernel on a CPU, multi-tensor kernels elsewhere. With False
            every layer is computed by itself, as in `LayerWise`.
        capturable: the step may be captured in a CUDA graph.
        nonfinite: what a gradient that is not finite does: "raise", "skip" or "propagate".

    Raises:
        UsageError: if an option is out of range or does not fit the others.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LARS([weight], lr=10.0, momentum=0.9)
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> optimizer.step()  # the ratio is 0.001 * 5 / 2
    >>> weight.tolist()
    [3.0, 3.95...]

    Source: You et al., 2017, arXiv:1708.03888; You et al., 2020, arXiv:1904.00962, Algorithm 1;
    mlcommons/training, image_classification/tensorflow2/lars_optimizer.py; Goyal et al., 2017,
    arXiv:1706.02677, remark 2 (momentum correction).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        variant: LarsVariant = "paper",
        nesterov: bool = False,
        trust_ratio: TrustRatio | None = None,
        momentum_correction: bool = False,
        maximize: bool = False,
        fused: bool = True,
        capturable: bool = False,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        check_choice("variant", variant, get_args(LarsVariant))
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "momentum_correction": momentum_correction,
                "maximize": maximize,
                "capturable": capturable,
                "variant": variant,
            },
            ratio_on="update" if variant == "lamb_paper" else "gradient",
            trust_ratio=_TRUST_RATIOS[variant] if trust_ratio is None else trust_ratio,
            nonfinite=nonfinite,
            variant=variant,
            fused=fused,
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        variant = self._options["variant"]
        if group["nesterov"] and (variant == "lamb_paper" or group["momentum"] == 0):
            raise UsageError(
                f"`nesterov` (=True) needs a `momentum` (={group['momentum']}) above 0, and a"
                f" `variant` (={variant!r}) other than 'lamb_paper'."
            )

    def _slots(self) -> tuple[str, ...]:
        return SGDRule.slots

    def _rule(self, group: dict[str, Any]) -> SGDRule:
        dampening = group["momentum"] if self._options["variant"] == "lamb_paper" else 0.0
        return SGDRule(momentum=group["momentum"], dampening=dampening, nesterov=group["nesterov"])

    def _coupled_decay(self, group: dict[str, Any]) -> float:
        if self._options["variant"] == "mlperf" and not group["adapt"]:
            return 0.0
        return super()._coupled_decay(group)

    def _flats(self, batch: Batch) -> list[list[Tensor]] | None:
        """Weights, gradients and momenta as flat tensors, if the fused update applies."""
        return batch.flats(*SGDRule.slots) if self._options["fused"] else None

    # --- ratio on the gradient: "paper" and "mlperf" --------------------------------------------

    def _move_by_gradients(self, batch: Batch, scales: Tensor) -> None:
        flats = self._flats(batch)
        if flats is None:
            super()._move_by_gradients(batch, scales)
        elif not is_accelerator(batch.device) and not batch.group["nesterov"]:
            self._move_fused(batch, scales, flats)
        else:
            self._move_foreach(batch.group, scales, *flats)

    def _move_fused(self, batch: Batch, scales: Tensor, flats: list[list[Tensor]]) -> None:
        """[Note: rate inside fused SGD's momentum] The kernel's buffer takes (1 - dampening)
        times the gradient, so a dampening of 1 - scale puts the scale into the momentum. A scale
        far below 1 would be rounded away there, and is left to `_move_foreach`.
        """
        group = batch.group
        momentum = float(group["momentum"] * momentum_correction.factor(group))
        smallest, decay = _SMALLEST_SCALE[batch.dtype], self._coupled_decay(group)
        # Layers that do not adapt share one scale, and one call.
        num_layers = 1 if adapts(group) else len(batch.leaves)
        for begin, scale in enumerate(scales.tolist()[::num_layers]):
            layers = slice(begin, begin + num_layers)
            tensors = [column[layers] for column in flats]
            if momentum and scale >= smallest:
                torch._fused_sgd_(
                    *tensors,
                    weight_decay=decay,
                    momentum=momentum,
                    lr=1.0,
                    dampening=1.0 - scale,
                    nesterov=False,
                    maximize=group["maximize"],
                    is_first_step=False,
                )
            else:
                self._move_foreach(group, scales[layers], *tensors)

    def _move_foreach(
        self,
        group: dict[str, Any],
        scales: Tensor,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        steps = list(torch._foreach_mul(gradients, -1 if group["maximize"] else 1))
        torch._foreach_add_(steps, weights, alpha=self._coupled_decay(group))
        # Layers that do not adapt share one scale, and kernels.
        factors = scales.to(weights[0].dtype)
        torch._foreach_mul_(steps, list(factors) if adapts(group) else factors[0])
        torch._foreach_mul_(buffers, group["momentum"] * momentum_correction.factor(group))
        torch._foreach_add_(buffers, steps)
        if group["nesterov"]:
            torch._foreach_add_(steps, buffers, alpha=group["momentum"])
        torch._foreach_sub_(weights, steps if group["nesterov"] else buffers)

    # --- ratio on the momentum: "lamb_paper" ----------------------------------------------------

    def _measure(self, batch: Batch) -> Tensor:
        flats = self._flats(batch)
        if flats is None:
            return super()._measure(batch)
        batch.weights, batch.directions = flats[0], flats[2]  # the direction is the momentum
        if is_accelerator(batch.device):
            _average(batch.group, *flats)
            return self._sums(batch, batch.directions)

        def advance(_: int, *block: Tensor) -> Tensor:
            _average(batch.group, *([x] for x in block))
            return block[2]

        return sums_by_blocks(self._norm, flats, advance)


def _average(
    group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor]
) -> None:
    """buffer = momentum * buffer + (1 - momentum) * (gradient + weight_decay * weight)."""
    share = 1 - group["momentum"]
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, gradients, alpha=-share if group["maximize"] else share)
    if group["weight_decay"]:
        torch._foreach_add_(buffers, weights, alpha=share * group["weight_decay"])
