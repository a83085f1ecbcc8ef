"""Batch norm with statistics over several workers' samples of the same time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from allstep.comm import Communicator


def batch_norm_across(
    comm: Communicator, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalises by the statistics over all workers' samples.

    y = (x - mean) / sqrt(var + eps) * weight + bias, mean and (biased) var per channel over the
    samples of all workers, each sample counted once: shares may differ, and may be empty.

    The gradient of weight and bias is that of the worker's own samples, as every other
    parameter's. One collective in forward, one in backward if `x` needs a gradient.

    Args:
        comm: whose workers form the group; all of them must call this.
        x: (samples, channels, *), this worker's samples, maybe none.
        weight, bias: (channels,) or None.
        eps: added to the variance.

    Returns:
        y, and without gradient mean, unbiased variance and the number of values per channel
        (a scalar tensor); of x's device, the last three at least in float32.
    """
    with torch.no_grad():
        mean, sum_of_squares, count = _statistics(comm, x)
        invstd = (sum_of_squares / count.clamp(min=1) + eps).rsqrt()
    y: Tensor = _Normalise.apply(comm, x, weight, bias, mean, invstd, count)  # type: ignore[no-untyped-call]
    return y, mean, sum_of_squares / (count - 1).clamp(min=1), count


def _statistics(comm: Communicator, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations from it, and number of values, per channel.

    Each worker sends its own three, so that no small difference of large sums is taken:

        mean = sum_r n_r mean_r / n        M = sum_r M_r + n_r (mean_r - mean)^2
    """
    channels = x.shape[1]
    exact = x.to(statistics_dtype(x))
    dims = all_but_channels(x)
    count = x.numel() // channels
    rows = exact.new_zeros(comm.size, 2 * channels + 1)
    if count:
        var, mean = torch.var_mean(exact, dims, correction=0)
        rows[comm.rank] = torch.cat([mean, var * count, mean.new_full((1,), count)])
    comm.all_reduce(rows)  # one row a worker: the sum gathers them
    means, squares, counts = torch.split(rows, [channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), total


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
    ) -> Tensor:
        ctx.comm = comm
        ctx.save_for_backward(x, weight, mean, invstd, count)
        scale = invstd if weight is None else invstd * weight
        # The difference first: folded in one shift, a mean far from zero would cost digits.
        y = (x - per_channel(mean, x)) * per_channel(scale, x)
        y = y if bias is None else y + per_channel(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With x' = (x - mean) invstd and sums over the samples of all workers,

        dx = weight invstd (dy - (sum dy + x' sum dy x') / n)
        """
        x, weight, mean, invstd, count = ctx.saved_tensors
        dims = all_but_channels(x)
        exact = grad.to(mean.dtype)
        normal = (x - per_channel(mean, x)) * per_channel(invstd, x)
        sums = torch.stack([exact.sum(dims), (exact * normal).sum(dims)])
        grad_bias, grad_weight = sums.clone().unbind()
        grad_x = None
        if ctx.needs_input_grad[1]:
            total, along = ctx.comm.all_reduce(sums) / count.clamp(min=1)
            scale = invstd if weight is None else invstd * weight
            centred = exact - per_channel(total, x) - normal * per_channel(along, x)
            grad_x = (centred * per_channel(scale, x)).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[2:4]
        return (
            None,
            grad_x,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias if needs_bias else None,
            None,
            None,
            None,
        )


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over x: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def all_but_channels(x: Tensor) -> list[int]:
    """The dims of x, (samples, channels, *), over which statistics per channel are computed."""
    return [0, *range(2, x.dim())]


def per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """One number per channel, to be broadcast over x, (samples, channels, *)."""
    return numbers.view(1, -1, *[1] * (x.dim() - 2))
