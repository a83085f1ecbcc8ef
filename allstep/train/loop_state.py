"""The state of a user's own loop: its models, its position in the data, and objects it names."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from allstep.comm import (
    Communicator,
    arrays_of,
    divided_modules,
    fsdp_modules,
    parts_along_axes,
)
from allstep.data.batches import GlobalBatchLoader
from allstep.data.random import derive_seed, seed_all
from allstep.errors import UsageError, first_few
from allstep.exchange import Exchange
from allstep.train.checkpoint import Stateful
from allstep.train.divided import (
    local_model,
    local_optimizer,
    local_tensors,
    whole_optimizer,
    whole_tensors,
)
from allstep.train.dtensors import laid_out
from allstep.train.exchange_parts import gather_exchange, own_exchange
from allstep.train.fitting import check_same, load_model_state, load_optimizer_state


class LoopState:
    """Collects the state of a user's own loop, and loads it in place.

    Args:
        loader: from `allstep.data.loader`.
        exchanges: from `allstep.attach`.
        parts: name -> optimizer, scheduler or other object with a state.

    Attributes:
        comm: all workers, including those that share a copy of a model.

    Raises:
        UsageError: if an argument is of a wrong kind, or if an optimizer updates a divided model
            and other parameters.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        exchanges: tuple[Exchange, ...],
        parts: Mapping[str, Stateful],
    ) -> None:
        _check_arguments(loader, exchanges, parts)
        for name in (name for exchange in exchanges for name in arrays_of(exchange.model)):
            raise UsageError(
                f"`model.{name}` has other filters on each worker of its grid, which have no name"
                " in a checkpoint of all: give them as `allstep.nn.DividedTensor`s to"
                " `allstep.train.Checkpoints`."
            )
        self.loader, self.exchanges, self.parts = loader, exchanges, dict(parts)
        self.comm = _all_workers(exchanges)
        self._model_of = {name: _divided_model(name, x, exchanges) for name, x in parts.items()}

    def check_given(self, name: str, loader: object, exchanges: tuple[Exchange, ...]) -> None:
        """Checks what `steps` was given.

        Raises:
            UsageError: if loader or exchanges are not this object's.
        """
        if loader is not self.loader or exchanges != self.exchanges:
            raise UsageError(
                f"`{name}` was made for another loader or other exchanges; give `steps` the same as"
                f" `{_MADE_BY[name]}`."
            )

    @contextmanager
    def kept_by(self, name: str) -> Iterator[None]:
        """Encloses the epochs, in which `steps` of this loader needs the argument `name`."""
        self.loader.kept_by = name
        try:
            yield
        finally:
            self.loader.kept_by = ""

    def options(self) -> dict[str, Any]:
        """Options that must be the same when the state is loaded."""
        kinds = {name: type(part).__name__ for name, part in self.parts.items()}
        return {**self.loader.options(), "state": kinds, "exchanges": len(self.exchanges)}

    def seed_epoch(self, epoch: int) -> None:
        """Sets the random states of an epoch's code around `steps`, the same in every run."""
        seed_all(derive_seed(self.loader.seed, _EPOCH, epoch), self.comm.device)

    def state_dict(self, are_kept: Sequence[bool] | None = None) -> dict[str, Any]:
        """The state that each worker has itself, without `position`; complete with exact sums.

        Collective for divided models. With local SGD each worker has gradients and optimizers of
        its own: then it has no gradients, and the parts only on rank 0.

        Args:
            are_kept: for each model whether its gradients are kept; None to keep all.
        """
        is_shared = all(exchange.averaging is None for exchange in self.exchanges)
        kept = are_kept or [True] * len(self.exchanges)
        parts = self.parts if is_shared or self.comm.rank == 0 else ()
        return {
            "options": self.options(),
            "models": [whole_tensors(x.model, x.model.state_dict()) for x in self.exchanges],
            "trained": self._trained(),
            "gradients": self._gradients(kept) if is_shared else None,
            "state": {name: self._part_state(name) for name in parts},
        }

    def _trained(self) -> list[dict[str, bool]]:
        """For each model: name -> whether the parameter is trained, rather than frozen."""
        found = []
        for model in (exchange.model for exchange in self.exchanges):
            own = {name: p.requires_grad for name, p in model.named_parameters()}
            found.append(whole_tensors(model, own))
        return found

    def _gradients(self, are_kept: Iterable[bool]) -> list[dict[str, Any]]:
        """Name -> gradient for each model; None in its place if the gradient is not kept.

        Gradients are kept if more may be added to them. None means that the gradient was used and
        will be zero: optimizers with momentum update such a parameter, but not one that has no
        gradient at all.
        """
        found = []
        for exchange, is_kept in zip(self.exchanges, are_kept, strict=True):
            parameters = _parameters(exchange).items()
            there = {name: p.grad for name, p in parameters if p.grad is not None}
            whole = whole_tensors(exchange.model, there)
            found.append(whole if is_kept else dict.fromkeys(whole))
        return found

    def _part_state(self, name: str) -> Any:
        part, model = self.parts[name], self._model_of[name]
        if model is None:
            return part.state_dict()
        if isinstance(part, Optimizer):
            return whole_optimizer(model, part)
        return whole_tensors(model, part.state_dict())

    def awaits_update(self, state: Mapping[str, Any]) -> list[bool]:
        """For each model whether the state has gradients that no update has used yet."""
        gradients = state["gradients"] or [{}] * len(self.exchanges)
        return [any(x is not None for x in stored.values()) for stored in gradients]

    def exchange_states(self) -> list[dict[str, Any] | None]:
        """The exchanges' states, with gradients that are exchanged late; on rank 0."""
        return [gather_exchange(exchange) for exchange in self.exchanges]

    def local(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a checkpoint's state that this worker needs."""
        own = zip(self.exchanges, state["models"], strict=False)
        models = [local_model(exchange.model, stored) for exchange, stored in own]
        parts = dict(state["state"])
        for name, model in self._model_of.items():
            part = self.parts[name]
            if model is None or name not in parts:
                continue
            if isinstance(part, Optimizer):
                parts[name] = local_optimizer(model, part, parts[name])
            else:
                parts[name] = local_model(model, parts[name])
        own = zip(self.exchanges, state["gradients"] or (), strict=False)
        gradients = []
        for exchange, stored in own:
            kept = {name: x for name, x in stored.items() if x is not None}
            gradients.append(dict.fromkeys(stored) | local_tensors(exchange.model, kept))
        exchanges = [
            own_exchange(exchange, stored, trained)
            for exchange, stored, trained in zip(
                self.exchanges, state["exchanges"], state["trained"], strict=False
            )
        ]
        return {
            **state,
            "models": models,
            "gradients": gradients,
            "state": parts,
            "exchanges": exchanges,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, with or without the position.

        Raises:
            CheckpointError: if it was saved with other data, another policy, model or optimizer.
        """
        check_same(state["options"], self.options())
        for exchange, stored in zip(self.exchanges, state["models"], strict=True):
            load_model_state(exchange.model, stored)
        for exchange, stored in zip(self.exchanges, state["trained"], strict=True):
            _restore_frozen(exchange, stored)
        for name, part in self.parts.items():
            if isinstance(part, Optimizer):
                load_optimizer_state(part, state["state"][name])
                # In an earlier life; torch's schedulers warn if their step comes first.
                part._opt_called = True  # type: ignore[attr-defined]
            elif (model := self._model_of[name]) is not None:
                load_model_state(model, state["state"][name])
            else:
                part.load_state_dict(state["state"][name])
        if "loader" in state:
            self.loader.load_state_dict(state["loader"])
            for exchange, stored in zip(self.exchanges, state["exchanges"], strict=True):
                exchange.load_state_dict(stored)
        for exchange, stored in zip(self.exchanges, state["gradients"] or (), strict=False):
            parameters = _parameters(exchange)
            for name in parameters.keys() - stored.keys():
                parameters[name].grad = None
            for name, gradient in stored.items():
                p = parameters.get(name)
                if p is not None:  # None if other workers have it, in a divided model
                    p.grad = (
                        torch.zeros_like(p)
                        if gradient is None
                        else laid_out(gradient.to(p.device), p)
                    )

    def position(self) -> dict[str, Any]:
        """The positions of loader and exchanges, which every worker knows itself."""
        return {
            "loader": self.loader.state_dict(),
            "exchanges": [exchange.replicated_state() for exchange in self.exchanges],
        }

    def refuse_left_out(self) -> None:
        """Raises UsageError if an optimizer has updated a model that is not among the parts."""
        for optimizer in (found for exchange in self.exchanges for found in exchange.optimizers):
            if not any(optimizer is part for part in self.parts.values()):
                raise UsageError(
                    f"`state` (={list(self.parts)}) lacks an optimizer that updates the model (a"
                    f" {type(optimizer).__name__}): its state would be lost. Add it, as in"
                    ' `state={"optimizer": optimizer}`.'
                )


class BeforeStep:
    """A copy of what a step changes in a model before the update.

    Args:
        model: the model; its buffers and gradients are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        gradients = ((p, p.grad) for p in model.parameters())
        self._gradients = [(p, None if g is None else g.detach().clone()) for p, g in gradients]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores the copy; may be called again."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for p, gradient in self._gradients:
            p.grad = None if gradient is None else gradient.clone()


def _parameters(exchange: Exchange) -> dict[str, nn.Parameter]:
    """All parameters that may have a gradient, including those frozen or thawed since `attach`."""
    return {**dict(exchange.model.named_parameters()), **exchange.with_gradients}


def _restore_frozen(exchange: Exchange, trained: Mapping[str, bool]) -> None:
    """Freezes and thaws parameters as they were when the state was taken."""
    changed = []
    for name, p in exchange.model.named_parameters():
        is_trained = trained.get(name, p.requires_grad)
        if is_trained != p.requires_grad:
            p.requires_grad_(is_trained)
            changed.append(f"`{name}`" + (" is trained" if is_trained else " is frozen"))
    if changed and exchange.comm.rank == 0:
        words = first_few(changed, _MOST)
        logging.getLogger("allstep").info(f"as in the state that is loaded, {words}")


def refuse_second_loop(name: str) -> NoReturn:
    """Raises UsageError: an epoch of an AutoCheckpoint or an Elastic has one loop over `steps`."""
    raise UsageError(
        f"A second loop over `steps` began in one epoch of `{name}.epochs`; each epoch has one."
    )


_MOST = 4  # parameters that are named
_EPOCH = 0x65706F6368  # keeps random numbers apart from those that are derived elsewhere
_MADE_BY = {"checkpoint": "AutoCheckpoint", "elastic": "Elastic"}


def check_exchanges(exchanges: tuple[object, ...]) -> None:
    """Raises UsageError unless there is at least one, and all are exchanges."""
    if not exchanges or not all(isinstance(exchange, Exchange) for exchange in exchanges):
        kinds = first_few([type(exchange).__name__ for exchange in exchanges], _MOST) or "none"
        raise UsageError(
            f"`exchanges` ({kinds}): give what `allstep.attach` returned, an argument for each"
            " model."
        )


def _check_arguments(loader: object, exchanges: tuple[object, ...], state: object) -> None:
    if not isinstance(loader, GlobalBatchLoader):
        raise UsageError(
            f"`loader` (a {type(loader).__name__}) tells no position; make it with"
            " `allstep.data.loader`."
        )
    check_exchanges(exchanges)
    if not isinstance(state, Mapping):
        raise UsageError(
            f"`state` (a {type(state).__name__}) must be a dict that names what it holds, as in"
            ' `state={"optimizer": optimizer}`.'
        )
    for name, part in state.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(
                f"`state`: {name!r} (a {type(part).__name__}) has no `state_dict` and"
                " `load_state_dict`; give the optimizer, the scheduler and so on themselves."
            )


def _all_workers(exchanges: tuple[Exchange, ...]) -> Communicator:
    """The workers of the exchanges, and those with other parts of a model."""
    for model in (exchange.model for exchange in exchanges):
        for part in parts_along_axes(model):
            return part.mesh.comm
    return exchanges[0].comm


def _divided_model(name: str, part: Stateful, exchanges: tuple[Exchange, ...]) -> nn.Module | None:
    """The divided model that an optimizer updates, or that a part is; an `AveragedModel`, say."""
    if isinstance(part, nn.Module) and _is_divided(part):
        return part
    if not isinstance(part, Optimizer):
        return None
    updated = {id(p) for group in part.param_groups for p in group["params"]}
    for model in (exchange.model for exchange in exchanges):
        own = set(map(id, model.parameters()))
        if not updated & own or not _is_divided(model):
            continue
        if not updated <= own:
            raise UsageError(
                f"`state`: {name!r} updates a model that is divided over the workers, and other"
                " parameters; take two optimizers."
            )
        return model
    return None


def _is_divided(model: nn.Module) -> bool:
    return bool(divided_modules(model) or parts_along_axes(model) or fsdp_modules(model))
