"""States of a model that is divided over workers, in the form of one worker's."""

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.comm import Communicator, divided_prefixes
from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.train.devices import map_tensors
from allstep.train.shards import cut_shards, gather_shards, sharing_workers

State = dict[Any, Any]


def parts_of(exchange: Exchange) -> tuple[Communicator, set[nn.Parameter]] | None:
    """The workers with other parts of the model, and what only this one has; None if all is shared.

    Collectives of theirs, in a step, tell each of gradients that it does not see.
    """
    if exchange.is_divided:
        return exchange.comm, set(exchange.divided.values())
    comm = sharing_workers(exchange.shards)
    if comm is None:
        return None
    return comm, {p for name, p in exchange.trained.items() if name in exchange.shards}


def whole_states(model: nn.Module, optimizer: Optimizer, comm: Communicator) -> tuple[State, State]:
    """The model's state dict and the optimizer's. All workers call it.

    [Note: whole checkpoints] A checkpoint has every expert, under its number among all, whole
    parameters in place of shards, and the optimizer's state in the order of one worker's
    parameters, so that any number of workers goes on from it. Rank 0 has room for all of it.

    Returns:
        On rank 0 as if it had the whole model; on others without what is divided. Where nothing is
        divided what each worker has.

    Raises:
        UsageError: if the optimizer has no parameter of rank 0's part, and others of others'.
    """
    model_state, optimizer_state = model.state_dict(), optimizer.state_dict()
    prefixes = divided_prefixes(model)
    if not prefixes:
        gather_shards(model, optimizer, model_state, optimizer_state)
        return model_state, optimizer_state
    own_names = list(chain.from_iterable(_names(model, optimizer)))
    by_name: State = {
        own_names[key] if isinstance(key, int) else key: state
        for key, state in optimizer_state["state"].items()
    }
    for state in (model_state, by_name):
        own = _divided(state, prefixes)
        for part in comm.gather_object(map_tensors(own, _on_host)) or ():
            state.update(part)
        if comm.rank > 0:
            for name in own:
                del state[name]
    groups = _whole_names(model, optimizer, comm)
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    optimizer_state["state"] = {numbers.get(name, name): s for name, s in by_name.items()}
    for group, names in zip(optimizer_state["param_groups"], groups, strict=True):
        group["params"] = [numbers[name] for name in names]
        if "param_names" in group:
            group["param_names"] = names
    return model_state, optimizer_state


def own_states(
    model: nn.Module,
    optimizer: Optimizer,
    comm: Communicator,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What this worker loads of the states that `whole_states` gave. All workers call it.

    Returns:
        The states of its own model and optimizer; whatever else the given ones have is left in.
    """
    prefixes = divided_prefixes(model)
    if not prefixes:
        return cut_shards(model, optimizer, model_state, optimizer_state)
    own = model.state_dict()
    model_state = {
        name: value
        for name, value in model_state.items()
        if name in own or not name.startswith(prefixes)
    }
    groups = _whole_names(model, optimizer, comm)
    saved_groups = optimizer_state["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(names) for names in groups]:
        return model_state, optimizer_state  # which is another optimizer's
    number_of = {
        name: number
        for names, group in zip(groups, saved_groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    others = set(number_of.values())
    param_groups = []
    for names, group in zip(_names(model, optimizer), saved_groups, strict=True):
        group = {**group, "params": [number_of[name] for name in names]}
        if "param_names" in group:
            group["param_names"] = names
        others -= set(group["params"])
        param_groups.append(group)
    state = {key: value for key, value in optimizer_state["state"].items() if key not in others}
    return model_state, {**optimizer_state, "state": state, "param_groups": param_groups}


def _names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The parameters of each of the optimizer's groups on this worker."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _whole_names(model: nn.Module, optimizer: Optimizer, comm: Communicator) -> list[list[str]]:
    """Those of an optimizer over the whole model. Collective.

    Where rank 0 has its part of a divided module, there the parts of all are, by rank.
    """
    prefixes = divided_prefixes(model)
    by_rank: list[list[list[str]]] = comm.all_gather_object(_names(model, optimizer))
    whole = []
    for of_group in zip(*by_rank, strict=True):
        names: list[str] = []
        for prefix, run in groupby(of_group[0], lambda name: _prefix(name, prefixes)):
            parts = of_group if prefix else [list(run)]
            names += [name for part in parts for name in part if _prefix(name, prefixes) == prefix]
        if len(names) != len(set(chain.from_iterable(of_group))):
            raise UsageError(
                "`task.optimizer` trains other parts of a divided module on rank 0 than on others:"
                " a checkpoint needs an expert of each group of parameters on rank 0."
            )
        whole.append(names)
    return whole


def _prefix(name: str, prefixes: Sequence[str]) -> str:
    """That of the divided module which the parameter is in; empty if it is in none."""
    return next((prefix for prefix in prefixes if name.startswith(prefix)), "")


def _divided(state: Mapping[Any, Any], prefixes: tuple[str, ...]) -> State:
    return {k: v for k, v in state.items() if isinstance(k, str) and k.startswith(prefixes)}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
