"""Gradients as products of thin matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from allstep.errors import check_integer
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireState
from allstep.exchange.wires.error_feedback import (
    LossyFormat,
    keep_unsent,
    with_residual,
    working_dtype,
)

_SEED = 1905_13727


@dataclass(frozen=True)
class PowerSGD(LossyFormat):
    """Sends a low-rank approximation of each matrix, found by one step of power iteration.

    M_r = gradient_r + residual_r, as a matrix of shape[0] rows
    P = orthonormal columns of  sum_r M_r Q
    Q_r = M_r^T P,  Q = sum_r Q_r      the next step starts with this Q
    sum = P Q^T,  residual_r = M_r - P Q_r^T

    All P of a bucket are summed at once, then all Q. Vectors, and matrices that would not become
    smaller, are sent as they are, beside P. The result has the same bits on workers whose
    hardware is alike. See [Note: error feedback].

    Where the paper's residual is M_r - P Q^T, ours has the worker's own Q_r: the sum of the
    residuals is the same, and a worker without a gradient owes nothing.

    |error| = |M - P P^T M| with M the sum of the M_r: what one step of the iteration leaves

    Args:
        rank: columns of P and Q.
        error_feedback: False forgets what was not sent.

    Raises:
        UsageError: if `rank` isn't positive.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2.
    """

    rank: int = 4
    error_feedback: bool = True

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, cure="1 to 4 is usual")

    def new_state(self, layout: BucketLayout) -> WireState:
        """See `WireFormat`."""
        num_q = sum(m.columns * m.rank for m in self._matrices(layout))
        generator = torch.Generator().manual_seed(_SEED)  # the same on every worker
        q = torch.randn(num_q, generator=generator, dtype=working_dtype(layout))
        return WireState(super().new_state(layout).residual, {"q": q.to(layout.device)})

    def _sum(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        matrices = self._matrices(layout)
        wanted = with_residual(flat, layout, state)
        views, sums = _real(layout.views(wanted)), _real(layout.views(flat))
        compressed = {m.index for m in matrices}
        whole = [i for i in range(len(views)) if i not in compressed]
        tail = flat[layout.num_elements :]

        m_r = [views[m.index].reshape(m.rows, m.columns) for m in matrices]
        old_q = _unpack(state.tensors["q"], [(m.columns, m.rank) for m in matrices])
        message = _pack([*map(torch.matmul, m_r, old_q), *(views[i] for i in whole), tail])
        transport.all_reduce(message)
        shapes = [*((m.rows, m.rank) for m in matrices), *(views[i].shape for i in whole)]
        *summed, summed_tail = _unpack(message, [*shapes, tail.shape])
        tail.copy_(summed_tail)
        for i, total in zip(whole, summed[len(matrices) :], strict=True):
            sums[i].copy_(total)
            views[i].sub_(views[i].clone())  # sent; NaN where it wasn't finite

        p = [torch.linalg.qr(total).Q for total in summed[: len(matrices)]]
        message = _pack([x.T @ y for x, y in zip(m_r, p, strict=True)])
        for m, x, q in zip(matrices, p, _unpack(message, [y.shape for y in old_q]), strict=True):
            views[m.index].sub_((x @ q.T).view_as(views[m.index]))
        keep_unsent(state, wanted)
        transport.all_reduce(message)
        new_q = _unpack(message, [y.shape for y in old_q])
        for m, x, old, new in zip(matrices, p, old_q, new_q, strict=True):
            sums[m.index].copy_((x @ new.T).view_as(sums[m.index]))
            is_useful = new.isfinite().all() & new.any()  # else P would be lost for ever
            old.copy_(torch.where(is_useful, new, old))

    def _matrices(self, layout: BucketLayout) -> list["_Matrix"]:
        """The parameters that are worth compressing, as matrices."""
        found = []
        for index, (shape, size) in enumerate(zip(layout.shapes, layout.sizes, strict=True)):
            if len(shape) < 2 or not size:
                continue
            rows, columns = shape[0], size // shape[0]
            rank = min(self.rank, rows, columns)
            if rank * (rows + columns) < size:
                found.append(_Matrix(index, rows, columns, rank))
        return found


@dataclass(frozen=True)
class _Matrix:
    """A parameter as a matrix.

    Attributes:
        index: in the layout.
        rows, columns: of the matrix.
        rank: of its approximation.
    """

    index: int
    rows: int
    columns: int
    rank: int


def _real(views: Sequence[Tensor]) -> list[Tensor]:
    """Views of complex tensors as real ones."""
    return [torch.view_as_real(view) if view.is_complex() else view for view in views]


def _pack(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors in one message."""
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else torch.empty(0)


def _unpack(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a message, one for each packed tensor."""
    sizes = [prod(shape) for shape in shapes]
    return [x.view(tuple(s)) for x, s in zip(message.split_with_sizes(sizes), shapes, strict=True)]
