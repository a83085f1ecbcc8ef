"""Batch norm's statistics for evaluation: those of training's last step, or new ones."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn.batch_norm_across import all_but_channels


def keep_last_statistics(model: nn.Module) -> nn.Module:
    """Batch norm without moving averages: evaluation uses only the statistics of the last step.

    R = sum_k w_k s_k over the last step's micro-batches k, w_k their share of the samples; that
    is momentum 1. `exchange.sync_buffers` takes the mean over the workers, as `fit` does before
    each evaluation. At extremely large batches one step sees samples enough, and the moving
    averages lag behind weights that change fast.

    Args:
        model: changed in place; may be attached already.

    Returns:
        The model.

    >>> keep_last_statistics(nn.BatchNorm1d(2)).momentum
    1.0

    Source: Akiba, Suzuki and Fukuda, 2017, arXiv:1711.04325, section 2.
    """
    for norm in _norms(model):
        norm.momentum = 1.0
    return model


@torch.no_grad()
def precise_batch_norm(model: nn.Module, batches: Iterable[Any], comm: Communicator) -> None:
    """Sets the running statistics to those over all samples, with the present weights.

    running_mean = mean(x), running_var = var(x), over all batches on all workers together

    All but the batch norms is in eval mode meanwhile: as at evaluation, dropout is off. A mean of
    the batches' own variances would leave out how much their means differ, which is most of the
    variance where batches are small and maps smooth.

    Args:
        model: whose running statistics are replaced; a batch norm that no batch reached keeps
            its own, and so does one in eval mode in a model that is in training mode (frozen).
        batches: this worker's, on the model's device: inputs, or tuples that begin with them;
            200 micro-batches over all workers are plenty. Workers may have different numbers,
            unless batch norm's groups span several workers.
        comm: the workers; all of them must call this.

    Raises:
        UsageError: if no worker has a batch, or `batches` is one.

    >>> norm = nn.BatchNorm1d(1)
    >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]
    >>> precise_batch_norm(norm, batches, Communicator.single_process())
    >>> norm.running_mean, norm.running_var
    (tensor([4.]), tensor([6.6667]))

    Source: Wu and Johnson, 2021, arXiv:2105.07576, section 3.
    """
    if isinstance(batches, Tensor):
        raise UsageError(
            f"`batches` (a tensor of shape {tuple(batches.shape)}) must be several; pass"
            " `batches.split(64)`, or [batches]."
        )
    norms = [
        norm
        for norm in _norms(model)
        if norm.running_mean is not None and (norm.training or not model.training)
    ]
    sums = [_Sums(norm) for norm in norms]
    num_batches = torch.zeros((), dtype=torch.float64)
    with _statistics_alone(model, norms), ExitStack() as hooks:
        for norm, own in zip(norms, sums, strict=True):
            hooks.callback(norm.register_forward_pre_hook(own.add).remove)
        try:
            for batch in batches:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
                num_batches += 1
        except BaseException:
            for own in sums:
                own.put_back()
            raise
    totals = (num_batches.to(comm.device), *(own.total for own in sums))
    comm.all_reduce(totals)
    if not totals[0]:
        raise UsageError("`batches` is empty on every worker: give at least one batch.")
    for own in sums:
        own.restore()


class _Sums:
    """Sums over a batch norm's inputs by channel: x, its square and, last, their number."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None and norm.running_var is not None
        self._running = norm.running_mean, norm.running_var
        self._before = [running.clone() for running in self._running]
        num_channels = len(norm.running_mean)
        self.total = norm.running_mean.new_zeros(2 * num_channels + 1, dtype=torch.float64)

    def add(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        if not x.numel():
            return
        variance, mean = torch.var_mean(x.double(), all_but_channels(x), correction=0)
        num_values = x.numel() // x.shape[1]
        self.total[:-1].add_(torch.cat([mean, variance + mean.square()]), alpha=num_values)
        self.total[-1] += num_values

    def restore(self) -> None:
        """Sets the running statistics, or restores them where there was no input."""
        num_values = self.total[-1]
        if not num_values:
            self.put_back()
        else:
            mean, square = (self.total[:-1] / num_values).chunk(2)
            unbiased = num_values / (num_values - 1).clamp(min=1)  # as torch's running_var is
            self._set(mean, (square - mean.square()).clamp(min=0) * unbiased)

    def put_back(self) -> None:
        """Restores the running statistics."""
        self._set(*self._before)

    def _set(self, *values: Tensor) -> None:
        for running, value in zip(self._running, values, strict=True):
            running.copy_(value)


@contextmanager
def _statistics_alone(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Makes batch norms use each call's own statistics, and all other modules evaluate."""
    modes = [(module, module.training) for module in model.modules()]
    settings = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    counts = [None if count is None else count.clone() for _, _, count in settings]
    model.eval()
    for norm in norms:
        norm.training, norm.momentum = True, 1.0
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for (norm, momentum, counter), count in zip(settings, counts, strict=True):
            norm.momentum = momentum
            if counter is not None and count is not None:
                counter.copy_(count)


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
