"""Norms and dropout for torch's sequence-sharding styles, and checks for equal parts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from torch.nn.modules.dropout import _DropoutNd

from allstep.comm import Communicator
from allstep.errors import UsageError, named_part
from allstep.nn.replicated import replicated


def by_position(style: ParallelStyle, comm: Communicator) -> ParallelStyle:
    """The style; for `SequenceParallel` one with norms and dropout that need no DTensors.

    Args:
        style: any.
        comm: the workers that have the parts of the sequence.
    """
    return _ByPosition(style, comm) if type(style) is SequenceParallel else style


class _ByPosition(SequenceParallel):
    """torch's style, with norms and dropout that compute each position on its own.

    [Note: by position] They compute with the plain local part, as an operation of DTensors takes a
    CPU longer than such a layer. The gradients of a norm are summed over the workers in one
    message. Dropout draws for the whole sequence in the random state that all workers share, and
    keeps its part: torch's would draw for each part, on a CPU the same mask for all of them.
    """

    def __init__(self, style: SequenceParallel, comm: Communicator) -> None:
        dim = style.sequence_sharding[0].dim
        super().__init__(sequence_dim=dim, use_local_output=style.use_local_output)
        self._comm = comm
        self._dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = _KINDS.get(type(module))
        if kind is None and isinstance(module, _DropoutNd):
            raise UsageError(
                f"`plan` has SequenceParallel for a {type(module).__name__}, whose mask would"
                " depend on the number of workers: take nn.Dropout."
            )
        if kind is None or len(getattr(module, "normalized_shape", ())) > 1:
            return super()._apply(module, device_mesh)

        def lay_out(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if isinstance(output, DTensor):
                return output.to_local() if self.use_local_output else output
            if self.use_local_output:
                return output
            return DTensor.from_local(output, device_mesh, self.sequence_sharding, run_check=False)

        module.__class__ = kind
        assert isinstance(module, _OfPart)
        module.comm, module.dim = self._comm, self._dim
        module.register_forward_hook(lay_out)
        return module


class _OfPart(nn.Module):
    """A layer of this worker's part of a sequence, plain or as a DTensor. [Note: by position]

    Attributes:
        comm: the workers that have the parts.
        dim: of the tensor, along which they lie.
    """

    comm: Communicator
    dim: int

    def forward(self, input: Tensor) -> Tensor:
        shape = list(input.shape)
        if not isinstance(input, DTensor):
            shape[self.dim] *= self.comm.size
            return self._compute(input, shape)
        x = input.redistribute(placements=[Shard(self.dim)])
        y = self._compute(x.to_local(), shape).contiguous()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride
        )

    def _compute(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The layer's output for a part of a tensor of the given shape."""
        raise NotImplementedError


class _DropoutOfPart(_OfPart, nn.Dropout):
    def _compute(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        if not self.training:
            return x
        factors = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.p)
        most = -(-shape[self.dim] // self.comm.size)  # positions of a part; the last may have fewer
        first = min(self.comm.rank * most, shape[self.dim])
        # A copy, as the backward pass would keep the whole of a view.
        return x * factors.narrow(self.dim, first, x.shape[self.dim]).clone()


class _LayerNormOfPart(_OfPart, nn.LayerNorm):
    def _compute(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        weight, bias = replicated(self.comm, (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _RMSNormOfPart(_OfPart, nn.RMSNorm):
    def _compute(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        (weight,) = replicated(self.comm, (self.weight,))
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


_KINDS: dict[type[nn.Module], type[_OfPart]] = {
    nn.Dropout: _DropoutOfPart,
    nn.LayerNorm: _LayerNormOfPart,
    nn.RMSNorm: _RMSNormOfPart,
}


class EvenParts(ParallelStyle):
    """A style that raises an error where it would cut tensors into unequal parts.

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
        sides = {"input": module._forward_pre_hooks, "output": module._forward_hooks}
        earlier = {side: set(hooks) for side, hooks in sides.items()}
        self._style.src_data_rank = self.src_data_rank
        self._style._apply(module, device_mesh)
        for side, hooks in sides.items():
            compare = partial(_check_even, f"{which}'s {side}", device_mesh.size())
            for key in hooks.keys() - earlier[side]:
                hooks[key] = partial(_compared, hooks[key], compare, side == "output")
        return module


def _compared(
    hook: Callable[..., Any],
    compare: Callable[[list[torch.Size], list[torch.Size]], None],
    is_of_output: bool,
    module: nn.Module,
    *values: Any,
) -> Any:
    """A hook's result for (args,) or (args, kwargs), or for the output behind them."""
    found = hook(module, *values)
    if found is not None:
        compare(_sizes(values[-1:] if is_of_output else values), _sizes(found))
    return found


def _check_even(
    which: str, num_workers: int, before: list[torch.Size], after: list[torch.Size]
) -> None:
    for whole_size, size in zip(before, after, strict=False):
        for dim, (whole, part) in enumerate(zip(whole_size, size, strict=False)):
            if part < whole != part * num_workers:
                raise UsageError(
                    f"{which} {list(whole_size)} is cut along dimension {dim}, which must be a"
                    f" multiple of the {num_workers} workers: pad it, or have `plan` keep DTensors"
                    " by use_local_output=False."
                )


def _sizes(value: Any) -> list[torch.Size]:
    """The sizes of a tensor, or of the tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value.shape]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [size for each in value for size in _sizes(each)]
