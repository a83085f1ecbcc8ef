"""Gradients in 8 bits."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from allstep.errors import check_integer
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireState
from allstep.exchange.wires.blocks import BlockParts
from allstep.exchange.wires.error_feedback import LossyFormat, keep_unsent, with_residual


@dataclass(frozen=True)
class Int8(LossyFormat):
    """Sends gradients as whole numbers from -127 to 127, with a float32 scale for each block.

    Each worker owns an equal part of the bucket. The parts go to their owners, who add them up in
    float32 and send the sum to all:

        v_r    = gradient_r + residual_r
        q(v)   = scale * round(v / scale)            scale = max |v| / 127, in each block
        s      = sum_r q(v_r)                        at the owner
        sum    = q(s)
        residual_r = v_r - q(v_r),  and for the owner  + s - q(s)

    See [Note: error feedback]. At any number of workers (1 + 4 / block) / 4 of the bytes of a
    float32 ring are sent.

    |error| <= size * max_r |v_r| / 127, over the blocks that an element was in

    Args:
        block: elements that share a scale.
        error_feedback: False forgets what was not sent.

    Raises:
        UsageError: if `block` isn't positive.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016,
    arXiv:1511.04561; the two phases follow Tang et al., "1-bit Adam", 2021, arXiv:2102.02888.
    """

    block: int = 256
    error_feedback: bool = True

    name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        check_integer("block", self.block)

    def _sum(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        n = layout.num_elements
        parts = BlockParts.of(n, layout.num_tail, transport.size, self.block)
        wanted = with_residual(flat, layout, state)
        values = parts.split(wanted)
        message = parts.encode_(values, parts.split_tail(flat[n:]))
        keep_unsent(state, parts.join(values))

        tails = parts.decode(transport.all_to_all(message), values)
        total = values.sum(0, keepdim=True)
        tail = tails.sum(0, keepdim=True, dtype=torch.int32).clamp_(-127, 127)  # zero stays zero
        message = parts.encode_(total, tail)
        self._keep_owned(total, parts.owned(transport.rank), state)

        tails = parts.decode(transport.all_gather(message[0]), values)
        flat[:n] = parts.join(values)
        flat[n:] = tails.reshape(-1)[: layout.num_tail]

    def _keep_owned(self, unsent: Tensor, owned: slice, state: WireState) -> None:
        """Adds the unsent rest of the owner's part of the sum to its residual."""
        if state.residual is not None:
            residual = state.residual[owned]
            residual += unsent.view(-1)[: len(residual)].nan_to_num(0.0, 0.0, 0.0)
