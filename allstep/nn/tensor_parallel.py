"""Layers that torch's tensor parallelism divides over an axis of a mesh."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from allstep.comm import Communicator, Mesh, Shard, ShardHook, fsdp_modules, shards_of
from allstep.errors import UsageError, check_type, named_part

if TYPE_CHECKING:  # their import takes seconds
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_parallel(
    model: nn.Module,
    mesh: Mesh[Communicator],
    plan: "Mapping[str, ParallelStyle]",
    *,
    axis: str = "tensor",
) -> nn.Module:
    """Divides layers over an axis of the mesh by torch's `parallelize_module`. Collective.

    Attach the model along another axis, `attach(model, mesh["data"])`: workers that share a copy
    have the same micro-batches, and each of them has the whole loss.

    [Note: shards] `parallelize_module` makes parameters DTensors. Each worker keeps its local
    shard as a plain parameter instead, under the same name, and a forward pass sees the DTensor of
    which it is a part: torch's engine computes and sends activations, and the exchange and the
    optimizer see plain tensors. Norms under SequenceParallel don't need it [Note: by position].
    What looks at all gradients sees one worker's shards; `fit` clips by the norm over all, and its
    checkpoints are whole. LARS and LAMB, which look at a layer's norm, find the workers that have
    its other parts as `parameter.shard_group`.

    Args:
        model: whole, the same on all workers, before its optimizer is made; changed in place.
        mesh: made of all workers of torch.distributed's default group.
        plan: name of a module -> torch's ColwiseParallel, RowwiseParallel, ...; under
            SequenceParallel nn.Dropout draws the mask of the whole tensor.
        axis: of the mesh. Where it has one worker, the model stays as it is.

    Returns:
        The model.

    Raises:
        UsageError: if the axis is not there, if a parameter is shared by several modules, if one
            doesn't divide by the axis's length, as torch may compute with uneven shards what is
            wrong, if one of a convolution is divided, if SequenceParallel is for another kind of
            dropout, or if FSDP2 has sharded the model before. In a forward pass, if the plan cuts
            a layer's input or output in unequal parts, or a convolution's input otherwise than
            by samples. In a backward pass that is to be differentiated itself (`create_graph`).

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> mesh = Communicator.single_process().mesh(data=1, tensor=1)
        >>> _ = tensor_parallel(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    """
    check_type("mesh", mesh, Mesh, "`comm.mesh(data=1, tensor=comm.size)`, say")
    size = mesh[axis].size
    if size == 1:
        return model
    if shards_of(model):
        raise UsageError("`model` is divided already; make it anew to divide it otherwise.")
    if fsdp_modules(model):
        raise UsageError("`model` is sharded by FSDP2 already: call `fully_shard` after this.")
    _refuse_shared(model)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    from allstep.nn.sequence_parallel import EvenParts, by_position

    whole = dict(model.named_parameters())
    names = {module: name for name, module in model.named_modules()}
    styles: dict[str, ParallelStyle] = {
        name: EvenParts(by_position(style, mesh[axis]), names) for name, style in plan.items()
    }
    parallelize_module(model, mesh.device_mesh()[axis], styles)
    for prefix, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        for name, p in own.items():
            _check_layout(f"{prefix}.{name}".lstrip("."), module, p, axis, size)
        if own:
            _LocalShards(module, own, mesh, axis).register()
            module.register_forward_hook(partial(_watch_backward, named_part(prefix)))
        if own and isinstance(module, _ConvNd):
            module.register_forward_pre_hook(partial(_check_convolution, named_part(prefix)))
    found = dict(model.named_parameters())
    for name, before in whole.items():
        if found.get(name) is not before:  # an optimizer that holds it would never update the model
            before.divided_as = name  # type: ignore[attr-defined]
    return model


class _LocalShards(ShardHook):
    """Puts DTensors in the place of a module's local shards for one forward pass."""

    def __init__(
        self,
        module: nn.Module,
        divided: "Mapping[str, DTensor]",
        mesh: Mesh[Communicator],
        axis: str,
    ) -> None:
        from torch.distributed.tensor import placement_types

        self._module = module
        self._layouts = {name: _layout(p) for name, p in divided.items()}
        self.shards = {
            name: Shard(mesh, axis, placement.dim)
            for name, p in divided.items()
            for placement in p.placements
            if isinstance(placement, placement_types.Shard)
        }
        self.local: dict[str, nn.Parameter] = {}
        for name, p in divided.items():
            module._parameters[name] = nn.Parameter(
                p.to_local().detach(), requires_grad=p.requires_grad
            )

    def register(self) -> None:
        """Registers the hooks around the module's forward pass."""
        self._module.register_forward_pre_hook(self)
        self._module.register_forward_hook(self._give_back, always_call=True)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        from torch.distributed.tensor import DTensor

        for name, layout in self._layouts.items():
            p = module._parameters[name]
            assert p is not None
            self.local[name] = p
            if name in self.shards:  # a copy has lost it, and so has what was loaded in its place
                p.shard_group = self.shards[name].comm  # type: ignore[attr-defined]
            # On the way back the gradient is laid out as the parameter is.
            divided: Any = DTensor.from_local(p, **layout)
            module._parameters[name] = divided

    def _give_back(self, module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(self.local)
        self.local.clear()


def _watch_backward(which: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Makes a layer's backward pass fail if it is to be differentiated again."""
    for value in output if isinstance(output, tuple | list) else (output,):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(partial(_refuse_graph, which))  # type: ignore[no-untyped-call]


def _refuse_graph(which: str, gradient: Tensor) -> None:
    """Raises UsageError in a backward pass with `create_graph=True`: only there grad mode is on."""
    if torch.is_grad_enabled():
        raise UsageError(
            f"`create_graph` (=True): torch's DTensors lose the graph of a backward pass, so that a"
            f" gradient penalty would have no gradient through {which}, which `plan` divides."
            " Leave the layers out of `plan` through which a gradient is differentiated."
        )


def _check_convolution(which: str, convolution: _ConvNd, inputs: tuple[Any, ...]) -> None:
    """Raises UsageError for an input of which torch would take a worker's part for the whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x = inputs[0]
    if not isinstance(x, DTensor) or x.placements == (Replicate(),):
        return
    if x.placements != (Shard(0),) or x.ndim < convolution.weight.ndim:  # one sample, of channels
        raise UsageError(
            f"{which}, a {type(convolution).__name__}, has an input {list(x.shape)} laid out as"
            f" {x.placements}, of which torch would take a worker's part for the whole: let `plan`"
            " give it whole inputs (Replicate()), or sharded by samples (Shard(0)); a convolution"
            " of images that are divided is `allstep.nn.Conv2d`."
        )


def _layout(tensor: "DTensor") -> dict[str, Any]:
    """The arguments of `DTensor.from_local` beside the local part."""
    return {
        "device_mesh": tensor.device_mesh,
        "placements": tensor.placements,
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "run_check": False,
    }


def _refuse_shared(model: nn.Module) -> None:
    """Raises UsageError for a parameter of several modules, which torch would separate silently."""
    names_of: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(f"`{name}`")
    for names in names_of.values():
        if len(names) > 1:
            raise UsageError(
                f"`model` has one parameter as {' and '.join(names)}, which `parallelize_module`"
                " would part: let one module have it."
            )


def _check_layout(name: str, module: nn.Module, tensor: "DTensor", axis: str, size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard

    (placement,) = tensor.placements
    if type(placement) not in (Shard, Replicate):
        raise UsageError(
            f"`plan` lays `{name}` out as {placement}; take a style that cuts it along one"
            " dimension, as ColwiseParallel and RowwiseParallel do."
        )
    if isinstance(placement, Shard) and isinstance(module, _ConvNd):
        raise UsageError(
            f"`plan` cuts `{name}` of a {type(module).__name__}, which torch would take for the"
            " whole: leave convolutions whole on all workers."
        )
    if isinstance(placement, Shard) and tensor.shape[placement.dim] % size:
        raise UsageError(
            f"`plan` cuts `{name}` {list(tensor.shape)} along dimension {placement.dim}, which must"
            f" be a multiple of the {size} workers of the axis {axis!r}."
        )
