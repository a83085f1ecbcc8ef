"""LAMB: Adam's direction, layer-wise adapted."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from allstep.device import is_accelerator
from allstep.optim.fused import sums_by_blocks
from allstep.optim.layer_wise import TrustRatioOptimizer, adapts
from allstep.optim.leaves import Batch
from allstep.optim.optimizer import Nonfinite
from allstep.optim.rules import Adam
from allstep.optim.trust import TrustRatio

_ALIGNED_ELEMENTS = 16  # 64 bytes, as torch's allocator aligns, or more


class LAMB(TrustRatioOptimizer):
    """Adam's direction plus weight decay, scaled to the norm of every layer's weights.

    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    u = (m / (1 - beta1**step)) / (sqrt(v / (1 - beta2**step)) + eps) + weight_decay * x
    x = x - lr * ratio * u,    ratio = norm(x) / norm(u) as `TrustRatio` has it

    It is `LayerWise` over `Adam`, in fewer passes over memory. The ratio is 1 where a norm is
    zero, and in groups with `adapt=False`, as `allstep.optim.groups` makes them.

    Published code differs from the paper in options that are all here: Google's BERT leaves the
    bias correction out (`bias_correction=False`), pytorch-lamb bounds the weights' norm
    (`TrustRatio(weight_norm_bounds=(0, 10))`), LAMBC bounds the ratio (`TrustRatio(clip=1)`), and
    TensorFlow Addons, Apex and timm do not adapt what has no weight decay
    (`TrustRatio(always_adapt=False)`).

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, inside the direction and its norm.
        bias_correction: divide the moments by 1 - beta**step.
        trust_ratio: how the ratio is formed.
        maximize: go up the gradient.
        fused: use torch's fused Adam kernel, on a CPU block by block. With False every layer is
            computed by itself, as in `LayerWise`.
        capturable: the step may be captured in a CUDA graph.
        nonfinite: what a gradient that is not finite does: "raise", "skip" or "propagate".

    Raises:
        UsageError: if an option is out of range or does not fit the others.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([("weight", weight)], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([7.0, -1.0])
    >>> optimizer.step()  # the first direction is the gradient's sign, of norm sqrt(2)
    >>> {name: round(ratio, 4) for name, ratio in optimizer.trust_ratios().items()}
    {'weight': 3.5355}

    Source: You et al., 2020, arXiv:1904.00962, Algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        trust_ratio: TrustRatio | None = None,
        maximize: bool = False,
        fused: bool = True,
        capturable: bool = False,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "maximize": maximize,
                "capturable": capturable,
            },
            ratio_on="update",
            trust_ratio=trust_ratio,
            nonfinite=nonfinite,
            fused=fused,
        )

    def _slots(self) -> tuple[str, ...]:
        return Adam.slots

    def _rule(self, group: dict[str, Any]) -> Adam:
        return Adam(
            betas=group["betas"], eps=group["eps"], bias_correction=group["bias_correction"]
        )

    def _measure(self, batch: Batch) -> Tensor:
        is_fused = self._options["fused"] and _has_fused_adam(batch.device)
        flats = batch.flats(*Adam.slots) if is_fused else None
        if flats is None:
            return super()._measure(batch)
        batch.weights = flats[0]
        if not adapts(batch.group) and not batch.leaves[0].is_sharded:
            _step_adamw(batch, flats)
            return torch.zeros(2, len(batch.leaves), dtype=torch.float64, device=batch.device)
        if not is_accelerator(batch.device):
            return self._measure_blocks(batch, flats)
        batch.directions = _directions(batch, flats)
        return self._sums(batch, batch.directions)

    def _measure_blocks(self, batch: Batch, flats: list[list[Tensor]]) -> Tensor:
        """The sums of blocks of leaves. [Note: directions from fused Adam]"""
        batch.directions = self._scratch(batch)
        weight_decay = batch.group["weight_decay"]
        options, steps = _fused_options(batch.group), _steps(batch)

        def advance(layer: int, *block: Tensor) -> Tensor:
            weight, gradient, exp_avg, exp_avg_sq, direction = block
            torch.mul(weight, weight_decay, out=direction)
            torch._fused_adam_(
                [direction], [gradient], [exp_avg], [exp_avg_sq], [], [steps[layer]], **options
            )
            return direction

        return sums_by_blocks(self._norm, [*flats, batch.directions], advance)

    def _scratch(self, batch: Batch) -> list[Tensor]:
        """Memory for a batch's directions; always the same, except for sharded batches.

        Each begins where a tensor of its own would: how BLAS adds up depends on the alignment, and
        no layer's norm should depend on the layers beside it.
        """
        if batch.leaves[0].is_sharded:
            return [torch.empty_like(weight) for weight in batch.weights]
        sizes = []
        for weight in batch.weights:
            size = weight.numel()
            sizes += [size, -size % _ALIGNED_ELEMENTS]
        dtype = batch.weights[0].dtype
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < sum(sizes):
            memory = self._memory[dtype] = torch.empty(sum(sizes), dtype=dtype)
        return list(memory[: sum(sizes)].split_with_sizes(sizes)[::2])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memory = {}


def _has_fused_adam(device: torch.device) -> bool:
    """Whether torch has the kernel on a device; "meta" shows that a step stays on its device."""
    return device.type in ("meta", *_get_fused_kernels_supported_devices())


def _fused_options(group: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch's fused Adam that add the direction to what the parameter holds."""
    beta1, beta2 = group["betas"]
    return {
        "lr": -1.0,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": 0.0,
        "eps": group["eps"],
        "amsgrad": False,
        "maximize": group["maximize"],
    }


def _steps(batch: Batch) -> list[Tensor]:
    """Each leaf's step for the bias correction; infinity disables the correction."""
    steps = [leaf.state["step"] for leaf in batch.leaves]
    if batch.group["bias_correction"]:
        return steps
    return [torch.full_like(steps[0], math.inf)] * len(steps)


def _step_adamw(batch: Batch, flats: list[list[Tensor]]) -> None:
    """With a ratio of 1, LAMB is AdamW."""
    group = batch.group
    lr = group["lr"]
    if isinstance(lr, Tensor):  # on a device torch's kernel reads a float there
        lr = lr.float() if is_accelerator(batch.device) else lr.item()
    options = {**_fused_options(group), "lr": lr, "weight_decay": group["weight_decay"]}
    weights, gradients, exp_avgs, exp_avg_sqs = flats
    torch._fused_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, [], _steps(batch), **options)


def _directions(batch: Batch, flats: list[list[Tensor]]) -> list[Tensor]:
    """The directions of whole layers. [Note: directions from fused Adam]"""
    weights, gradients, exp_avgs, exp_avg_sqs = flats
    directions = list(torch._foreach_mul(weights, batch.group["weight_decay"]))
    options, steps = _fused_options(batch.group), _steps(batch)
    torch._fused_adam_(directions, gradients, exp_avgs, exp_avg_sqs, [], steps, **options)
    return directions
