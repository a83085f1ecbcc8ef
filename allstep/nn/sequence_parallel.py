"""Features that torch's styles shard along the sequence: dropout, and parts of equal size."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from allstep.errors import UsageError, named_part


def drops_by_position(style: ParallelStyle) -> ParallelStyle:
    """The style, or for `SequenceParallel` one whose dropout is that of the whole sequence."""
    if type(style) is not SequenceParallel:
        return style
    return _DropsByPosition(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    )


class _DropsByPosition(SequenceParallel):
    """torch's would draw on each worker for its shard: on a CPU the same mask for all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Dropout:
            module.__class__ = _DropoutByPosition
        elif isinstance(module, _DropoutNd):
            raise UsageError(
                f"`plan` has SequenceParallel for a {type(module).__name__}, whose mask would"
                " depend on the number of workers: take nn.Dropout."
            )
        return super()._apply(module, device_mesh)


class _DropoutByPosition(nn.Dropout):
    """Draws for the whole tensor, in the random state that all workers share, and keeps a shard."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        assert isinstance(input, DTensor)
        local = input.to_local()
        whole = torch.ones(input.shape, dtype=local.dtype, device=local.device)
        factors = F.dropout(whole, self.p)
        return input * distribute_tensor(
            factors, input.device_mesh, input.placements, src_data_rank=None
        )


class EvenParts(ParallelStyle):
    """A style, and an error where it would cut tensors in parts of unequal sizes.

    A layer that takes a local part takes it for 1/size of the whole: of unequal ones torch's
    collectives send too few or too many bytes, which ends a process of Gloo. DTensors know the
    whole's size and may have unequal parts.

    Args:
        style: any.
        names: of the modules, for the message.
    """

    def __init__(self, style: ParallelStyle, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self._style = style
        self._names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        which = named_part(self._names[module])
        inputs, outputs = (_Sizes(f"{which}'s {kind}", device_mesh) for kind in ("input", "output"))
        module.register_forward_pre_hook(inputs.note, with_kwargs=True)
        module.register_forward_hook(outputs.note, with_kwargs=True)
        self._style.src_data_rank = self.src_data_rank
        self._style._apply(module, device_mesh)
        module.register_forward_pre_hook(inputs.compare, with_kwargs=True)
        module.register_forward_hook(outputs.compare, with_kwargs=True)
        return module


class _Sizes:
    """Of a module's inputs or outputs, before torch's hook lays them out, and after it."""

    def __init__(self, which: str, device_mesh: DeviceMesh) -> None:
        self._which = which
        self._num_workers = device_mesh.size()
        self._before: list[torch.Size] = []

    def note(self, module: nn.Module, *values: Any) -> None:
        self._before = _sizes(values)

    def compare(self, module: nn.Module, *values: Any) -> None:
        for before, after in zip(self._before, _sizes(values), strict=False):
            for dim, (whole, part) in enumerate(zip(before, after, strict=False)):
                if part < whole != part * self._num_workers:
                    raise UsageError(
                        f"{self._which} {list(before)} is cut along dimension {dim}, which must be"
                        f" a multiple of the {self._num_workers} workers: pad it, or have `plan`"
                        " keep DTensors by use_local_output=False."
                    )


def _sizes(values: tuple[Any, ...]) -> list[torch.Size]:
    """Of the tensors in (args, kwargs), or in (args, kwargs, output) of the output alone."""
    tensors = pytree.tree_leaves(values[2:] or values)
    return [x.shape for x in tensors if isinstance(x, Tensor)]
