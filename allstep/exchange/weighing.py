"""The divisor of a global batch's gradient sums, for losses that are sums themselves."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.torch_classes import local_part

NUM_WEIGHT_DIGITS = 18  # of 7 bits each
_UNIT_BITS = 72  # weights are whole multiples of 2^-72
_SMALLEST, _LARGEST = 2.0**-20, 2.0**48
_LIMB_DIGITS = 6
_LIMB_BITS = 7 * _LIMB_DIGITS
_LIMBS = NUM_WEIGHT_DIGITS // _LIMB_DIGITS


class Weighing:
    """The weighing of one worker's losses in a global batch.

    [Note: weights] A mean over samples is weighed before its backward pass, for the number of
    samples is known. Of sums, over tokens say, only the exchange tells by what to divide:

        grad = sum_k grad of loss_sum_k / sum_k weight_k

    over all micro-batches k of the global batch. Each worker writes its weights' sum, a whole
    number of units, into its own place behind the gradients (`piggyback.write_note`), so that the
    total is exact and the same on any number of workers. The division comes once, after the sum.
    Losses are multiplied by a power of two before, which makes the sums about as large as a mean
    over samples, and costs no digit; half precision would overflow without it.

    Attributes:
        factor: that power of two.
        has_means, has_sums: which losses there were.
        units: of the weights so far.

    >>> weighing = Weighing(factor=0.5)
    >>> weighing.add(3)
    >>> weighing.add(0.25)
    >>> weighing.total()
    3.25
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.has_means = self.has_sums = False
        self.units = 0

    @classmethod
    def of_means(cls) -> "Weighing":
        """The weighing for losses that are means already."""
        weighing = cls()
        weighing.add_mean()
        return weighing

    def add_mean(self) -> None:
        """Adds a loss that is a mean, or a micro-batch without a loss."""
        self.has_means = True

    def add(self, weight: float) -> None:
        """Adds a loss that is a sum.

        Raises:
            UsageError: if the weight can't be one, or the sum of them.
        """
        check_weight(weight)
        self.has_sums = True
        self.units += int(math.ldexp(weight, _UNIT_BITS))
        if self.units >> (7 * NUM_WEIGHT_DIGITS):
            raise UsageError(
                f"`weight` (={weight}): those of this worker's part of a global batch add up to"
                " 2^54 or more; divide all weights, and the losses with them, by one number."
            )

    def total(self) -> float:
        """The weights so far."""
        return float(total_of(torch.tensor([digits_of_units(self.units)])))

    def divisor(self) -> Tensor:
        """The divisor of this worker's sums in steps that are not exchanged."""
        return torch.tensor(self.total() * self.factor, dtype=torch.float64)


@torch.no_grad()
def divide_gradients(parameters: Iterable[nn.Parameter], divisor: Tensor) -> None:
    """Makes sums the weighted mean.

    Args:
        parameters: `p.grad` is divided in place, where there is one.
        divisor: a scalar.
    """
    number = divisor if is_accelerator(divisor.device) else float(divisor)
    for p in parameters:
        if p.grad is not None:
            local_part(p.grad.detach()).div_(number)


def check_weight(weight: float) -> None:
    """Raises UsageError unless sums of such weights are exact."""
    if weight != 0 and not _SMALLEST <= weight <= _LARGEST:
        raise UsageError(
            f"`weight` (={weight}) must be 0 or between 2^-20 and 2^48: give the number of tokens,"
            " frames or boxes, or the sum of their weights, that the loss is the sum over."
        )


def digits_of_units(units: int) -> list[int]:
    """The digits, [NUM_WEIGHT_DIGITS], the lowest first.

    >>> digits_of_units(1 + 2 * 128)[:3]
    [1, 2, 0]
    """
    return [(units >> (7 * i)) % 128 for i in range(NUM_WEIGHT_DIGITS)]


def total_of(digits: Tensor) -> Tensor:
    """The sum of the workers' weights, whose bits don't depend on how they are shared out.

    Args:
        digits: whole numbers, [workers, NUM_WEIGHT_DIGITS].

    Returns:
        A scalar in float64, on the device of `digits`.

    >>> float(total_of(torch.tensor([digits_of_units(5 << 72), digits_of_units(3 << 71)])))
    6.5
    """
    limbs = digits.to(torch.int64).sum(0).view(_LIMBS, _LIMB_DIGITS)
    shifts = torch.arange(0, _LIMB_BITS, 7, device=digits.device)
    sums = (limbs << shifts).sum(1)
    total = torch.zeros((), dtype=torch.float64, device=digits.device)
    carry = torch.zeros_like(sums[0])
    parts = []
    for number in sums.unbind():
        number = number + carry
        carry = number >> _LIMB_BITS
        parts.append((number & ((1 << _LIMB_BITS) - 1)).double())
    parts.append(carry.double())
    for index, part in enumerate(parts):
        total = total + part * 2.0 ** (_LIMB_BITS * index - _UNIT_BITS)
    return total


def mixed_message(has_means: Sequence[bool], has_sums: Sequence[bool]) -> str:
    """Why the workers' losses can't be added up.

    Args:
        has_means, has_sums: of each worker.
    """
    with_weight = [str(rank) for rank, has in enumerate(has_sums) if has]
    without = [str(rank) for rank, has in enumerate(has_means) if has]
    return (
        "In one global batch `batch.backward` was called with `weight=` (rank"
        f" {', '.join(with_weight)}) and without, or not at all for a micro-batch (rank"
        f" {', '.join(without)}): sums and means can't be added. Give `weight=` for every"
        " micro-batch of the global batch (0 where there is nothing to count), or for none."
    )
