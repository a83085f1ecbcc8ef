"""Dropout of features that torch's `SequenceParallel` shards along the sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from torch.nn.modules.dropout import _DropoutNd

from allstep.errors import UsageError


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
