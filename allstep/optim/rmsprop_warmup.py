"""RMSprop warm-up: a smooth transition from RMSprop to momentum SGD."""

from typing import Any

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.optim.leaves import Batch, Leaf, batches
from allstep.optim.optimizer import LargeBatchOptimizer, Nonfinite
from allstep.optim.schedules import sgd_share
from allstep.torch_classes import local_part


class RMSpropWarmup(LargeBatchOptimizer):
    """An optimizer that starts as RMSprop and ends as momentum SGD.

    m = alpha * m + (1 - alpha) * g**2, where g = gradient + weight_decay * x
    delta = momentum * delta - (a_sgd + a_rms / (sqrt(m) + eps)) * g
    x = x + lr * delta

    `a_sgd` is `sgd_share(step, center_steps, period_steps)`, which grows from almost 0 to 1, and
    `a_rms = (1 - a_sgd) * rmsprop_lr / lr`. The paper's settings are 10 epochs for
    `center_steps` and 5 for `period_steps`.

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        lr: learning rate of the SGD part; above 0 until the transition is over.
        center_steps: the step at which both parts have half their weight.
        period_steps: the length of the transition; it ends half of it after the center.
        momentum: of both parts together (mu_1).
        alpha: decay of the mean square (mu_2).
        eps: added to its root.
        rmsprop_lr: learning rate of the RMSprop part.
        weight_decay: added to the gradient, times the weights.
        maximize: go up the gradient.
        fused: use torch's multi-tensor kernels. With False every parameter is computed by itself.
        nonfinite: what a gradient that is not finite does: "raise", "skip" or "propagate".

    Raises:
        UsageError: if an option is out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = RMSpropWarmup([weight], lr=0.1, center_steps=0, period_steps=2)
    >>> weight.grad = torch.tensor([1.0])
    >>> optimizer.step()  # half of 0.1 and half of 3e-4 / sqrt(0.01)
    >>> round(weight.item(), 5)
    0.9485

    Source: Akiba et al., 2017, arXiv:1711.04325, section 2. `sgd_share` has the slope that makes
    the transition continuous; the printed one does not.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        center_steps: float,
        period_steps: float,
        momentum: float = 0.9,
        alpha: float = 0.99,
        eps: float = 1e-8,
        rmsprop_lr: float = 3e-4,
        weight_decay: float = 0.0,
        maximize: bool = False,
        fused: bool = True,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "alpha": alpha,
                "eps": eps,
                "rmsprop_lr": rmsprop_lr,
                "weight_decay": weight_decay,
                "center_steps": center_steps,
                "period_steps": period_steps,
                "num_steps": 0,
                "maximize": maximize,
                "capturable": False,
            },
            nonfinite=nonfinite,
            fused=fused,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, which is as far in the transition as the first one is.

        Raises:
            UsageError: if the group is empty, overlaps another or has a bad option.
        """
        if self.param_groups and isinstance(param_group, dict):
            param_group = {"num_steps": self.param_groups[0]["num_steps"], **param_group}
        super().add_param_group(param_group)

    def _slots(self) -> tuple[str, ...]:
        return ("square_avg", "delta")

    def _update(self, leaves: list[Leaf]) -> None:
        if not self._tolerates(leaves, self._bad_gradients(leaves)):
            return
        shares = {id(group): _shares(group, leaves) for group in self.param_groups}
        self._count(leaves)
        for batch in batches(leaves, self.batch_elements):
            flats = batch.flats(*self._slots()) if self._options["fused"] else None
            if flats is None:
                for leaf in batch.leaves:
                    _move_plain(leaf, *shares[id(batch.group)])
            else:
                _move_foreach(batch, flats, *shares[id(batch.group)])
        for group in self.param_groups:
            group["num_steps"] += 1


Share = float | Tensor


def _shares(group: dict[str, Any], leaves: list[Leaf]) -> tuple[float, Share]:
    """The coefficients (a_sgd, a_rms) of a group's next step."""
    a_sgd = sgd_share(group["num_steps"], group["center_steps"], group["period_steps"])
    lr = _rate(group)
    if a_sgd == 1.0:
        return 1.0, 0.0
    # A rate on a GPU is the user's to keep positive: to look would stop the GPU.
    if not (isinstance(lr, Tensor) and is_accelerator(lr.device)) and lr == 0:
        # torch's distributed checkpoints make the state by a step without rate and gradients.
        if not any(leaf.gradient.any() for leaf in leaves if leaf.group is group):
            return a_sgd, 0.0
        raise UsageError(
            "`lr` (=0.0) must be positive during the transition from RMSprop: its part is"
            " relative to it. This warm-up replaces one that starts at 0."
        )
    return a_sgd, (1 - a_sgd) * group["rmsprop_lr"] / lr


def _rate(group: dict[str, Any]) -> float | Tensor:
    """A group's rate; a tensor's value as a scalar tensor."""
    lr: float | Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def _move_plain(leaf: Leaf, a_sgd: float, a_rms: Share) -> None:
    group, weight = leaf.group, leaf.weight
    square_avg, delta = local_part(leaf.state["square_avg"]), local_part(leaf.state["delta"])
    gradient = leaf.descent() + group["weight_decay"] * weight
    alpha = group["alpha"]
    square_avg.copy_(alpha * square_avg + (1 - alpha) * gradient.square())
    coefficient = a_sgd + a_rms / (square_avg.sqrt() + group["eps"])
    delta.copy_(group["momentum"] * delta - coefficient * gradient)
    weight.add_(_rate(group) * delta)


def _move_foreach(batch: Batch, flats: list[list[Tensor]], a_sgd: float, a_rms: Share) -> None:
    group = batch.group
    weights, gradients, square_avgs, deltas = flats
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    if group["weight_decay"]:
        gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
    torch._foreach_mul_(square_avgs, group["alpha"])
    torch._foreach_addcmul_(square_avgs, gradients, gradients, value=1 - group["alpha"])
    torch._foreach_mul_(deltas, group["momentum"])
    torch._foreach_add_(deltas, gradients, alpha=-a_sgd)
    if a_sgd < 1:
        parts = list(torch._foreach_sqrt(square_avgs))
        torch._foreach_add_(parts, group["eps"])
        torch._foreach_reciprocal_(parts)
        torch._foreach_mul_(parts, gradients)
        torch._foreach_mul_(parts, a_rms)
        torch._foreach_sub_(deltas, parts)
    torch._foreach_add_(weights, torch._foreach_mul(deltas, _rate(group)))
