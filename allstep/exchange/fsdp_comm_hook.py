"""Wire formats and staleness for the replicas of a model that FSDP2 has sharded."""

from functools import partial

import torch
from torch import Tensor, nn

from allstep.comm import Communicator, fsdp_modules
from allstep.device import lend_to_current_stream
from allstep.errors import UsageError, check_type
from allstep.exchange.comm_hook import CommHook, after_engine, check_policy
from allstep.exchange.fully_sharded_checks import check_replicas
from allstep.exchange.layout import BucketLayout
from allstep.exchange.policy import ExchangePolicy, Stale, Synchronous
from allstep.exchange.reducer import Bucket
from allstep.exchange.same_gradients import SameGradients, other_gradients_message
from allstep.exchange.wires import PowerSGD
from allstep.exchange.wires.error_feedback import keeps_unsent
from allstep.torch_classes import local_part


def fsdp_hook(
    model: nn.Module, comm: Communicator, policy: Synchronous | Stale | None = None
) -> "FSDPCommHook":
    """Exchanges the gradients of a sharded model with its replicas. Collective.

    FSDP2 shards inside a node, over the fast link, and reduces the gradients there; between
    nodes the hook exchanges them with the workers that hold the same shard. Parameters and buffers
    get the values of the first replica.

    Args:
        model: sharded by `fully_shard`, its modules included, only over the "shard" dimension of a
            mesh.
        comm: the workers with the same shard: `allstep.init(process_group=mesh["replicate"])`.
        policy: its compression, staleness, reduction and algorithm are used.

    Returns:
        The hook, already registered.

    Raises:
        UsageError: if `model` isn't sharded, or some trained parameters aren't, if `policy` is
            local SGD, if an argument is of a wrong type, or if the compression needs matrices.
        DisagreementError: if workers have different policies or shards.

    Example:
        >>> def distribute(model, mesh):  # a mesh with dimensions "replicate" and "shard"
        ...     for block in model.blocks:
        ...         torch.distributed.fsdp.fully_shard(block, mesh=mesh["shard"])
        ...     torch.distributed.fsdp.fully_shard(model, mesh=mesh["shard"])
        ...     replicas = allstep.init(process_group=mesh["replicate"])
        ...     return fsdp_hook(model, replicas, allstep.Synchronous(compression="int8"))
    """
    checked = check_policy(policy)
    check_type("model", model, nn.Module, "that which `fully_shard` was called on")
    cure = 'that of `allstep.init(process_group=mesh["replicate"])`'
    check_type("comm", comm, Communicator, cure)
    units = fsdp_modules(model)
    if not units:
        raise UsageError(
            f"`model` is a {type(model).__name__} that FSDP2 has not sharded; call"
            " `torch.distributed.fsdp.fully_shard` on it first."
        )
    if isinstance(checked.wire_format, PowerSGD):
        raise UsageError(
            "`compression` (='powersgd') needs matrices, and FSDP2 hands over flat shards; use"
            ' "int8".'
        )
    check_replicas(model, comm)
    hook = FSDPCommHook(model, comm, checked)
    for name, unit in units.items():
        unit.set_all_reduce_hook(partial(hook.reduce_, name))
    return hook


class FSDPCommHook(CommHook):
    """Exchanges the gradients that FSDP2 has reduced over its shards; made by `fsdp_hook`.

    With staleness the first steps leave `p.grad` None, and the gradients of the last steps are
    not used.

    Args:
        model: a model with FSDP2's modules.
        comm: the workers with the same shard.
        policy: how to exchange.
    """

    def __init__(self, model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
        super().__init__(policy)
        self._model = model
        self._meet(comm)
        keeps = policy.staleness > 0 or keeps_unsent(policy.wire_format)
        self._same = SameGradients(model, policy) if keeps else None
        self._is_clearing = False
        with torch.no_grad():
            whole = (*model.parameters(), *model.buffers())
            tensors = tuple(local_part(tensor).detach() for tensor in whole)
            if tensors and comm.size > 1:
                comm.broadcast(tensors, root=0)

    @torch.no_grad()
    def reduce_(self, name: str, flat: Tensor) -> None:
        """Called by FSDP2 when a module's gradients have been reduced over its shards.

        Args:
            name: the module's name.
            flat: the gradients of this worker's shard; replaced by their sum over the replicas.

        Raises:
            UsageError: with staleness or error feedback, if other parameters than before have a
                gradient.
        """
        if self._same is not None:
            self._same.begin(name, flat)
        # FSDP2 may drop it behind this, and give its memory to what another stream reduces next.
        lend_to_current_stream(flat)
        layout = _layout(f"{name or 'model'} (a module of FSDP2)", flat)
        reducer = self._reducer
        assert reducer is not None
        scale = self._scale(reducer.comm)
        if not self._policy.staleness:
            flat.mul_(scale)
            reducer.start(Bucket(layout, flat)).wait()
            return
        own = flat * scale
        steps = self._steps_of(name)
        steps.push({name: own}, [reducer.start(Bucket(layout, own))])
        due = steps.pop_due()
        if due is None:
            self._clear_after_backward()
        elif due[name].shape != flat.shape:  # of a checkpoint
            raise UsageError(other_gradients_message(name, self._policy))
        else:
            flat.copy_(due[name])

    def _clear_after_backward(self) -> None:
        """FSDP2 sets `p.grad` when the hook returns, and ends its work in a queued callback."""
        if not self._is_clearing:
            self._is_clearing = True
            after_engine(self._clear_gradients)

    def _clear_gradients(self) -> None:
        self._is_clearing = False
        for p in self._model.parameters():
            p.grad = None


def _layout(name: str, flat: Tensor) -> BucketLayout:
    """The layout of a shard as one vector; only FSDP2 knows the parameters' places in it."""
    return BucketLayout((name,), (tuple(flat.shape),), ((1,),), flat.dtype, flat.device)
