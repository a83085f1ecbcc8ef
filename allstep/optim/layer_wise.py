"""Layer-wise adaptation: a ratio of norms scales each layer's base update.

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
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from allstep.device import is_accelerator, tensor_on
from allstep.errors import UsageError, check_choice
from allstep.optim import momentum_correction
from allstep.optim.checks import Norm
from allstep.optim.leaves import Batch, Leaf, batches, reduce_over_shards
from allstep.optim.optimizer import LargeBatchOptimizer, Nonfinite
from allstep.optim.rules import Rule, SGDRule
from allstep.optim.trust import TrustRatio, norms_of, power_sums, trust_ratio
from allstep.torch_classes import local_part

RatioOn = Literal["update", "gradient"]


class TrustRatioOptimizer(LargeBatchOptimizer):
    """The base class of `LayerWise`, `LARS` and `LAMB`: the plain computation, layer by layer.

    Subclasses say which base update a group has, and may override the steps
    `_measure`, `_measure_gradients` and `_move_by_gradients` with faster ones.

    Args:
        params: as the subclass's.
        defaults: the subclass's own options of a group.
        ratio_on: what the ratio scales, "update" or "gradient".
        trust_ratio: how the ratio is formed.
        nonfinite: as the subclass's.
        options: what is one for all groups.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        ratio_on: RatioOn,
        trust_ratio: TrustRatio | None,
        nonfinite: Nonfinite,
        **options: Any,
    ) -> None:
        trust_ratio = TrustRatio() if trust_ratio is None else trust_ratio
        if not isinstance(trust_ratio, TrustRatio):
            raise UsageError(
                f"`trust_ratio` (={trust_ratio!r}) must be a `TrustRatio`, such as"
                " `TrustRatio(clip=10.0)`."
            )
        self._ratios: list[tuple[list[str], Tensor]] = []
        own = {
            **trust_ratio.group_options(),
            "momentum_correction": False,
            **defaults,
            "adapt": True,
            "previous_lr": None,
            "ratio_on": ratio_on,
        }
        options |= {"trust_norm": trust_ratio.norm, "ratio_on": ratio_on}
        super().__init__(params, own, nonfinite=nonfinite, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own.

        Raises:
            UsageError: if the group is empty, overlaps another or has a bad option.
        """
        if isinstance(param_group, dict) and isinstance(param_group.get("trust_ratio"), TrustRatio):
            # Plain values, so that a state dict holds nothing else.
            param_group = {**param_group, **param_group["trust_ratio"].group_options()}
            del param_group["trust_ratio"]
        super().add_param_group(param_group)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if "trust_ratio" in group:
            raise UsageError(
                f"`trust_ratio` (={group['trust_ratio']!r}) of a group must be a `TrustRatio`."
            )
        if group["momentum_correction"] and not self._on_gradient:
            raise UsageError(
                "`momentum_correction` (=True) needs the ratio on the gradient; on the update,"
                " the momentum holds no rate that could be corrected."
            )

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """The base update of a group."""

    def trust_ratios(self) -> dict[str, float]:
        """Parameter name -> its ratio in the last step, for the layers that are adapted.

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
        return leaf.is_sharded or (not is_accelerator(leaf.weight.device) and adapts(leaf.group))

    # --- the strategy ---------------------------------------------------------------------------

    def _update(self, leaves: list[Leaf]) -> None:
        self._ratios = []
        if not self._tolerates(leaves, self._bad_gradients(leaves)):
            return
        if not self._on_gradient:
            self._count(leaves)
        for stage in self._stages(leaves):
            self._update_stage(stage)
        for group in self.param_groups:
            momentum_correction.end_step(group, self.state)

    def _update_stage(self, stage: list[Batch]) -> None:
        """Measures batches, sums their norms over workers, and updates the batches."""
        measure, move = self._measure, self._move
        if self._on_gradient:
            measure, move = self._measure_gradients, self._move_by_gradients
        leaves = [leaf for batch in stage for leaf in batch.leaves]
        sums = _joined([measure(batch) for batch in stage])
        self._add_up_exactly(sums, stage, leaves)
        reduce_over_shards(sums, leaves, "max" if self._norm == "linf" else "sum")
        if self.nonfinite == "raise" and any(map(self._shows_later, leaves)):
            self._tolerates(leaves, [not math.isfinite(x) for x in sums[1].tolist()])
        if self._on_gradient:
            self._count(leaves)  # nothing has moved yet, and all are here
        for run, part in _runs(stage, sums):
            scales = self._scales(run, part)
            sizes = [len(batch.leaves) for batch in run]
            for batch, scales_of_batch in zip(run, scales.split_with_sizes(sizes), strict=True):
                move(batch, scales_of_batch)

    def _add_up_exactly(self, sums: Tensor, stage: list[Batch], leaves: list[Leaf]) -> None:
        """Replaces sums of FSDP2's shards by exact ones, which do not depend on the cuts."""
        chosen = [index for index, leaf in enumerate(leaves) if leaf.exact_squares is not None]
        adder = leaves[chosen[0]].exact_squares if chosen else None
        if adder is None or self._norm == "linf":
            return
        if self._norm == "l1":
            raise UsageError(
                "`trust_ratio.norm` (='l1') depends on where a parameter was cut, and exact sums of"
                " a model that FSDP2 has sharded promise that nothing does: take 'l2'."
            )
        weights = [leaf.weight for leaf in leaves]
        if self._on_gradient:
            updates = [leaf.gradient.to(leaf.weight.dtype) for leaf in leaves]
        else:
            updates = [direction for batch in stage for direction in batch.directions]
        parts = [x[index] for x in (weights, updates) for index in chosen]
        parameters = 2 * [leaves[index].parameter for index in chosen]
        exact = adder.sums_of_squares(parameters, parts).view(2, -1)
        sums[:, tensor_on(sums.device, chosen)] = exact.to(sums)

    def _stages(self, leaves: list[Leaf]) -> Iterator[list[Batch]]:
        """Lists of batches that are all measured before one is updated. [Note: two phases]"""
        whole = batches([leaf for leaf in leaves if not leaf.is_sharded], self.batch_elements)
        sharded = list(batches([leaf for leaf in leaves if leaf.is_sharded], self.batch_elements))
        if self._on_gradient:
            yield [*whole, *sharded]
            return
        for batch in whole:
            yield [batch]
        if sharded:
            yield sharded

    @property
    def _on_gradient(self) -> bool:
        return bool(self._options["ratio_on"] == "gradient")

    def _scales(self, run: list[Batch], sums: Tensor) -> Tensor:
        """Each leaf's learning rate times its ratio, from the `sums` of weights and updates."""
        group = run[0].group
        if not adapts(group):
            ratios = torch.ones_like(sums[0])
        else:
            decay = group["weight_decay"] if self._on_gradient else 0.0
            weight_norms, update_norms = norms_of(sums, self._norm)
            ratios = trust_ratio(weight_norms, update_norms, group, decay)
            self._ratios.append(([leaf.name for batch in run for leaf in batch.leaves], ratios))
        scales: Tensor = ratios * group["lr"]
        # An update that is nearly nothing has a ratio beyond the weights' range of numbers.
        return scales.clamp_(max=torch.finfo(run[0].dtype).max)

    @property
    def _norm(self) -> Norm:
        norm: Norm = self._options["trust_norm"]
        return norm

    def _move(self, batch: Batch, scales: Tensor) -> None:
        if not batch.directions:
            return
        if is_accelerator(batch.device):
            # A scale on the device has another shape than its layer: no multi-tensor kernel takes
            # both, so that each layer has a kernel of its own.
            factors = list(scales.to(batch.dtype))
            torch._foreach_addcmul_(batch.weights, batch.directions, factors, value=-1)
            return
        for weight, direction, scale in zip(
            batch.weights, batch.directions, scales.tolist(), strict=True
        ):
            weight.add_(direction, alpha=-scale)

    # --- the plain computation ------------------------------------------------------------------

    def _measure(self, batch: Batch) -> Tensor:
        """Updates the states and sets the directions; returns the sums of weights and directions.

        A faster way may move the weights of a group that does not adapt at once.
        """
        rule, group = self._rule(batch.group), batch.group
        for leaf in batch.leaves:
            gradient = leaf.descent()
            if not rule.decoupled:
                gradient = gradient + group["weight_decay"] * leaf.weight
            direction = _advance(rule, leaf, gradient)
            if rule.decoupled:
                direction = direction + group["weight_decay"] * leaf.weight
            batch.directions.append(direction)
        return self._sums(batch, batch.directions)

    def _measure_gradients(self, batch: Batch) -> Tensor:
        """The sums of weights and gradients; zeros if nothing needs them."""
        if not adapts(batch.group) and not batch.leaves[0].is_sharded:
            return batch.leaves[0].weight.new_zeros((2, len(batch.leaves)), dtype=torch.float64)
        return self._sums(batch, [leaf.gradient.to(leaf.weight.dtype) for leaf in batch.leaves])

    def _move_by_gradients(self, batch: Batch, scales: Tensor) -> None:
        rule, group = self._rule(batch.group), batch.group
        for leaf, scale in zip(batch.leaves, scales, strict=True):
            gradient = leaf.descent() + self._coupled_decay(group) * leaf.weight
            local_part(leaf.state["momentum_buffer"]).mul_(momentum_correction.factor(group))
            leaf.weight.sub_(_advance(rule, leaf, scale.to(gradient.dtype) * gradient))

    def _coupled_decay(self, group: dict[str, Any]) -> float:
        decay: float = group["weight_decay"]
        return decay

    def _sums(self, batch: Batch, updates: list[Tensor]) -> Tensor:
        """[2, leaves]: the power sums of weights and updates, from which norms are computed."""
        return torch.stack([power_sums(batch.weights, self._norm), power_sums(updates, self._norm)])


def adapts(group: dict[str, Any]) -> bool:
    """Whether a group's ratios are computed from norms; they are 1 otherwise."""
    return bool(group["adapt"] and (group["trust_always_adapt"] or group["weight_decay"] != 0))


def _advance(rule: Rule, leaf: Leaf, gradient: Tensor) -> Tensor:
    """The rule's direction; also updates the leaf's state."""
    state = {slot: local_part(leaf.state[slot]) for slot in rule.slots}
    direction, new = rule.direction(gradient, state, leaf.state["step"])
    for slot, value in new.items():
        state[slot].copy_(value)
    return direction


def _joined(sums: list[Tensor]) -> Tensor:
    """The sums of all batches on one device."""
    return sums[0] if len(sums) == 1 else torch.cat([x.to(sums[0].device) for x in sums], dim=1)


def _runs(stage: list[Batch], sums: Tensor) -> Iterator[tuple[list[Batch], Tensor]]:
    """Runs of consecutive batches of one group, dtype and device, with their sums on it."""
    begin = 0
    for _, run in groupby(stage, lambda batch: (id(batch.group), batch.device, batch.dtype)):
        batches_of_run = list(run)
        end = begin + sum(len(batch.leaves) for batch in batches_of_run)
        yield batches_of_run, sums[:, begin:end].to(batches_of_run[0].device)
        begin = end


class LayerWise(TrustRatioOptimizer):
    """A base update whose learning rate is adapted layer by layer.

    With `ratio_on="update"`, for every parameter x (Algorithm 2 of the LAMB paper, where
    the base is Adam):

        u = base(gradient) + weight_decay * x
        x = x - lr * ratio * u,    ratio = norm(x) / norm(u) as `TrustRatio` has it

    With `ratio_on="gradient"` the ratio enters before the base's momentum (LARS of 2017):

        ratio = trust_ratio.coefficient * norm(x) / (norm(gradient) + weight_decay * norm(x))
        x = x - base(lr * ratio * (gradient + weight_decay * x))

    A group may have its own value of any option from `lr` to `momentum_correction`, and
    `adapt=False` to have its ratio fixed at 1; `allstep.optim.groups` makes such groups. It keeps
    the fields of its `trust_ratio` as plain `trust_...` values, and `momentum` or `betas` of its
    base, which schedules may move (torch's `OneCycleLR` does).

    Args:
        params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
        base: the base update: `Adam()`, `SGDRule(momentum=0.9)`, or a `Rule` of your own.
        lr: learning rate, a number or a tensor.
        weight_decay: joins the direction or the gradient, as the base says (`decoupled`).
        trust_ratio: how the ratio is formed.
        momentum_correction: multiply the momentum by lr / previous lr when the rate changes; for
            `ratio_on="gradient"`, where the momentum holds the rate.
        ratio_on: what the ratio scales, "update" or "gradient"; the latter needs `SGDRule`.
        maximize: go up the gradient.
        capturable: the step may be captured in a CUDA graph.
        nonfinite: what a gradient that is not finite does: "raise", "skip" or "propagate".

    Raises:
        UsageError: if an option is out of range or does not fit the others.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LayerWise([weight], SGDRule(), lr=0.1)
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
        trust_ratio: TrustRatio | None = None,
        momentum_correction: bool = False,
        ratio_on: RatioOn = "update",
        maximize: bool = False,
        capturable: bool = False,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        parts = ("slots", "decoupled", "direction")
        if isinstance(base, type) or not all(hasattr(base, name) for name in parts):
            raise UsageError(
                f"`base` (={base!r}) must be a base update, such as `Adam()` or"
                " `SGDRule(momentum=0.9)`."
            )
        check_choice("ratio_on", ratio_on, get_args(RatioOn))
        if ratio_on == "gradient" and not isinstance(base, SGDRule):
            raise UsageError(
                f"`base` (={base}) must be `SGDRule` when the ratio is on the gradient; other"
                " bases undo a scaling of the gradient."
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum_correction": momentum_correction,
                "maximize": maximize,
                "capturable": capturable,
                **_moments(base),
            },
            ratio_on=ratio_on,
            trust_ratio=trust_ratio,
            nonfinite=nonfinite,
            base=base,
        )

    def _slots(self) -> tuple[str, ...]:
        base: Rule = self._options["base"]
        return base.slots

    def _rule(self, group: dict[str, Any]) -> Rule:
        base: Any = self._options["base"]
        moments = _moments(base)
        now = {name: group[name] for name in moments}
        rule: Rule = base if now == moments else replace(base, **now)
        return rule


def _moments(base: Any) -> dict[str, Any]:
    """The options of a base update that schedules change."""
    names = {each.name for each in fields(base)} if is_dataclass(base) else set()
    return {name: getattr(base, name) for name in ("momentum", "betas") if name in names}
