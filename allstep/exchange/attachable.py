"""Refuses models whose gradients another library handles, or which hooks can't reach."""

import torch
from torch import Tensor, nn

from allstep.comm import fsdp_modules
from allstep.comm.ddp import WITHOUT_DDP, is_ddp
from allstep.device import is_capturing
from allstep.errors import UsageError, named_part
from allstep.torch_classes import is_dtensor, loaded_class


def check_module(model: nn.Module) -> None:
    """Checks that an exchange of `model` would train exactly that model.

    Raises:
        UsageError: names the module and the cure.
    """
    for name, module in model.named_modules():
        which = named_part(name)
        kind = type(module).__name__
        if is_ddp(module):
            raise UsageError(
                f"{which} is a DistributedDataParallel, which exchanges the same gradients: attach"
                f" the module inside and call that one, {WITHOUT_DDP}"
            )
        if isinstance(module, loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")):
            raise UsageError(
                f"{which} is a {kind}, which shards and exchanges by itself: attach the module"
                " without FSDP, or sharded by FSDP2's `fully_shard`."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{which} is a {kind}, which takes no hooks: attach the nn.Module that it was made"
                " of; `torch.compile` instead of `torch.jit` may follow."
            )


def check_tensor(name: str, tensor: Tensor) -> None:
    """Checks that a parameter or buffer can be sent as a whole.

    Raises:
        UsageError: if it is a shard of another tensor, or if its elements share memory.
    """
    if is_dtensor(tensor):
        raise UsageError(
            f"`{name}` is a DTensor, and FSDP2 has not sharded the model: divide its layers by"
            " `allstep.nn.tensor_parallel` in place of `parallelize_module`."
        )
    is_dense = tensor.layout == torch.strided
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if is_dense else ()
    if any(size > 1 and stride == 0 for size, stride in pairs):
        raise UsageError(
            f"`{name}` has elements that share memory (shape {tuple(tensor.shape)}, strides"
            f" {tensor.stride()}, as after `expand`), and can't be written to: make it of"
            " `tensor.contiguous()`."
        )


def check_sharded_before(model: nn.Module) -> None:
    """Checks that FSDP2 has not sharded the model after it was attached."""
    if fsdp_modules(model):
        raise UsageError(
            "`model` is sharded by FSDP2 since it was attached: call `fully_shard` before"
            " `attach`, or `detach()` before it and attach again."
        )


def refuse_capture(device: torch.device) -> None:
    """Refuses CUDA graph capture: a replay would not compare what the workers exchange."""
    if torch.is_grad_enabled() and is_capturing(device):
        raise UsageError(
            "A training step of an attached model is captured in a graph; the workers agree on"
            " each step, which a graph can't repeat. Capture parts of the model"
            " (torch's `make_graphed_callables`, before `attach`) or the optimizer's step."
        )
