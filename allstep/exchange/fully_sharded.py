"""Models that FSDP2 shards over the workers that they are attached to."""

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from allstep.comm import (
    Communicator,
    StageModules,
    divided_prefixes,
    fsdp_modules,
)
from allstep.comm.agreement import Details
from allstep.errors import UsageError
from allstep.exchange.agreement import CURE, agree
from allstep.exchange.carry_over import HeldGradients
from allstep.exchange.exact_shards import ExactShards
from allstep.exchange.exact_sums import ExactSums, OffGrid
from allstep.exchange.fully_sharded_use import PartsInUse
from allstep.exchange.hooks import AccumulationHook, ModuleHook, Removable, WeakHook, nothing
from allstep.exchange.parameters import left_out_of_shards
from allstep.exchange.plain import PlainExchange
from allstep.exchange.policy import ExchangePolicy, ExchangeStats, Synchronous
from allstep.torch_classes import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class _Call:
    """How the model was called, to call it so again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_gradients: bool


class CollectivePasses:
    """Passes through a model that FSDP2 has sharded.

    [Note: fully sharded models] Each worker keeps a shard of every parameter; FSDP2 gathers them
    for each pass and sums gradients by itself, so that as soon as backward has returned

        grad = scale * sum_r grad_r

    of the shard, with the scale of every other gradient: 1 for a global batch. The exchange has
    no gradients left to send. Every pass through the model is collective: a worker with fewer
    micro-batches than another ends with passes of zero loss, which call the model as its last
    micro-batch did. Experts that FSDP2 leaves to their workers run for the others' tokens in them,
    in the same order as in any pass.

    [Note: casts of shards] A parameter that autocast has cast in an earlier micro-batch, and kept,
    would get its gradient after FSDP2 has sent those of this one: backward passes go from new nodes
    to old ones. So what autocast keeps is dropped before each micro-batch.

    Args:
        model: sharded by `fully_shard`.
        comm: the workers.
        exact: rounds gradients, for exact sums. [Note: exact shards]

    Attributes:
        parts: what the passes use of the model.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, exact: ExactShards | None = None
    ) -> None:
        self._model = model
        self._comm = comm
        self._exact = exact
        self._modules = list(fsdp_modules(model).values())
        rounded = None if exact is None else WeakHook(exact, ExactShards.round)
        self.parts = PartsInUse(model, rounded)
        self.reshard()
        # Of the last micro-batch, without gradients and with them.
        self._calls_by_mode: tuple[list[_Call], list[_Call]] = [], []
        self._calls = self._calls_by_mode[True]
        self._num_missing = 0  # passes that others have more in this batch
        self._is_noting = False  # calls, which a micro-batch makes
        for module in self._modules:  # Gloo and other backends may have no other reduction
            module.set_force_sum_reduction_for_comms(True)
        register = partial(model.register_forward_pre_hook, with_kwargs=True)
        self._hook = ModuleHook(model, register, WeakHook(self, type(self)._note_call))
        if exact is not None:
            for module, members in zip(self._modules, self.parts.members.values(), strict=True):
                names = [prefix + own for prefix, each in members for own in each._parameters]
                module.set_all_reduce_hook(WeakHook(exact, ExactShards.add_up_early, names))

    def detach(self) -> None:
        """Leaves the model to FSDP2."""
        self._hook.remove()
        self.parts.detach()
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(False)
            module.set_gradient_divide_factor(float(self._comm.size))
            if self._exact is not None:
                module.set_all_reduce_hook(nothing)

    def reshard(self) -> None:
        """Frees what a pass without gradients has gathered: parameters are shards again."""
        for module in self._modules:
            module.reshard()

    def set_scale(self, scale: float) -> None:
        """Of the sums that FSDP2 makes from now on."""
        for module in self._modules:
            module.set_gradient_divide_factor(1 / scale)

    def begin_batch(self, num_passes: int) -> None:
        """A global batch begins, or an evaluation, without gradients. Collective.

        All wait for it, so that a worker that was lost between two steps has a name: what FSDP2
        sends without us ends with the backend's words.

        Args:
            num_passes: that this worker is about to make, one for each micro-batch as a rule.

        Raises:
            UsageError: on all workers, if one has none, and has not run any yet.
        """
        self._calls = self._calls_by_mode[torch.is_grad_enabled()]
        is_stuck = num_passes == 0 and not self._calls
        told = torch.tensor([num_passes, is_stuck], device=self._comm.device)
        most, is_any_stuck = self._comm.all_reduce(told, "max").tolist()
        if is_any_stuck and most:
            raise UsageError(
                "A worker has no micro-batch of the first global batch, or of the first evaluation,"
                " and FSDP2 wants all workers to call the model equally often: let the first have"
                f" at least {self._comm.size} micro-batches, one for each worker."
            )
        self._num_missing = most - num_passes
        self._is_noting = False
        self.parts.begin()

    def begin_micro_batch(self) -> None:
        """The calls that follow are another micro-batch's. [Note: casts of shards]"""
        torch.clear_autocast_cache()
        self._end_micro_batch()
        self._calls.clear()
        self._is_noting = True
        self._begin_pass()

    def _begin_pass(self) -> None:
        if self._exact is not None:
            self._exact.begin_micro_batch()

    def _end_micro_batch(self) -> None:
        if self._is_noting:
            self.parts.end_pass()
        self._is_noting = False

    def join_others(self) -> None:
        """Takes part in the passes of workers with more micro-batches. Collective."""
        self._end_micro_batch()
        for _ in range(self._num_missing):
            self._begin_pass()
            self._pass_with_zero_loss()
            self.parts.end_pass(is_counted=False)
        self._num_missing = 0
        if not torch.is_grad_enabled():
            self.reshard()

    def _pass_with_zero_loss(self) -> None:
        zeros: list[Tensor] = []
        for call in self._calls:
            with torch.set_grad_enabled(call.has_gradients and torch.is_grad_enabled()):
                args, kwargs = pytree.tree_map(_detached, (call.args, call.kwargs))
                outputs = pytree.tree_leaves(self._model(*args, **kwargs))
            tensors = (x for x in outputs if isinstance(x, Tensor) and x.requires_grad)
            zeros.extend(0 * x.sum() for x in tensors)
        if zeros:
            torch.autograd.backward(zeros)  # each by itself, as some may be DTensors

    def _note_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_noting:
            self._calls.append(_Call(args, kwargs, torch.is_grad_enabled()))


class FullyShardedExchange(PlainExchange):
    """Leaves the gradients to FSDP2. [Note: fully sharded models]"""

    def _begin(self) -> None:
        is_exact = self.policy.wire_format.name == "exact"
        self._exact = ExactShards(self.comm) if is_exact else None
        self._held = HeldGradients()
        self._passes = CollectivePasses(self.model, self.comm, self._exact)
        self._cure = f"{CURE} {self._passes.parts.cure}"
        super()._begin()
        self._set_scale()
        if self._exact is not None:
            for p in self._parameters.fully_sharded.values():
                p.exact_squares = self._exact  # type: ignore[attr-defined]

    @property
    def _exact_sums(self) -> ExactSums | None:
        return None if self._exact is None else self._exact.sums

    @property
    def _off_grid(self) -> OffGrid:
        return {} if self._exact is None else self._exact.off_grid

    @property
    def _is_active(self) -> bool:
        return super()._is_active or self.is_exact

    def stats(self) -> ExchangeStats:
        num_completed = 0 if self._exact is None else self._exact.sums.num_completed
        return replace(super().stats(), num_completed=num_completed)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._gather_exact_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._exact is not None:
            own = {**self._parameters.fully_sharded, **self._not_sharded}
            self._exact.sums.load_state_dict(state, own)

    @property
    def is_fully_sharded(self) -> bool:
        return True

    @property
    def workers_with_other_parts(self) -> list[Communicator]:
        others = super().workers_with_other_parts
        return others if self.comm in others or self.comm.size == 1 else [*others, self.comm]

    def local_gradients(self) -> dict[str, Tensor]:
        raise UsageError(
            "`local_gradients` was asked of a model that FSDP2 has sharded, which sums the workers'"
            " gradients before anybody sees one worker's."
        )

    def begin_batch(self, num_passes: int) -> None:
        self._passes.begin_batch(num_passes)

    def begin_micro_batch(self) -> None:
        self._passes.begin_micro_batch()

    def join_others(self) -> None:
        is_training, parts = self.batch.step is not None, self._passes.parts
        with self.statistics.micro_batch(0.0) if is_training else nullcontext(), self.no_sync():
            self._passes.join_others()
        if not is_training:
            agree(self.comm, "run a model that FSDP2 has sharded", parts.calls, cure=parts.cure)
        if not (is_training and self._is_active):  # else the exchange compares, and ends it
            parts.end({name for name, has in parts.has_gradient().items() if has})

    def detach(self) -> None:
        super().detach()
        self._passes.detach()
        for p in self._parameters.fully_sharded.values():
            vars(p).pop("exact_squares", None)

    def _begin_global_batch(self, num_micro_batches: int, num_passes: int) -> None:
        self._set_scale()
        if self._exact is not None:
            shards = self._parameters.fully_sharded
            parameters = {**shards, **self._not_sharded}
            ExactSums.refuse_complex({n: p for n, p in parameters.items() if p.requires_grad})
            self._held.take(parameters)
            self._exact.begin(shards, self.num_exchanges, num_micro_batches, num_passes)

    def _end_global_batch(self) -> None:
        self._set_scale()
        if self._exact is not None:
            self._exact.end()
        super()._end_global_batch()

    def _give_back(self) -> None:
        self._held.give_back()

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        if (failure := self._failure) is not None:
            self._failure = None
            self._stop_all(failure)
        return super()._reduce()

    @property
    def _calls(self) -> Details:
        return self._passes.parts.calls

    def _has_new_gradient(self) -> dict[str, bool]:
        return {**super()._has_new_gradient(), **self._passes.parts.has_gradient()}

    def _agree_on_gradients(self) -> tuple[set[str], Tensor | None]:
        with_gradient, divisor = super()._agree_on_gradients()
        self._passes.parts.end(with_gradient)
        return with_gradient, divisor

    @property
    def _not_sharded(self) -> dict[str, nn.Parameter]:
        """Experts' parameters, of which a lone worker has all."""
        return {**self._parameters.trained, **self.divided}

    def _hook(self, name: str, p: nn.Parameter) -> list[Removable]:
        handles = super()._hook(name, p)
        if self._exact is not None:
            rounded = WeakHook(self._exact, ExactShards.round, name, p)
            handles.append(AccumulationHook(p, rounded))
        return handles

    def _sum_others(self) -> None:
        if self._rounder is None or self._exact is None:
            super()._sum_others()
        else:
            self._exact.complete(self.num_exchanges)
            self._divided.sum_copies(self._off_grid)
            self._rounder.follow(self._off_grid, (), {}, self._not_sharded, self.num_exchanges)

    def _set_scale(self) -> None:
        self._passes.set_scale(self.batch.scale)


def check_fully_sharded(model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
    """Checks that FSDP2 makes the sums that an exchange of the model is to make. Collective.

    Raises:
        UsageError: names what is sharded otherwise, and the cure.
    """
    modules = fsdp_modules(model)
    stages = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, StageModules) and (module.can_be_sharded or module.comm.size > 1)
    }
    for name, members in stages.items():
        _check_stages(name, members, modules)
    if not modules:
        return
    if not stages and "" not in modules:
        raise UsageError(
            f"`model.{next(iter(modules))}` is sharded by FSDP2's `fully_shard` and `model` is not:"
            " call `fully_shard(model, mesh=...)` last, which takes the other parameters."
        )
    if not isinstance(policy, Synchronous) or policy.wire_format.name not in ("fp32", "exact"):
        raise UsageError(
            f"`policy` (={policy}) is for gradients that allstep exchanges, and FSDP2 sums those of"
            " a model that it has sharded: use `Synchronous()`; with a mesh whose nodes have"
            " copies, `allstep.fsdp_hook` brings formats and staleness between them."
        )
    for module in modules.values():
        module.reshard()
    own = divided_prefixes(model)
    modules_left_out = left_out_of_shards(model) if comm.size == 1 else []
    left_out = {p for module in modules_left_out for p in module.parameters()}
    parameters = {}
    for name, p in model.named_parameters():
        if name.startswith(own):
            _check_own(name, p)
            continue
        if p in left_out:
            continue
        parameters[name] = p
        if not is_dtensor(p):
            raise UsageError(
                f"`{name}` is not sharded by FSDP2, and other parameters are: leave it out of"
                " `ignored_params`."
            )
        mesh = p.device_mesh
        if mesh.ndim > 2 or (mesh.ndim == 2 and not p.placements[0].is_replicate()):
            raise UsageError(
                f"`{name}` is laid out by `parallelize_module` and sharded by FSDP2 ({mesh}):"
                " divide layers by `allstep.nn.tensor_parallel` before `fully_shard`, in its place."
            )
    ranks = comm.all_gather_object(dist.get_rank() if dist.is_initialized() else 0)
    for name, p in parameters.items():
        assert is_dtensor(p)
        _check_mesh(name, p.device_mesh, ranks)


def _check_stages(name: str, stages: StageModules, modules: "Mapping[str, FSDPModule]") -> None:
    """Either all or none of them may be sharded. Collective among the workers that have some."""
    whole = [f"{name}.{number}" for number in stages if f"{name}.{number}" not in modules]
    told = stages.comm.all_gather_object((whole, bool(modules)))
    if not any(is_sharded for _, is_sharded in told):
        return
    if not stages.can_be_sharded:
        raise UsageError(
            f"`model.{name}` is sharded by FSDP2's `fully_shard`, which wants all copies of a model"
            " to call it equally often; only a Pipeline sees to that: leave one of them out."
        )
    for other in itertools.chain.from_iterable(found for found, _ in told):
        raise UsageError(
            f"`model.{other}` is not sharded by FSDP2, and other parts of `model` are: call"
            f" `fully_shard(stage, mesh=...)` on each of `model.{name}.values()`."
        )


def _check_own(name: str, p: nn.Parameter) -> None:
    """Of a parameter that only this worker has; others have others in its place."""
    if is_dtensor(p):
        raise UsageError(
            f"`{name}` is of an expert that one worker has, and FSDP2 has sharded it over several:"
            " give each `fully_shard` the experts' parameters as `ignored_params`,"
            " `set(layer.experts.parameters())` of a `MixtureOfExperts`."
        )


def _check_mesh(name: str, mesh: "DeviceMesh", ranks: list[int]) -> None:
    """Of shards over one axis, or copied along a first one; `ranks` are those of the workers."""
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        raise UsageError(
            f"`{name}` is sharded over {mesh}, and `comm` is of the ranks {ranks}: pass"
            " `comm.mesh(data=comm.size).device_mesh()` as `mesh` to `fully_shard`, or that of"
            " `comm.mesh(replicate=..., shard=...)`; beside `tensor_parallel` attach to"
            " `comm.mesh(data=..., tensor=...)['data']` in both cases. For formats between copies"
            " there is `allstep.fsdp_hook`."
        )
    if mesh.ndim == 2 and mesh.size(1) == 1 < len(ranks):  # torch would divide a mean twice
        raise UsageError(
            f"`{name}` is copied over {mesh}, which has one worker along its last axis to shard"
            " over: leave `fully_shard` out, or give that axis several."
        )


def _detached(x: Any) -> Any:
    """The same for a call that is to have no past."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
