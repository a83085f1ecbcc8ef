"""Movements of tensors whose shape and dtype all ranks know: no word about them travels."""

import torch
from torch import Tensor

from allstep.comm.layout import Layout
from allstep.comm.member import Member
from allstep.errors import UsageError

__all__ = ["RowVerbs"]


class RowVerbs(Member):
    """One message where `all_gather` and `all_to_all` first tell each other the shapes.

    Ranks that pass different shapes or dtypes get garbage or a PeerLostError: these are for
    code that has made sure of them before, or passes `check`.
    """

    def all_gather_into_tensor(self, x: Tensor, *, check: bool = False) -> Tensor:
        """Everyone's tensor, stacked.

        Args:
            x: [*shape], of the same shape and dtype on every rank.
            check: whether the ranks first compare verb, shape and dtype; the same on all.

        Returns:
            [size, *shape]; row r is rank r's.

        >>> from allstep.comm import Communicator
        >>> Communicator.single_process().all_gather_into_tensor(torch.ones(2))
        tensor([[1., 1.]])
        """
        if check:
            self._compare("all_gather_into_tensor", _spec(x), "shapes and dtypes")
        raw = _bytes_of(x).to(self._wire.transport_device(x.device))
        parts = self._wire.all_gather(raw, [raw.numel()] * self.size, "all_gather_into_tensor")
        return _rows(parts, x, (self.size, *x.shape))

    def all_to_all_single(self, x: Tensor, *, check: bool = False) -> Tensor:
        """Row r of every rank's tensor goes to rank r.

        Args:
            x: [size, *shape], of the same shape and dtype on every rank.
            check: as of `all_gather_into_tensor`.

        Returns:
            [size, *shape]; row r came from rank r.

        Raises:
            UsageError: if `x` has not `size` rows.
        """
        if not x.dim() or x.shape[0] != self.size:
            raise UsageError(f"`x` has shape {list(x.shape)}; pass {self.size} rows, one a rank.")
        if check:
            self._compare("all_to_all_single", _spec(x), "shapes and dtypes")
        raw = _bytes_of(x).to(self._wire.transport_device(x.device)).chunk(self.size)
        if not x.numel():
            return x.clone()
        sizes_bytes = [piece.numel() for piece in raw]
        return _rows(self._wire.all_to_all(raw, sizes_bytes, "all_to_all_single"), x, x.shape)


def _spec(x: Tensor) -> str:
    return f"of {Layout.of(x)} on {x.device.type}"


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _rows(parts: list[Tensor], x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Adjacent pieces of bytes as one tensor of x's dtype, on its device."""
    return torch.cat(parts).to(x.device).view(x.dtype).view(shape)
