"""Whether FSDP2 has sharded a model in a way that can be trained."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from allstep.comm import Communicator, StageModules, divided_prefixes, fsdp_modules, prefixes_of
from allstep.errors import UsageError
from allstep.exchange.agreement import agree
from allstep.exchange.parameters import left_out_of_shards
from allstep.exchange.policy import ExchangePolicy, Synchronous
from allstep.torch_classes import bounds_of, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


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


def check_replicas(model: nn.Module, comm: Communicator) -> None:
    """Checks that workers hold the same shards of all that is trained. Collective.

    Raises:
        UsageError: names a parameter that is trained and not sharded, and the cure.
        DisagreementError: names a parameter of which they hold different ones, and the cure.
    """
    prefixes = prefixes_of(fsdp_modules(model))
    whole = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not (is_dtensor(p) and name.startswith(prefixes))
    ]
    fault = None
    if whole:
        fault = (
            f"`{whole[0]}` is trained and not sharded by FSDP2, which hands over gradients of what"
            " it has sharded: call `fully_shard(model, mesh=...)` last, which takes the other"
            " parameters, without `ignored_params`; or freeze it by `requires_grad_(False)`."
        )
    shards = [
        (name, "elements {} to {}".format(*bounds_of(p))) for name, p in model.named_parameters()
    ]
    cure = (
        'Shard over `mesh["shard"]` alone and pass those that hold the same shard as `comm`:'
        ' `allstep.init(process_group=mesh["replicate"])`.'
    )
    agree(comm, "exchange the gradients of shards", shards, fault=fault, cure=cure)


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
    """Raises UsageError if FSDP2 shards a parameter that only this worker has."""
    if is_dtensor(p):
        raise UsageError(
            f"`{name}` is of an expert that one worker has, and FSDP2 has sharded it over several:"
            " give each `fully_shard` the experts' parameters as `ignored_params`,"
            " `set(layer.experts.parameters())` of a `MixtureOfExperts`."
        )


def _check_mesh(name: str, mesh: "DeviceMesh", ranks: list[int]) -> None:
    """Raises UsageError unless a mesh has one axis of shards, or copies before it, over `ranks`."""
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
