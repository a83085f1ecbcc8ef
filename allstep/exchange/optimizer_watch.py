"""Detects optimizers, and DDP, that would train another model than the attached one.

[Note: an optimizer's step] torch calls a hook before each step of any optimizer. It checks the
optimizer against the exchanges that the same thread has attached, and raises before anything is
changed. The check costs about as much as one loop over the optimizer's parameters.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allstep.comm import Communicator
from allstep.comm.agreement import agree
from allstep.comm.ddp import WITHOUT_DDP, is_ddp
from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.exchange.exchange import Exchange
from allstep.exchange.hooks import is_in_backward

_OF_WHOLE_MATRICES = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
Step = tuple[tuple[Any, ...], dict[str, Any]]


class _Here(threading.local):
    """The exchanges that this thread has attached; ranks may be threads."""

    def __init__(self) -> None:
        self.exchanges = WeakSet[Exchange]()
        self.has_updated = False  # an optimizer of theirs has made a step
        self.told = set[tuple[torch.Size, ...]]()  # the shapes of models that were not attached
        self.told_own = WeakSet[Exchange]()  # whose workers were told of their own gradients


_here = _Here()
_installing = threading.Lock()
_is_installed = False


def watch(exchange: Exchange) -> None:
    """Begins to check the steps of optimizers in this thread for an exchange."""
    global _is_installed
    with _installing:
        if not _is_installed:
            register_optimizer_step_pre_hook(_before_step)
            register_module_module_registration_hook(_before_registration)
            _is_installed = True
    _here.exchanges.add(exchange)
    _here.has_updated = False


def attached_here() -> list[Exchange]:
    """The exchanges that this thread has attached."""
    return [exchange for exchange in _here.exchanges if exchange.is_attached]


def _before_registration(module: nn.Module, _name: str, child: nn.Module | None) -> None:
    """Refuses a DDP around a part of an attached model, also one that is called by itself."""
    if child is None or not is_ddp(module):
        return
    trained = {id(p) for exchange in attached_here() for p in exchange.trained.values()}
    if any(id(p) in trained for p in child.parameters()):
        raise UsageError(
            f"A DistributedDataParallel is made of the {type(child).__name__}, which is attached or"
            " a part of what is, and would exchange its gradients a second time. Go on"
            f" {WITHOUT_DDP}"
        )


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Step | None:
    exchanges = attached_here()
    if not exchanges or torch.compiler.is_compiling():
        return None
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    held = [(exchange, exchange.held(set(parameters))) for exchange in exchanges]
    _refuse_divided_since(optimizer, parameters.values())
    others = parameters.keys() - set().union(*(ids for _, ids in held))
    trained = [p for i, p in parameters.items() if i in others and p.grad is not None]
    if len(others) == len(parameters):
        _refuse_stranger(optimizer, exchanges, has_gradients=bool(trained))
        if trained:
            _tell_of_stranger(optimizer, trained, exchanges[0].comm)
        return None
    _here.has_updated = True
    _refuse_early(optimizer, [exchange for exchange, ids in held if ids])
    if trained:
        raise UsageError(
            f"The {_kind(optimizer)} holds a parameter of shape {tuple(trained[0].shape)} with a"
            " gradient, beside those of the attached model: it is of no attached model, so that"
            " its gradient is this worker's own. Attach one module that holds all that is trained"
            " (`torch.nn.ModuleList([model, criterion])`), or give what belongs to one worker an"
            " optimizer of its own."
        )
    for exchange, ids in held:
        if ids:
            _refuse_shards(optimizer, exchange, ids)
            if not exchange.has_exchanged_for(optimizer):
                _tell_of_own_gradients(optimizer, exchange)
            exchange.note_update(optimizer)
    return _with_compared_closure(exchanges[0].comm, args, kwargs)


def _refuse_divided_since(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Refuses an optimizer that was made before the shards, and would not update them."""
    for p in parameters:
        name = getattr(p, "divided_as", None)
        if name is not None:
            raise UsageError(
                f"The {_kind(optimizer)} holds what `{name}` was before `tensor_parallel` divided"
                " it, and would update no shard: make the optimizer of `model.parameters()` behind"
                " `tensor_parallel`."
            )


def _refuse_stranger(
    optimizer: Optimizer, exchanges: list[Exchange], *, has_gradients: bool
) -> None:
    """Refuses an optimizer of another model, if no optimizer updates the attached one."""
    if _here.has_updated:
        return
    is_exchanged = any(
        p.grad is not None for exchange in exchanges for p in exchange.trained.values()
    )
    is_idle = not has_gradients and is_exchanged
    trains_another = has_gradients and not is_exchanged
    if is_idle or (trains_another and any(exchange.awaits_update for exchange in exchanges)):
        raise UsageError(
            f"The {_kind(optimizer)} makes a step, and holds no parameter of the attached model"
            " (it may have been made of a copy, or of a model that was replaced since); make it of"
            " `model.parameters()`, of the model that was given to `attach`."
        )


def _tell_of_stranger(optimizer: Optimizer, trained: list[Tensor], comm: Communicator) -> None:
    """Warns once that each worker trains a model separately; MAML, say, makes copies of one."""
    shapes = tuple(p.shape for p in trained)
    if comm.size > 1 and comm.rank == 0 and shapes not in _here.told:
        _here.told.add(shapes)
        logging.getLogger("allstep").warning(
            "the %s trains a model that was not attached: each of %d workers makes another one of"
            " it. Attach it, too (`allstep.attach(model, comm)`), if that is not meant.",
            _kind(optimizer),
            comm.size,
        )


def _tell_of_own_gradients(optimizer: Optimizer, exchange: Exchange) -> None:
    """Warns once that an update uses gradients that were not exchanged."""
    gradients = (p.grad for p in exchange.trained.values() if p.grad is not None)
    is_told = exchange in _here.told_own or exchange.comm.rank > 0
    if is_told or not any(x.any() for x in gradients):
        return
    _here.told_own.add(exchange)
    logging.getLogger("allstep").warning(
        "the %s makes a step, and no gradient was exchanged since its last one: `p.grad` is of"
        " a backward pass in `no_sync`, of `torch.autograd.grad` or set by hand. Unless it is"
        " the same on all %d workers each of them trains another model: call"
        " `exchange.synchronize()` before the step.",
        _kind(optimizer),
        exchange.comm.size,
    )


def _refuse_shards(optimizer: Optimizer, exchange: Exchange, ids: set[int]) -> None:
    """Refuses optimizers of whole matrices or models, whose updates of parts would differ."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_exact = exchange.is_fully_sharded and exchange.is_exact
    if is_fused and is_exact and not is_accelerator(exchange.comm.device):
        raise UsageError(
            f"The {_kind(optimizer)} has `fused` (=True): on a CPU torch's kernel rounds a tensor's"
            " last elements otherwise than others, and FSDP2 cuts elsewhere on other numbers of"
            " workers, whose bits exact sums promise to be the same. Leave `fused` out."
        )
    if not isinstance(optimizer, _OF_WHOLE_MATRICES):
        return
    if isinstance(optimizer, torch.optim.LBFGS) and exchange.workers_with_other_parts:
        raise UsageError(
            f"The {_kind(optimizer)} looks at all parameters at once, and each worker has a part of"
            " the model: take an optimizer that looks at one at a time, as AdamW."
        )
    for name in exchange.cut:
        if id(exchange.trained.get(name)) in ids:
            raise UsageError(
                f"The {_kind(optimizer)} looks at whole matrices, and of `{name}` each worker has a"
                " part: take an optimizer that works element by element, as AdamW, or"
                " `allstep.optim.LAMB` or `LARS`, which add up the parts' norms."
            )


def _refuse_early(optimizer: Optimizer, exchanges: list[Exchange]) -> None:
    """Refuses a step before the gradient is the mean over the workers."""
    if is_in_backward():
        raise UsageError(
            f"`{_kind(optimizer)}.step()` was called in a backward pass (by a hook on a parameter,"
            " or torch's optimizer-in-backward), before the gradient is the mean over the workers."
            " Call it after the backward pass, and remove the hook."
        )
    for exchange in exchanges:
        if exchange.batch.step is not None:
            raise UsageError(
                f"`{_kind(optimizer)}.step()` was called in the loop over global batch"
                f" {exchange.batch.step}'s micro-batches, whose gradient is whole only when the"
                " loop has ended. Call it after that loop, `zero_grad()` too."
            )
        if exchange.batch.unfinished is not None:
            raise UsageError(
                f"`{_kind(optimizer)}.step()` was called after the loop over global batch"
                f" {exchange.batch.unfinished} was left before its last micro-batch, so that its"
                " gradients were never exchanged. Iterate it to the end."
            )


def _with_compared_closure(
    comm: Communicator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Step | None:
    """Makes workers compare their losses if an optimizer calls its closure more than once."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or comm.size == 1:
        return None
    compared = _compared(closure, comm)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": compared}
    return (args[0], compared, *args[2:]), kwargs


def _compared(closure: Callable[[], Any], comm: Communicator) -> Callable[[], Any]:
    losses: list[str] = []

    def call() -> Any:
        loss = closure()
        value = loss.detach() if isinstance(loss, Tensor) else loss
        losses.append("None" if value is None else repr(float(value)))
        if len(losses) > 1:  # as in LBFGS; one alone decides nothing
            agree(
                comm,
                "evaluate an optimizer's closure again",
                [("the first loss", losses[0]), ("the last loss", losses[-1])],
                cure="Return the mean over the workers from the closure: `batch.global_loss()` in"
                ' `steps`, else `comm.all_reduce(loss.detach(), "mean")`.',
            )
        return loss

    return call


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
