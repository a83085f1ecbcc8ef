"""`attach`: makes an exchange from a model, its workers and a policy."""

import logging

import torch
from torch import nn

from allstep.comm import Communicator, arrays_of, fsdp_modules
from allstep.comm.ddp import WITHOUT_DDP, find_ddp
from allstep.device import is_accelerator
from allstep.errors import UsageError, check_integer, check_type, named_part
from allstep.exchange.agreement import agree, check_same_policy
from allstep.exchange.attachable import check_module
from allstep.exchange.divided import check_divided
from allstep.exchange.exchange import Exchange, exchanges_of
from allstep.exchange.fully_sharded import FullyShardedExchange
from allstep.exchange.fully_sharded_checks import check_fully_sharded
from allstep.exchange.hooks import owners_of
from allstep.exchange.local_sgd_exchange import LocalSGDExchange
from allstep.exchange.optimizer_watch import watch
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.parameters import ParameterSet, signature
from allstep.exchange.part_gradients import begin_scale
from allstep.exchange.plain import PlainExchange
from allstep.exchange.policy import ExchangePolicy, LocalSGD, Synchronous


def attach(
    model: nn.Module,
    comm: Communicator,
    policy: ExchangePolicy | None = None,
    *,
    global_batch: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Exchange:
    """Makes a model's gradients the mean over the workers, from now on. Collective.

    Parameters and buffers get rank 0's values, in place. After each backward pass `p.grad` is

        grad = 1/size * sum_r grad_r

    The model, its state dict and the optimizer stay as they are; `Exchange.detach` undoes it.
    A copy of the model (`copy.deepcopy`, `torch.save`) is not attached and has no hooks of allstep.

    Args:
        model: the same on every worker; may be compiled.
        comm: the workers.
        policy: how to exchange; by default gradients are averaged in each step.
        global_batch: samples of one step over all workers; only for the log message.
        scaler: the GradScaler that losses are scaled with. Staleness, and formats with error
            feedback, need it because they add gradients of different steps. Its scale is then
            initialised at once, for a worker without a loss in its first step.
        optimizer: the optimizer of the model's parameters; only local SGD needs it.

    Returns:
        The exchange.

    Raises:
        UsageError: if `model` is not a module, if it is wrapped or scripted (DDP, FSDP1,
            `torch.jit`), if it or one of its parameters is attached already, if
            `comm` is not a Communicator, if `global_batch` isn't positive, if local SGD is not
            given its optimizer, or if a part of the model is divided over other workers than
            `comm`, divided at all with staleness or local SGD, or shares a parameter with the rest;
            if FSDP2 has sharded it over other workers, or with a policy other than
            `Synchronous()` and exact sums.
        DisagreementError: if policies, names, shapes or dtypes differ between workers.

    Example:
        >>> import torch, allstep
        >>> model = torch.nn.Linear(2, 1)
        >>> exchange = allstep.attach(model, allstep.Communicator.single_process())
        >>> model(torch.ones(3, 2)).mean().backward()  # p.grad is exchanged when it returns
        >>> exchange.detach()
    """
    check_type("model", model, nn.Module, "that whose gradients shall be exchanged")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    check_module(model)
    check_type("comm", comm, Communicator, "that of `allstep.init()`, or of an axis of a mesh")
    _check_device(model, comm)
    if scaler is not None:
        check_type("scaler", scaler, torch.amp.GradScaler, "the one that scales the losses")
    if optimizer is not None:
        check_type("optimizer", optimizer, torch.optim.Optimizer, "that of the model's parameters")
    if global_batch is not None:
        check_integer("global_batch", global_batch)
    policy = Synchronous() if policy is None else policy
    check_type("policy", policy, ExchangePolicy, '`allstep.Synchronous(compression="bf16")`, say')
    if comm.size > 1:
        check_same_policy(comm, _in_words(policy, scaler, optimizer, comm.device))
    if isinstance(policy, LocalSGD) and optimizer is None:
        raise UsageError(
            f"`optimizer` (=None) must be given for local SGD (`sync_every` is"
            f" {policy.sync_every}): attach(model, comm, policy, optimizer=optimizer)."
        )
    _refuse_attached(model)
    check_divided(model, comm, policy)
    check_fully_sharded(model, comm, policy)
    if comm.size > 1:
        tensors = ParameterSet(model).tensors
        arrays = arrays_of(model).items()
        parts = [(name, f"part {array.comm.rank} of its filters") for name, array in arrays]
        agree(comm, "attach a model", [*signature(tensors), *parts])
        if tensors:
            with torch.no_grad():
                comm.broadcast(tuple(t.detach() for t in tensors.values()), root=0)
    if comm.rank == 0:
        logging.getLogger("allstep").info(_announcement(policy, comm.size, global_batch))
    exchange: Exchange
    if fsdp_modules(model):
        exchange = FullyShardedExchange(model, comm, policy)
    elif isinstance(policy, Synchronous) and policy.plain:
        exchange = PlainExchange(model, comm, policy)
    elif isinstance(policy, LocalSGD) and optimizer is not None:
        exchange = LocalSGDExchange(model, comm, policy, scaler, optimizer)
    else:
        exchange = OverlappedExchange(model, comm, policy, scaler)
    watch(exchange)
    if scaler is not None:
        begin_scale(scaler, comm.device)
    return exchange


def _in_words(
    policy: ExchangePolicy,
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> dict[str, str]:
    """The arguments that must be equal on all workers."""
    others = {"scaler": scaler, "optimizer": optimizer}
    words = policy.in_words | {
        name: "None" if value is None else "given" for name, value in others.items()
    }
    if policy.wire_format.name == "exact" and not is_accelerator(device):
        # They change a product's bits.
        words["torch.get_num_threads()"] = str(torch.get_num_threads())
    return words


def _check_device(model: nn.Module, comm: Communicator) -> None:
    """Raises UsageError for gradients on an accelerator under a communicator of CPU ranks.

    Where gradients come on several devices, autograd calls hooks in several threads at once.
    """
    places = {p.device: name for name, p in model.named_parameters() if p.requires_grad}
    if len(places) > 1 and any(map(is_accelerator, places)):
        where = ", ".join(f"`{name}` on {device}" for device, name in places.items())
        raise UsageError(
            f"`model` has parameters on several devices ({where}), and a worker computes on one:"
            " call `model.to(comm.device)`, or freeze what shall stay elsewhere."
        )
    for name, p in model.named_parameters():
        if is_accelerator(p.device) and not is_accelerator(comm.device):
            raise UsageError(
                f"`model` has `{name}` on {p.device}, and `comm` computes on {comm.device}: pass"
                f" device='{p.device.type}' to `allstep.init`, or call `model.to(comm.device)`."
            )


def _refuse_attached(model: nn.Module) -> None:
    """Refuses a model with a parameter that is attached already."""
    for name, _ in exchanges_of(model):
        raise UsageError(
            f"{named_part(name)} is attached already; call `detach()` of its exchange first."
        )
    for name, p in model.named_parameters():
        if any(owners_of(p._post_accumulate_grad_hooks, Exchange)):
            raise UsageError(
                f"Parameter `{name}` is attached already, with another model that shares it;"
                " put both models in one `torch.nn.ModuleList` and attach that."
            )
    ddp = find_ddp(p for p in model.parameters() if p.requires_grad)
    if ddp is not None:
        raise UsageError(
            f"A DistributedDataParallel was made of the {type(ddp.module).__name__}, which is"
            " `model`, in it or around it, and exchanges the same gradients. Attach"
            f" {WITHOUT_DDP}"
        )


def _announcement(policy: ExchangePolicy, size: int, global_batch: int | None) -> str:
    """>>> _announcement(Synchronous(compression="fp16"), 4, 8192)
    'mean over 4 workers, fp16 compression; global batch 8,192; learning rate untouched'
    """
    workers = "worker" if size == 1 else "workers"
    batch = (
        "global batch: the loader's in `steps`, else the workers' batches together"
        if global_batch is None
        else f"global batch {global_batch:,}"
    )
    name = policy.wire_format.name
    how = ", exact sums" if name == "exact" else ""
    if not policy.wire_format.is_lossless:
        how = f", {name} compression"
    if isinstance(policy, LocalSGD):
        first = policy.local_after_step
        at_first = f" for the first {first:,} batches, then" if first else ","
        how += f"{at_first} parameters every {policy.sync_every} batches"
    if policy.staleness:
        how += f", {policy.staleness} step{'s' if policy.staleness > 1 else ''} late"
    return f"{policy.reduction} over {size} {workers}{how}; {batch}; learning rate untouched"
