"""Cross-entropy and predictions of logits that are whole or sharded by tokens of the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the targets' cross-entropies, nats; those that are -100 don't count.

    Args:
        logits: [targets, vocab_size]; a DTensor that is sharded along the vocabulary stays so.
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
    """By torch's `loss_parallel`, whose context must hold forward and backward pass.

    The gradient is found at once, so that the caller's backward pass needs no context and nothing
    else that is differentiated in it is changed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with torch.enable_grad(), loss_parallel():
            logits = logits.detach().requires_grad_()
            total: Any = F.cross_entropy(logits, targets, reduction="sum")
            ctx.save_for_backward(*torch.autograd.grad(total, logits))
        local: Tensor = total.detach().to_local()
        return local

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * factors[0], None
