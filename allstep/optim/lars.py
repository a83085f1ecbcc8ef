"""LARS: momentum SGD, layer-wise adapted, in the three forms that are called so."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from allstep.errors import UsageError
from allstep.optim.fast import blocks, check_ways, choose_way, combine, flats_of
from allstep.optim.leaves import Batch
from allstep.optim.optimizer import Nonfinite
from allstep.optim.rules import Sgd
from allstep.optim.strategy import TrustRatioOptimizer, adapts
from allstep.optim.trust import Norm, power_sum

__all__ = ["LARS", "LarsVariant"]

LarsVariant = Literal["paper", "lamb_paper", "mlperf"]

# What Keras puts in place of MLPerf's 0.
_MLPERF_EPS = 1e-7

# 1 - (1 - scale) is off by 1e-16: so much above it that no digit of the dtype is lost.
_SMALLEST_SCALE = {torch.float32: 1e-8, torch.float64: 1e-3}


class LARS(TrustRatioOptimizer):
    """Momentum SGD whose rate is scaled to every layer's weights and gradient.

    `variant="paper"`, of 2017; the rate is part of the momentum:

        ratio = trust_coefficient * norm(x) / (norm(gradient) + weight_decay * norm(x))
        v = momentum * v + lr * ratio * (gradient + weight_decay * x)
        x = x - v

    `variant="mlperf"`, of the reference implementation: the same with 1e-7 added to the
    denominator, and neither ratio nor weight decay for groups with `adapt=False`.

    `variant="lamb_paper"`, Algorithm 1 of the LAMB paper; here it is the momentum that is
    normalised, and rates are hundreds of times smaller:

        m = momentum * m + (1 - momentum) * (gradient + weight_decay * x)
        x = x - lr * phi(norm(x)) / norm(m) * m

    The ratio is 1 where `phi(norm(x))` or the other norm is zero, and in groups with
    `adapt=False`, as `allstep.optim.groups` makes them. All are `LayerWise` over `Sgd`, in fewer
    passes over memory.

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        lr: learning rate, a number or a tensor.
        momentum: decay of the momentum.
        weight_decay: added to the gradient, times the weights.
        variant: "paper", "lamb_paper" or "mlperf".
        nesterov: look ahead by one momentum step; not for "lamb_paper".
        trust_coefficient: eta; by default 0.001, and 1 for "lamb_paper".
        trust_eps: added to the ratio's denominator; by default 0, and 1e-7 for "mlperf".
        trust_clip: the largest ratio.
        phi: bounds (low, high) of the norm of the weights.
        always_adapt: if False, groups without weight decay are not adapted.
        momentum_correction: multiply the momentum by lr / previous lr when the rate changes; not
            for "lamb_paper", whose momentum holds no rate.
        norm: "l2", "l1" or "linf", for weights and updates alike.
        maximize: go up the gradient.
        foreach: use torch's multi-tensor kernels.
        fused: use torch's fused SGD kernel on a CPU, multi-tensor kernels elsewhere; the
            default. With False (and `foreach` not True) every layer is computed by itself.
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
        trust_coefficient: float | None = None,
        trust_eps: float | None = None,
        trust_clip: float | None = None,
        phi: tuple[float, float] = (0.0, math.inf),
        always_adapt: bool = True,
        momentum_correction: bool = False,
        norm: Norm = "l2",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        if variant not in get_args(LarsVariant):
            raise UsageError(
                f"`variant` (={variant!r}) must be one of {', '.join(get_args(LarsVariant))}."
            )
        of_momentum = variant == "lamb_paper"
        check_ways(fused, foreach)
        if trust_coefficient is None:
            trust_coefficient = 1.0 if of_momentum else 0.001
        if trust_eps is None:
            trust_eps = _MLPERF_EPS if variant == "mlperf" else 0.0
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "phi": phi,
                "trust_coefficient": trust_coefficient,
                "trust_eps": trust_eps,
                "trust_clip": trust_clip,
                "always_adapt": always_adapt,
                "momentum_correction": momentum_correction,
                "maximize": maximize,
                "capturable": capturable,
                "variant": variant,
            },
            norm=norm,
            ratio_on="update" if of_momentum else "gradient",
            nonfinite=nonfinite,
            variant=variant,
            foreach=foreach,
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
        return Sgd.slots

    def _rule(self, group: dict[str, Any]) -> Sgd:
        dampening = group["momentum"] if self._options["variant"] == "lamb_paper" else 0.0
        return Sgd(momentum=group["momentum"], dampening=dampening, nesterov=group["nesterov"])

    def _coupled_decay(self, group: dict[str, Any]) -> float:
        if self._options["variant"] == "mlperf" and not group["adapt"]:
            return 0.0
        return super()._coupled_decay(group)

    # --- ratio on the gradient: "paper" and "mlperf" --------------------------------------------

    def _move_by_gradients(self, batch: Batch, scales: Tensor) -> None:
        way = choose_way(self._options, batch.device)
        flats = None if way == "plain" else flats_of(batch, *Sgd.slots)
        if flats is None:
            super()._move_by_gradients(batch, scales)
        elif way == "fused" and batch.device.type == "cpu" and not batch.group["nesterov"]:
            self._move_fused(batch, scales, *flats)
        else:
            self._move_foreach(batch, scales, *flats)

    def _move_fused(
        self,
        batch: Batch,
        scales: Tensor,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        """[Note: rate inside fused SGD's momentum] The kernel's buffer takes (1 - dampening)
        times the gradient, so a dampening of 1 - scale puts the scale into the momentum. A scale
        far below 1 would be rounded away there, and goes the other way.
        """
        group = batch.group
        momentum = float(group["momentum"] * self._correction(group))
        smallest, decay = _SMALLEST_SCALE[weights[0].dtype], self._coupled_decay(group)
        # Layers that do not adapt share one scale, and one call.
        num_layers = 1 if adapts(group) else len(weights)
        for begin, scale in enumerate(scales.tolist()[::num_layers]):
            part = slice(begin, begin + num_layers)
            layers = weights[part], gradients[part], buffers[part]
            if momentum and scale >= smallest:
                torch._fused_sgd_(
                    *layers,
                    weight_decay=decay,
                    momentum=momentum,
                    lr=1.0,
                    dampening=1.0 - scale,
                    nesterov=False,
                    maximize=group["maximize"],
                    is_first_step=False,
                )
            else:
                self._move_foreach(batch, scales[part], *layers)

    def _move_foreach(
        self,
        batch: Batch,
        scales: Tensor,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        group = batch.group
        sign = -1 if group["maximize"] else 1
        steps = list(torch._foreach_mul(gradients, sign))
        torch._foreach_add_(steps, weights, alpha=self._coupled_decay(group))
        torch._foreach_mul_(steps, list(scales.to(weights[0].dtype)))
        correction = self._correction(group)
        torch._foreach_mul_(buffers, group["momentum"] * correction)
        torch._foreach_add_(buffers, steps)
        if group["nesterov"]:
            torch._foreach_add_(steps, buffers, alpha=group["momentum"])
        torch._foreach_sub_(weights, steps if group["nesterov"] else buffers)

    # --- ratio on the momentum: "lamb_paper" ----------------------------------------------------

    def _measure(self, batch: Batch) -> Tensor:
        way = choose_way(self._options, batch.device)
        flats = None if way == "plain" else flats_of(batch, *Sgd.slots)
        if flats is None:
            return super()._measure(batch)
        weights, gradients, buffers = flats
        batch.weights, batch.directions = weights, buffers
        if way == "fused" and batch.device.type == "cpu":
            return self._measure_blocks(batch, weights, gradients, buffers)
        self._average(batch.group, weights, gradients, buffers)
        return self._sums(batch, buffers)

    def _measure_blocks(
        self,
        batch: Batch,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> Tensor:
        """The momentum is the direction, so it needs no memory of its own."""
        sums: list[list[float]] = [[], []]
        for tensors in zip(weights, gradients, buffers, strict=True):
            of_blocks: list[list[float]] = [[], []]
            for weight, gradient, buffer in blocks(*tensors):
                of_blocks[0].append(power_sum(weight, self._norm))
                self._average(batch.group, [weight], [gradient], [buffer])
                of_blocks[1].append(power_sum(buffer, self._norm))
            for total, parts in zip(sums, of_blocks, strict=True):
                total.append(combine(parts, self._norm))
        return torch.tensor(sums, dtype=torch.float64)

    def _average(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
    ) -> None:
        """buffer = momentum * buffer + (1 - momentum) * (gradient + weight_decay * weight)."""
        share = 1 - group["momentum"]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients, alpha=-share if group["maximize"] else share)
        if group["weight_decay"]:
            torch._foreach_add_(buffers, weights, alpha=share * group["weight_decay"])
