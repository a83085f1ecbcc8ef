"""Cross-entropy and predictions from logits that may be sharded along the vocabulary."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.tensor import DTensor

_NOT_COUNTED = -100


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the targets' cross-entropies in nats; targets of -100 are ignored.

    Args:
        logits: logits [targets, vocab_size]; if a DTensor, sharded evenly along the vocabulary.
        targets: tokens, int64 [targets].
    """
    if type(logits) is Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")
    found: Tensor = _ShardedCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def most_likely(logits: Tensor) -> Tensor:
    """The tokens with the largest logits, int64 [targets]. Collective if logits are sharded."""
    found: Any = logits.argmax(1)
    return found if type(found) is Tensor else found.full_tensor()


class _ShardedCrossEntropy(torch.autograd.Function):
    """loss = sum over targets of log(sum over tokens v of exp(x_v)) - x_target

    It allocates one tensor of the size of a worker's part of the logits, which becomes their
    gradient; torch's `loss_parallel` allocates four. Workers exchange three numbers per target.
    """

    @staticmethod
    def forward(ctx: Any, logits: "DTensor", targets: Tensor) -> Tensor:
        mesh, local = logits.device_mesh, logits.to_local()
        num_tokens, group = local.shape[1], mesh.get_group()
        own_target = targets - mesh.get_local_rank() * num_tokens
        is_here = (own_target >= 0) & (own_target < num_tokens)
        column = own_target.where(is_here, 0)[:, None]

        largest = local.amax(1, keepdim=True).to(torch.promote_types(local.dtype, torch.float32))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        x_target = (local.gather(1, column) - largest)[:, 0].where(is_here, 0)
        powers = (local - largest).exp_()
        sums = torch.stack((powers.sum(1), x_target))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, x_target = sums

        is_counted = targets != _NOT_COUNTED
        gradient = powers.mul_((is_counted / total)[:, None])
        gradient.scatter_add_(1, column, -is_here[:, None].to(gradient.dtype))
        ctx.save_for_backward(gradient)
        ctx.layout = mesh, logits.placements, logits.shape, logits.stride(), logits.dtype
        loss: Tensor = (total.log() - x_target).where(is_counted, 0).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, None]:
        from torch.distributed.tensor import DTensor

        (gradient,), (mesh, placements, shape, stride, dtype) = ctx.saved_tensors, ctx.layout
        local = (gradient * factors[0]).to(dtype)
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride), None
