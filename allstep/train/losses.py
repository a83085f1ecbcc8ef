"""A worker's losses of one global batch, and the weight of each."""

import math

import torch
from torch import Tensor

from allstep.comm.reproducible import digits_of, sum_of_digits
from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.exchange.weighing import mixed_message


class Losses:
    """This worker's losses of a global batch: means over samples, or sums with a weight.

    [Note: weights] says how they are weighed; all of a global batch are of one kind.

    Args:
        exchanges: the exchanges of the gradients.
        num_samples: samples of the whole global batch, over all workers.
    """

    def __init__(self, exchanges: tuple[Exchange, ...], num_samples: int) -> None:
        self._exchanges = exchanges
        self._num_samples = num_samples
        self._found: list[tuple[Tensor, float, float]] = []  # losses with their factors and weights
        self._are_sums: bool | None = None
        self._num_before = 0  # losses before this micro-batch
        self._share = 0.0  # the micro-batch's share of the samples
        self._weight: float | None = None  # of the micro-batch

    @property
    def is_kind_open(self) -> bool:
        """Whether no loss has been added yet."""
        return self._are_sums is None

    @property
    def sum_factor(self) -> float:
        """A power of two near 1 / num_samples: multiplying by it is exact. [Note: weights]"""
        return 2.0 ** (1 - self._num_samples.bit_length())

    @property
    def gradient_share(self) -> float:
        """The factor of the micro-batch's mean gradient in `p.grad` before the exchange."""
        return self._share if self._weight is None else self.sum_factor * self._weight

    def statistics_share(self) -> float:
        """The weight of the micro-batch's statistics, once its loss is known."""
        return self._share if self._weight is None else self._weight

    def begin_pass(self) -> None:
        """Resets the sums before a pass over all micro-batches."""
        self._found.clear()
        self._are_sums = None

    def begin_micro_batch(self, num_samples: int) -> None:
        """The losses that follow belong to the next micro-batch."""
        self._share, self._weight = num_samples / self._num_samples, None
        self._num_before = len(self._found)

    def end_micro_batch(self) -> None:
        """Ends a micro-batch; one without a loss counts as a mean."""
        if len(self._found) == self._num_before:
            self._note_kind(is_sum=False)

    def add(self, loss: Tensor, weight: float | None) -> float:
        """Adds a loss; returns the factor to multiply it by before it is differentiated.

        Args:
            loss: a scalar; the mean over the micro-batch, or with `weight` a sum.
            weight: the weight of a sum; None for a mean.

        Raises:
            UsageError: if `loss` is not a one-element tensor, if weights can't be used here, or if
                only some losses have one.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else loss
            raise UsageError(
                f"`loss` ({type(loss).__name__} {what}) must be a tensor of one number, as the"
                " criterion returns it: the mean over the micro-batch's samples, or with `weight`"
                " a sum."
            )
        factor = self._share
        if weight is None:
            self._note_kind(is_sum=False)
        else:
            self._check_weight(weight)
            self._note_kind(is_sum=True)
            self._exchanges[0].batch.weighing.add(weight)
            self._weight, factor = weight, self.sum_factor
        self._found.append((loss.detach().reshape(()), factor, weight or 0.0))
        return factor

    def local_sums(self, device: torch.device) -> Tensor:
        """Sums of this worker's losses and weights; `mean_of` takes their sum over the workers."""
        total = digits_of(torch.zeros(3, device=device))
        are_sums = bool(self._are_sums)
        for loss, factor, weight in self._found:
            numbers = torch.tensor((weight, float(are_sums)), dtype=torch.float64)
            total[0] += digits_of(loss.double() * (1.0 if are_sums else factor)).to(total)
            total[1:] += digits_of(numbers).to(total, non_blocking=True)
        return total

    def _check_weight(self, weight: float) -> None:
        if len(self._exchanges) > 1:
            raise UsageError(
                f"`weight` (={weight}) needs a single exchange; {len(self._exchanges)} were given"
                " to `steps`. Put the models in one `torch.nn.ModuleList` and attach that, or give"
                " means."
            )
        (exchange,) = self._exchanges
        if exchange.averaging is not None and exchange.is_exact and exchange.statistics.has_modules:
            raise UsageError(
                f"`weight` (={weight}) weighs batch norm's running statistics, too, by a total that"
                ' workers don\'t have in the local steps of `LocalSGD(compression="exact")`. Use'
                ' compression="fp32", or layer norm.'
            )
        if exchange.policy.staleness and exchange.statistics.has_modules:
            raise UsageError(
                f"`weight` (={weight}) weighs batch norm's running statistics, too, by a total that"
                " comes with the gradients, which"
                f" `Stale(steps={exchange.policy.staleness})` gives steps later. Use another"
                " policy, or layer norm."
            )
        if self._weight is not None:
            raise UsageError(
                f"`backward` was called twice with `weight` (={weight}) for one micro-batch. Add"
                " the losses and call it once."
            )

    def _note_kind(self, *, is_sum: bool) -> None:
        """Raises if a loss is a weighted sum while the batch's others are means, or vice versa."""
        if self._are_sums is None:
            self._are_sums = is_sum
        if self._are_sums != is_sum:
            comm = self._exchanges[0].comm
            has_both = [comm.rank == other for other in range(comm.size)]
            raise UsageError(mixed_message(has_both, has_both))
        if not is_sum:
            for exchange in self._exchanges:
                exchange.batch.weighing.add_mean()


def mean_of(sums: Tensor) -> float:
    """The mean loss from the sum of all workers' `Losses.local_sums`."""
    loss_sum, weights, num_weighed = sum_of_digits(sums).tolist()
    if not num_weighed:
        return float(loss_sum)
    return loss_sum / weights if weights else math.nan
