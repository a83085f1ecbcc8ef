"""Gradients as whole numbers, whose sum doesn't depend on the order."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from allstep.errors import UsageError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireFormat, WireState

_LIMIT = 2**51  # beyond any sum that decodes to a number
_POISON = 2**52


@dataclass(frozen=True)
class Exact(WireFormat):
    """Sends gradients as 64-bit fixed-point numbers: the same bits in whatever order they add up.

    whole(x) = round(x * 2^fraction_bits)
    sum = (sum_r whole(gradient_r)) / 2^fraction_bits
    |error| <= size * 2^-(fraction_bits + 1), and the rounding of the result

    Whole numbers add up without rounding, so workers may be grouped and ordered in any way.
    Twice the bytes of float32.

    [Note: poison] A sum must stay below 2^51, which is 2,048 for 40 fraction bits. A gradient
    that isn't finite becomes 2^52, so that any sum with up to 4,095 of these is beyond that,
    and any sum beyond that decodes to NaN, for a GradScaler to see.

    Args:
        fraction_bits: bits behind the point, 0 to 51. 40 hold gradients up to 2,048 to 5e-13;
            a GradScaler of scale 2^16 needs 16 fewer.

    Raises:
        UsageError: if `fraction_bits` is out of range.

    >>> exact, out = Exact(), torch.empty(2)
    >>> exact.decode_(exact.encode(torch.tensor([0.1, 7.0])), out, divisor=1)
    >>> out
    tensor([0.1000, 7.0000])

    Source: sums of pre-rounded numbers are exact: Demmel and Nguyen, "Parallel reproducible
    summation", IEEE Transactions on Computers 64 (7), 2015.
    """

    fraction_bits: int = 40

    name: ClassVar[str] = "exact"
    dtype: ClassVar[torch.dtype] = torch.int64

    def __post_init__(self) -> None:
        bits = self.fraction_bits
        if isinstance(bits, bool) or not isinstance(bits, int) or not 0 <= bits <= 51:
            raise UsageError(f"`fraction_bits` (={bits!r}) must be an int from 0 to 51.")

    def encode(self, x: Tensor, name: str = "") -> Tensor:
        """x as whole numbers. [Note: poison]

        Args:
            x: any shape, real floating point.
            name: of the parameter, for the error.

        Returns:
            Of x's shape, int64.

        Raises:
            UsageError: if x holds a finite number out of range. On CUDA, where looking would
                stop the host, it decodes to NaN instead.
        """
        # A power of two changes no digit, so that float32 needs no more digits for it.
        scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * 2.0**self.fraction_bits
        if _is_within_limit(scaled):
            return scaled.round_().long()
        fits = scaled.abs() < _LIMIT
        if not x.is_cuda:
            self._refuse_large(x, fits, name)
        return torch.where(fits, scaled.round_(), _POISON).long()

    def decode_(self, whole: Tensor, out: Tensor, divisor: float = 1) -> None:
        """out = whole / 2^fraction_bits / divisor; NaN where the sum was poisoned.

        Args:
            whole: a sum of encoded numbers, int64.
            out: of its shape, real floating point; overwritten.
            divisor: what the sum is divided by.
        """
        values = whole.double()
        poisoned = None if _is_within_limit(whole) else values.abs() >= _LIMIT
        values.div_(divisor * 2.0**self.fraction_bits)
        out.copy_(values if poisoned is None else values.masked_fill_(poisoned, torch.nan))

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`.

        Behind all else ride marks for parameters out of range, by which every worker raises.
        """
        if flat.dtype is torch.int64:
            transport.all_reduce(flat)  # encoded already
            return
        n, end = layout.num_elements, flat.numel()
        whole = torch.zeros(end + len(layout.names), dtype=torch.int64, device=flat.device)
        whole[n:end] = flat[n:]
        refusal: UsageError | None = None
        sizes = zip(layout.names, layout.offsets, layout.sizes, strict=True)
        for index, (name, offset, size) in enumerate(sizes):
            piece = slice(offset, offset + size)
            try:
                whole[piece] = self.encode(flat[piece], name)
            except UsageError as error:
                refusal, whole[end + index] = refusal or error, 1
        transport.all_reduce(whole)
        if not whole.is_cuda and whole[end:].any():
            first = int(whole[end:].nonzero()[0])
            raise refusal or self._refusal_of_another(layout.names[first])
        self.decode_(whole[:n], flat[:n])
        flat[n:] = whole[n:end]

    def _refusal_of_another(self, name: str) -> UsageError:
        return UsageError(
            f"Parameter `{name}` has a gradient beyond the {self._limit} that `fraction_bits`"
            f" (={self.fraction_bits}) leave, on another worker, whose error says how many have"
            " room."
        )

    @property
    def _limit(self) -> str:
        return f"{_LIMIT / 2.0**self.fraction_bits:,.4g}"

    def _refuse_large(self, x: Tensor, fits: Tensor, name: str) -> None:
        large = x[fits.logical_not() & x.isfinite()]
        if not large.numel():
            return
        largest = float(large.abs().max())
        which = f"Parameter `{name}`" if name else "A parameter"
        fitting = [b for b in range(self.fraction_bits) if largest * 2.0 ** (b + 4) < _LIMIT]
        cure = f"`Exact(fraction_bits={fitting[-1]})` has room" if fitting else '"fp32" has room'
        raise UsageError(
            f"{which} has a gradient of {largest:.3g}, beyond the {self._limit} that"
            f" `fraction_bits` (={self.fraction_bits}) leave; {cure}."
        )


def _is_within_limit(numbers: Tensor) -> bool:
    """Whether all are sure to be; on CUDA, where the host would have to wait, nothing is sure."""
    if numbers.is_cuda:
        return False
    if not numbers.numel():
        return True
    smallest, largest = torch.aminmax(numbers)
    return bool(smallest > -_LIMIT) and bool(largest < _LIMIT)
