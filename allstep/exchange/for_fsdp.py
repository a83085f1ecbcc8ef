"""Wire formats and staleness between the replicas of a model that FSDP2 has sharded."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange.guest import GuestMeans, StaleGradients
from allstep.exchange.layout import BucketLayout
from allstep.exchange.policy import ExchangePolicy, Synchronous
from allstep.exchange.wires import PowerSGD

__all__ = ["FSDPHook", "fsdp_hook"]


def fsdp_hook(
    model: nn.Module, comm: Communicator, policy: ExchangePolicy | None = None
) -> "FSDPHook":
    """Exchanges the gradients of a sharded model with its replicas. Collective.

    FSDP2 shards inside a node, over the fast link, and reduces the gradients there; between
    nodes the hook takes the mean over those who hold the same shard. Parameters and buffers get
    the values of the first replica.

    Args:
        model: sharded by `fully_shard` over the "shard" dimension of a mesh alone, with its
            modules, as FSDP2 is used.
        comm: the workers with the same shard: `allstep.init(process_group=mesh["replicate"])`.
        policy: its wire format, staleness, reduction and algorithm are used.

    Returns:
        The hook, which is registered.

    Raises:
        UsageError: if `model` isn't sharded, or the wire format needs matrices.
        DisagreementError: if workers have different policies.

    Example:
        >>> def distribute(model, mesh):  # a mesh with dimensions "replicate" and "shard"
        ...     for block in model.blocks:
        ...         torch.distributed.fsdp.fully_shard(block, mesh=mesh["shard"])
        ...     torch.distributed.fsdp.fully_shard(model, mesh=mesh["shard"])
        ...     replicas = allstep.init(process_group=mesh["replicate"])
        ...     return fsdp_hook(model, replicas, allstep.Synchronous(compression="int8"))
    """
    policy = policy or Synchronous()
    units = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not units:
        raise UsageError(
            f"`model` is a {type(model).__name__} that FSDP2 has not sharded; call"
            " `torch.distributed.fsdp.fully_shard` on it first."
        )
    if isinstance(policy.wire_format, PowerSGD):
        raise UsageError(
            "`compression` (='powersgd') needs matrices, and FSDP2 hands over flat shards;"
            ' use "int8".'
        )
    hook = FSDPHook(model, comm, policy)
    for name, unit in units.items():
        unit.set_all_reduce_hook(partial(hook.reduce_, name))
    return hook


class FSDPHook:
    """Exchanges what FSDP2 has reduced over its shards; made by `fsdp_hook`.

    With staleness the first steps leave `p.grad` None, and the gradients of the last steps are
    not used.

    Args:
        model: a model with FSDP2's modules.
        comm: the workers with the same shard.
        policy: how to exchange.
    """

    def __init__(self, model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
        self._model = model
        self._means = GuestMeans(comm, policy)
        self._staleness = policy.staleness
        self._stale: dict[str, StaleGradients] = {}
        self._has_landed = True
        with torch.no_grad():
            tensors = tuple(_local(t) for t in _tensors(model))
            if tensors and comm.size > 1:
                comm.broadcast(tensors, root=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return self._means.sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """What the next means depend on, such as what this worker, unlike others, has not sent."""
        in_flight = {name: stale.state_dict() for name, stale in self._stale.items()}
        return {**self._means.state_dict(), "in_flight": in_flight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, by a worker of the same rank. Collective."""
        self._means.load_state_dict(state)
        for name, steps in state["in_flight"].items():
            self._stale[name] = StaleGradients(self._staleness)
            self._stale[name].load_state_dict(steps)

    @torch.no_grad()
    def reduce_(self, name: str, flat: Tensor) -> None:
        """What FSDP2 calls when a module's gradients have been reduced over its shards.

        Args:
            name: of the module.
            flat: the gradients of this worker's shard; becomes their mean over the replicas.

        Raises:
            UsageError: if other parameters than before had a gradient, with staleness.
        """
        layout = _layout(f"{name or 'model'} (a module of FSDP2)", flat)
        if not self._staleness:
            self._means.start(flat, layout).wait()
            return
        stale = self._stale.setdefault(name, StaleGradients(self._staleness))
        own = flat.clone()
        stale.add(self._means.start(own, layout), {name: own})
        landed = stale.end_step()
        if landed is None:
            self._clear_after_backward()
        elif landed[name].shape != flat.shape:
            raise UsageError(
                f"`staleness` (={self._staleness}): other parameters of `{name}` than before had"
                " a gradient; call `set_reduce_scatter_unused_params(True)` on the model."
            )
        else:
            flat.copy_(landed[name])

    def _clear_after_backward(self) -> None:
        """FSDP2 sets `p.grad` when the hook returns, and ends its work in a queued callback."""
        if self._has_landed:
            self._has_landed = False
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._clear_gradients))

    def _clear_gradients(self) -> None:
        self._has_landed = True
        for p in self._model.parameters():
            p.grad = None


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _layout(name: str, flat: Tensor) -> BucketLayout:
    """One vector: where parameters lie in a shard is FSDP2's affair."""
    return BucketLayout((name,), (tuple(flat.shape),), ((1,),), flat.dtype, flat.device)
