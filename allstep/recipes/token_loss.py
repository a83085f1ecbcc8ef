"""Cross-entropy and predictions of logits that are whole or sharded by tokens of the vocabulary."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.tensor import DTensor

_NOT_COUNTED = -100


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the targets' cross-entropies, nats; those that are -100 don't count.

    Args:
        logits: [targets, vocab_size]; a DTensor is sharded along the vocabulary in equal parts.
        targets: int64 [targets].
    """
    if type(logits) is Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")
    found: Tensor = _ShardedCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def most_likely(logits: Tensor) -> Tensor:
    """The token with the largest logit, int64 [targets]. Collective if they are sharded."""
    found: Any = logits.argmax(1)
    return found if type(found) is Tensor else found.full_tensor()


class _ShardedCrossEntropy(torch.autograd.Function):
    """loss = sum over targets of log(sum over tokens v of exp(x_v)) - x_target

    Of a worker's part of the logits' size there is one tensor beside them, which becomes their
    gradient, where torch's `loss_parallel` has four. Workers exchange three numbers of a target.
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
