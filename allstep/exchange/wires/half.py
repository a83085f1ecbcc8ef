"""Gradients in 16 bits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import UsageError, check_choice
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireFormat, WireState


@dataclass(frozen=True)
class _Half(WireFormat):
    """A sum in 16 bits. [Note: overflow on the wire]

    What is summed has been divided by the number of workers, or weighed by samples, so that the sum
    can't overflow where no gradient does. On the way out a finite number that becomes infinite is
    made +inf, and one that wasn't finite is made NaN. In a sum NaN wins over inf, and inf over
    all finite numbers. So each worker can tell from the sum alone what has happened, and either
    all raise or none does.
    """

    on_overflow: Literal["raise", "inf"] = "raise"

    cure: ClassVar[str]

    def __post_init__(self) -> None:
        check_choice("on_overflow", self.on_overflow, ("raise", "inf"))

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`."""
        if transport.size == 1:
            return
        payload = flat.to(self.dtype, copy=True)
        if not _is_finite(payload):
            payload = torch.where(payload.isinf(), payload.abs(), payload)
            payload.masked_fill_(flat.isfinite().logical_not_(), torch.nan)
        transport.all_reduce(payload)
        if self.on_overflow == "raise" and not _is_finite(payload):
            self._refuse_overflow(payload, layout)
        flat.copy_(payload)

    def _refuse_overflow(self, payload: Tensor, layout: BucketLayout) -> None:
        overflowed = payload[: layout.num_elements].isinf().nonzero()
        if len(overflowed):
            name = layout.name_at(int(overflowed[0]))
            largest = torch.finfo(self.dtype).max
            raise UsageError(
                f"Parameter `{name}` has a gradient beyond {largest:.5g}, the largest number of"
                f" `compression` (={self.name!r}); {self.cure}"
            )


@dataclass(frozen=True)
class Float16(_Half):
    """Sends gradients as float16: 11 bits, numbers from 6e-8 to 65,504.

    sum = sum_r float16(gradient_r)
    |error| <= size * (2^-11 * max_r |gradient_r| + 2^-25)

    Smaller numbers vanish; `BFloat16` keeps them.

    Args:
        on_overflow: what becomes of a finite gradient beyond 65,504. "raise" is an error on
            every worker that names the parameter; "inf" lets it arrive infinite, for a
            GradScaler that then skips the step and lowers its scale. On CUDA, where looking
            would stop the host, it is always "inf". What wasn't finite before arrives as NaN
            or infinite in either case.

    Raises:
        UsageError: if `on_overflow` is unknown.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    cure: ClassVar[str] = (
        'use "bf16", or lower the scale of the GradScaler, which `Float16(on_overflow="inf")`'
        " lets it do by itself."
    )


@dataclass(frozen=True)
class BFloat16(_Half):
    """Sends gradients as bfloat16: 8 bits, the range of float32.

    sum = sum_r bfloat16(gradient_r)
    |error| <= size * 2^-8 * max_r |gradient_r|

    Args:
        on_overflow: as of `Float16`, for gradients beyond 3.4e38.

    Raises:
        UsageError: if `on_overflow` is unknown.
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    cure: ClassVar[str] = 'use "fp32", or look for the cause of so large a number.'


def _is_finite(payload: Tensor) -> bool:
    """Whether all elements are finite; True on CUDA, where the host would have to wait."""
    if is_accelerator(payload.device) or not payload.numel():
        return True
    if payload.sum().isfinite():  # then all are; twice as fast
        return True
    smallest, largest = payload.aminmax()  # NaN if there is one
    return bool(smallest.isfinite() & largest.isfinite())
