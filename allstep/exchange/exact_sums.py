"""Sums of the same bits on any number of workers: what "exact" adds to an exchange. [Note: grid]"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm.reproducible import ReproducibleSum
from allstep.device import is_accelerator, read_scalars
from allstep.errors import UsageError
from allstep.exchange.buckets import BucketSet, has_form_of
from allstep.exchange.grid import Grid, Unit
from allstep.exchange.parameters import ParameterSet


class ExactSums:
    """Rounds a global batch's gradients to a grid; what doesn't fit goes beside it.

    Args:
        device: where gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grid = Grid()
        # Gradients that may not have fitted, with what `Grid.round_unread` says of them.
        self._unread: dict[str, tuple[Tensor, Tensor, Unit]] = {}

    @property
    def num_completed(self) -> int:
        """Exchanges that took a second message, for what didn't fit."""
        return self._grid.num_completed

    @staticmethod
    def refuse_complex(parameters: ParameterSet) -> None:
        """Raises UsageError for gradients whose sums can't be made exact."""
        for name, p in parameters.trained.items():
            if p.dtype.is_complex:
                raise UsageError(
                    f"Parameter `{name}` is {p.dtype}, whose sums can't be made exact; choose"
                    ' another `compression` (="exact").'
                )

    def begin(self, buckets: BucketSet, num_micro_batches: int, num_passes: int) -> None:
        """A global batch begins."""
        self._grid.begin(num_micro_batches, num_passes)
        buckets.off_grid.clear()
        self._unread.clear()

    def begin_micro_batch(self, buckets: BucketSet) -> None:
        """The backward passes that follow are of another micro-batch."""
        self.settle(buckets)
        self._grid.begin_micro_batch()

    def settle(self, buckets: BucketSet) -> None:
        """Adds apart what did not fit so far; on an accelerator the host reads now which it is."""
        unread, self._unread = self._unread, {}
        numbers = read_scalars([share for _, share, _ in unread.values()])
        for (name, (gradient, _, unit)), number in zip(unread.items(), numbers, strict=True):
            if not unit.is_good([number]):
                _add_apart(buckets, name, gradient)

    def round(self, buckets: BucketSet, name: str, p: nn.Parameter, new: Tensor) -> Tensor:
        """What is to be added to `p.grad` for a gradient."""
        with torch.no_grad():
            gradient = new.detach()
            if is_accelerator(new.device):
                rounded = self._round_unread(buckets, name, new)
            else:
                rounded = self._round_in_place(buckets, name, p, gradient)
            if rounded is None:
                _add_apart(buckets, name, gradient)
            if rounded is None or rounded is p.grad:
                rounded = new.new_zeros(()).expand_as(new)  # what is left to be added
        # With a graph for second derivatives the difference is taken off, which is exact.
        return new + (rounded - gradient) if new.requires_grad else rounded

    def _round_unread(self, buckets: BucketSet, name: str, new: Tensor) -> Tensor | None:
        """Keeps the gradient until `settle`, one of each parameter at most."""
        if name in self._unread:
            self.settle(buckets)
        found = self._grid.round_unread(name, new.detach())
        if found is None:
            return None
        rounded, share, unit = found
        self._unread[name] = new, share, unit  # not a view, whose memory autograd may hand on
        return rounded

    def _round_in_place(
        self, buckets: BucketSet, name: str, p: nn.Parameter, gradient: Tensor
    ) -> Tensor | None:
        """Rounds a large gradient where it is to be, for new memory costs more than rounding."""
        held, view = p.grad, buckets.views[name]
        if name not in buckets.plan.large or not has_form_of(view, gradient):
            return self._grid.round(name, gradient)
        if held is None:
            # Another tensor in the bucket's memory, which autograd takes over as it is.
            return self._grid.round(name, gradient, view.view_as(view))
        if has_form_of(held, gradient) and not held.requires_grad and not gradient.requires_grad:
            return self._grid.round(name, gradient, held, adds=True)
        return self._grid.round(name, gradient)

    def follow(
        self, summed: Mapping[str, nn.Parameter], off_grid: Collection[str], num_exchanges: int
    ) -> None:
        """After an exchange: the next units follow its sums."""
        self._grid.num_completed += bool(off_grid)
        names = self._grid.names_to_look_at(num_exchanges, summed, off_grid)
        totals = {name: total for name in names if (total := summed[name].grad) is not None}
        self._grid.look_at(totals, off_grid)

    def state_dict(self) -> dict[str, Any]:
        """The grid, and the threads that a worker's products depend on."""
        return {"grid": self._grid.state_dict(), "num_threads": self._num_threads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`, or from the state of an exchange without exact sums."""
        self._warn_of_other_threads(state.get("num_threads"))
        if state.get("grid"):
            self._grid.load_state_dict(state["grid"], self._device)

    @property
    def _num_threads(self) -> int | None:
        """What the bits of a worker's own products depend on; None on an accelerator."""
        return None if is_accelerator(self._device) else torch.get_num_threads()

    def _warn_of_other_threads(self, saved: int | None) -> None:
        own = self._num_threads
        if None not in (own, saved) and own != saved:
            warnings.warn(
                f"The checkpoint's workers computed with {saved} threads each, these do with {own}:"
                " their products have other last bits, so that the run will not be the same to the"
                f" last bit. Call `torch.set_num_threads({saved})` before the first step.",
                stacklevel=5,
            )


def _add_apart(buckets: BucketSet, name: str, gradient: Tensor) -> None:
    """A gradient that did not fit."""
    if name not in buckets.off_grid:
        buckets.off_grid[name] = ReproducibleSum(gradient)
    buckets.off_grid[name].add(gradient)
