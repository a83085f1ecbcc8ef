"""The layer-wise strategy: how a ratio of norms scales a base update, layer by layer.

[Note: two phases] The ratio of a layer needs the norm of its whole update before any of it can
be applied. So a batch of layers is first measured (the state moves on, directions and norms come
out), then moved. Whole layers are measured and moved batch by batch, while the batch is in the
cache. Sharded layers are all measured first, so that one collective adds up all their norms.
With the ratio on the gradient, norms of weights and gradients are all that is measured; no memory
is needed in between, and all layers are measured first.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from allstep.errors import UsageError
from allstep.optim.leaves import Batch, Leaf, batches, local
from allstep.optim.optimizer import LargeBatchOptimizer, Nonfinite
from allstep.optim.rules import Rule
from allstep.optim.sharding import reduce_over_shards
from allstep.optim.trust import Norm, norms_of, power_sums, trust_ratio

__all__ = ["BATCH_ELEMENTS", "RatioOn", "TrustRatioOptimizer", "adapts", "signed_gradient"]

RatioOn = Literal["update", "gradient"]

# A batch and what is made of it should fit the cache; a larger layer is a batch of its own.
BATCH_ELEMENTS = 2**21


class TrustRatioOptimizer(LargeBatchOptimizer):
    """What `LayerWise`, `LARS` and `LAMB` share; the plain way, layer by layer.

    Subclasses say which base update a group has, and may override the steps
    `_measure`, `_measure_gradients` and `_move_by_gradients` with faster ones.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        norm: Norm,
        ratio_on: RatioOn,
        nonfinite: Nonfinite,
        **options: Any,
    ) -> None:
        if norm not in get_args(Norm):
            raise UsageError(f"`norm` (={norm!r}) must be one of {', '.join(get_args(Norm))}.")
        self._ratios: list[tuple[list[str], Tensor]] = []
        super().__init__(
            params,
            {
                "phi": (0.0, math.inf),
                "trust_coefficient": 1.0,
                "trust_eps": 0.0,
                "trust_clip": None,
                "always_adapt": True,
                "momentum_correction": False,
                **defaults,
                "adapt": True,
                "previous_lr": None,
                "norm": norm,  # the same for all groups; so that a state dict tells
                "ratio_on": ratio_on,
            },
            nonfinite=nonfinite,
            **options,
            norm=norm,
            ratio_on=ratio_on,
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if group["momentum_correction"] and not self._on_gradient:
            raise UsageError(
                "`momentum_correction` (=True) needs the ratio on the gradient; on the update,"
                " the momentum holds no rate that could be corrected."
            )

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """The base update of a group."""

    def trust_ratios(self) -> dict[str, float]:
        """The ratio of every layer that the last step has adapted, by the parameter's name.

        Parameters without a name are called by their place in `param_groups`.
        """
        return {
            name: ratio
            for names, ratios in self._ratios
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ratios = []

    def _shows_later(self, leaf: Leaf) -> bool:
        # Norms tell, for free; but whole ones on a GPU would stop it at every batch.
        return leaf.is_sharded or (leaf.weight.device.type == "cpu" and adapts(leaf.group))

    # --- the strategy ---------------------------------------------------------------------------

    def _update(self, leaves: list[Leaf]) -> None:
        self._ratios = []
        if not self._tolerates(leaves, self._bad_gradients(leaves)):
            return
        if not self._on_gradient:
            self._count(leaves)
        for stage in _stages(leaves, at_once=self._on_gradient):
            self._update_stage(stage)
        for group in self.param_groups:
            if group["momentum_correction"]:
                self._correct_idle(group)
                _remember_rate(group)

    def _update_stage(self, stage: list[Batch]) -> None:
        """Measures and moves batches, with their norms summed over workers in between."""
        measure, move = self._measure, self._move
        if self._on_gradient:
            measure, move = self._measure_gradients, self._move_by_gradients
        leaves = [leaf for batch in stage for leaf in batch.leaves]
        sums = _joined([measure(batch) for batch in stage])
        self._reduce(sums, leaves)
        if self.nonfinite == "raise" and any(map(self._shows_later, leaves)):
            self._tolerates(leaves, _not_finite(sums[1]))
        if self._on_gradient:
            self._count(leaves)  # nothing has moved yet, and all are here
        for run, part in _runs(stage, sums):
            scales = self._scales(run, part)
            sizes = [len(batch.leaves) for batch in run]
            for batch, scales_of_batch in zip(run, scales.split_with_sizes(sizes), strict=True):
                move(batch, scales_of_batch)

    @property
    def _on_gradient(self) -> bool:
        return bool(self._options["ratio_on"] == "gradient")

    def _reduce(self, sums: Tensor, leaves: list[Leaf]) -> None:
        reduce_over_shards(sums, leaves, "max" if self._norm == "linf" else "sum")

    def _scales(self, run: list[Batch], sums: Tensor) -> Tensor:
        """Learning rate times ratio, of every leaf; `sums` are of weights and updates."""
        group = run[0].group
        if not adapts(group):
            ratios = torch.ones_like(sums[0])
        else:
            ratios = trust_ratio(
                *norms_of(sums, self._norm),
                coefficient=group["trust_coefficient"],
                weight_decay=group["weight_decay"] if self._on_gradient else 0.0,
                phi=group["phi"],
                eps=group["trust_eps"],
                clip=group["trust_clip"],
            )
            self._ratios.append(([leaf.name for batch in run for leaf in batch.leaves], ratios))
        scales: Tensor = ratios * group["lr"]
        # An update that is nearly nothing has a ratio beyond the weights' range of numbers.
        return scales.clamp_(max=torch.finfo(run[0].dtype).max)

    @property
    def _norm(self) -> Norm:
        norm: Norm = self._options["norm"]
        return norm

    def _correction(self, group: dict[str, Any]) -> float | Tensor:
        """By how much the momentum is rescaled because the rate has changed."""
        previous, lr = group["previous_lr"], group["lr"]
        if not group["momentum_correction"] or previous is None:
            return 1.0
        if isinstance(previous, Tensor):
            return torch.where(previous > 0, lr / previous, 1.0).reshape(())
        # After a rate of 0 the corrected momentum is 0 and stays so.
        return lr / previous if previous else 1.0

    def _correct_idle(self, group: dict[str, Any]) -> None:
        """Corrects the momentum of parameters that had no gradient in this step."""
        correction = self._correction(group)
        if isinstance(correction, float) and correction == 1.0:
            return
        for parameter in group["params"]:
            state = self.state.get(parameter)
            if parameter.grad is None and state:
                local(state["momentum_buffer"]).mul_(correction)

    def _move(self, batch: Batch, scales: Tensor) -> None:
        if not batch.directions:
            return
        if batch.device.type != "cpu":
            steps = torch._foreach_mul(batch.directions, list(scales.to(batch.weights[0].dtype)))
            torch._foreach_sub_(batch.weights, list(steps))
            return
        for weight, direction, scale in zip(
            batch.weights, batch.directions, scales.tolist(), strict=True
        ):
            weight.add_(direction, alpha=-scale)

    # --- the plain way --------------------------------------------------------------------------

    def _measure(self, batch: Batch) -> Tensor:
        """Moves the state on and sets the directions; sums of weights and directions.

        A faster way may move the weights of a group that does not adapt at once.
        """
        rule, group = self._rule(batch.group), batch.group
        for leaf in batch.leaves:
            gradient = signed_gradient(leaf)
            if not rule.decoupled:
                gradient = gradient + group["weight_decay"] * leaf.weight
            direction = _advance(rule, leaf, gradient)
            if rule.decoupled:
                direction = direction + group["weight_decay"] * leaf.weight
            batch.directions.append(direction)
        return self._sums(batch, batch.directions)

    def _measure_gradients(self, batch: Batch) -> Tensor:
        """Sums of weights and gradients, where somebody wants to know them."""
        if not adapts(batch.group) and not batch.leaves[0].is_sharded:
            return batch.leaves[0].weight.new_zeros((2, len(batch.leaves)), dtype=torch.float64)
        return self._sums(batch, [leaf.gradient.to(leaf.weight.dtype) for leaf in batch.leaves])

    def _move_by_gradients(self, batch: Batch, scales: Tensor) -> None:
        rule, group = self._rule(batch.group), batch.group
        for leaf, scale in zip(batch.leaves, scales, strict=True):
            gradient = signed_gradient(leaf) + self._coupled_decay(group) * leaf.weight
            local(leaf.state["momentum_buffer"]).mul_(self._correction(group))
            leaf.weight.sub_(_advance(rule, leaf, scale.to(gradient.dtype) * gradient))

    def _coupled_decay(self, group: dict[str, Any]) -> float:
        decay: float = group["weight_decay"]
        return decay

    def _sums(self, batch: Batch, updates: list[Tensor]) -> Tensor:
        """Shape (2, leaves): what adds up to the norms of weights and updates."""
        return torch.stack([power_sums(batch.weights, self._norm), power_sums(updates, self._norm)])


def adapts(group: dict[str, Any]) -> bool:
    """Whether the ratios of a group are taken from norms; they are 1 otherwise."""
    return bool(group["adapt"] and (group["always_adapt"] or group["weight_decay"] != 0))


def signed_gradient(leaf: Leaf) -> Tensor:
    """The gradient to go down, in the weight's dtype."""
    gradient = leaf.gradient.to(leaf.weight.dtype)
    return -gradient if leaf.group["maximize"] else gradient


def _advance(rule: Rule, leaf: Leaf, gradient: Tensor) -> Tensor:
    """The rule's direction; the leaf's state moves on."""
    state = {slot: local(leaf.state[slot]) for slot in rule.slots}
    direction, new = rule.direction(gradient, state, leaf.state["step"])
    for slot, value in new.items():
        state[slot].copy_(value)
    return direction


def _remember_rate(group: dict[str, Any]) -> None:
    """In the same memory at every step: a CUDA graph looks where it was when it was captured."""
    lr, previous = group["lr"], group["previous_lr"]
    if isinstance(previous, Tensor):
        previous.copy_(lr)
    else:
        group["previous_lr"] = lr.clone() if isinstance(lr, Tensor) else lr


def _joined(sums: list[Tensor]) -> Tensor:
    """The sums of all batches on one device."""
    return sums[0] if len(sums) == 1 else torch.cat([x.to(sums[0].device) for x in sums], dim=1)


def _runs(stage: list[Batch], sums: Tensor) -> Iterator[tuple[list[Batch], Tensor]]:
    """Consecutive batches of one group, dtype and device, with their sums there."""
    begin = 0
    for _, run in groupby(stage, lambda batch: (id(batch.group), batch.device, batch.dtype)):
        batches_of_run = list(run)
        end = begin + sum(len(batch.leaves) for batch in batches_of_run)
        yield batches_of_run, sums[:, begin:end].to(batches_of_run[0].device)
        begin = end


def _not_finite(sums: Tensor) -> list[bool]:
    return [not math.isfinite(total) for total in sums.tolist()]


def _stages(leaves: list[Leaf], *, at_once: bool) -> Iterator[list[Batch]]:
    """Batches that need not wait for each other one by one, then all sharded ones together.

    All of them together if `at_once`.
    """
    whole = list(batches([leaf for leaf in leaves if not leaf.is_sharded], BATCH_ELEMENTS))
    sharded = list(batches([leaf for leaf in leaves if leaf.is_sharded], BATCH_ELEMENTS))
    if at_once:
        yield whole + sharded
        return
    for batch in whole:
        yield [batch]
    if sharded:
        yield sharded
