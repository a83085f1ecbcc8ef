"""The states of wire formats for buckets, across plans and in checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import WireFormat, WireState


class WireStates:
    """The states of all buckets; what was not sent of a parameter follows it to other buckets.

    Args:
        wire: the format.
    """

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self._states: dict[BucketLayout, WireState] = {}
        self._unsent: dict[str, Tensor] = {}  # of parameters that are in no bucket at present
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # residuals, earlier values, flags

    @property
    def has_residuals(self) -> bool:
        """Whether something of earlier gradients waits to be sent."""
        return any(state.residual is not None for state in self._states.values())

    def of(self, layout: BucketLayout) -> WireState:
        """A bucket's state; a new bucket's contains the unsent rest of its parameters."""
        if layout in self._states:
            return self._states[layout]
        names = set(layout.names)
        for old in [old for old in self._states if not names.isdisjoint(old.names)]:
            self._drop(old)
        state = self._states[layout] = self._wire.new_state(layout)
        for name, piece in _pieces(layout, state).items():
            if name in self._unsent and self._unsent[name].shape == piece.shape:
                piece.copy_(self._unsent.pop(name))
        return state

    def set_layouts(self, layouts: Sequence[BucketLayout]) -> None:
        """Has states of these buckets and of no others."""
        for layout in self._states.keys() - set(layouts):
            self._drop(layout)
        self._states = {layout: self.of(layout) for layout in layouts}  # by these very objects

    def remember(self, layout: BucketLayout, state: WireState, flags: Mapping[str, Tensor]) -> None:
        """Before a bucket is summed: keeps some parameters' residuals for `restore`.

        Args:
            layout, state: the bucket's.
            flags: name -> the flag in the buckets' tail that will tell whether any worker has a
                gradient for it.
        """
        if state.residual is not None and flags:
            pieces = _pieces(layout, state)
            self._before += [(pieces[n], pieces[n].clone(), flag) for n, flag in flags.items()]

    def restore(self) -> None:
        """Residuals of parameters that no worker has a gradient for are again as they were.

        What was sent of them, and of an earlier gradient in `p.grad`, is used by nobody.
        """
        for residual, before, flag in self._before:
            residual.copy_(torch.where(flag > 0, residual, before))
        self._before.clear()

    def unsent(self) -> dict[str, Tensor]:
        """name -> what this worker has not sent of its gradients, flat."""
        found = dict(self._unsent)
        for layout, state in self._states.items():
            found |= _pieces(layout, state)
        return {name: piece.clone() for name, piece in found.items()}

    def load_unsent(self, unsent: Mapping[str, Tensor]) -> None:
        """Goes on where `unsent` was called, under any buckets."""
        self._states.clear()
        self._unsent = dict(unsent)

    def gather(self, comm: Communicator, layouts: Sequence[BucketLayout]) -> dict[str, Any]:
        """The states of all workers for some buckets; residuals on rank 0 only. Collective."""
        residuals, tensors = self._tensors_of(layouts)
        whole = [layout.without_gaps(residual) for layout, residual in residuals]
        # Each goes to the host before the next comes: all workers' together are many models.
        columns: list[list[Tensor]] = []
        for residual in whole:
            gathered = comm.gather(residual, root=0)
            if gathered is not None:
                columns.append([worker.cpu() for worker in gathered])
        return {
            "residuals": [list(row) for row in zip(*columns, strict=True)] if columns else None,
            "tensors": [tensor.clone() for tensor in tensors],
        }

    def load(
        self, comm: Communicator, layouts: Sequence[BucketLayout], state: Mapping[str, Any]
    ) -> None:
        """Goes on where `gather` was called, with those buckets.

        Each worker gets its own residuals if the number of workers is the same; else an equal
        part of their sum, which is what will be sent.
        """
        self.load_unsent({})
        residuals, tensors = self._tensors_of(layouts)
        for tensor, saved in zip(tensors, state["tensors"], strict=True):
            tensor.copy_(saved)
        workers = state["residuals"]
        if workers is None:
            return
        is_same = len(workers) == comm.size
        for (layout, residual), *saved in zip(residuals, *workers, strict=True):
            own = saved[comm.rank] if is_same else torch.stack(saved).sum(0) / comm.size
            for piece, part in zip(
                layout.pieces(residual), own.split_with_sizes(list(layout.sizes)), strict=True
            ):
                piece.copy_(part)

    def _tensors_of(
        self, layouts: Sequence[BucketLayout]
    ) -> tuple[list[tuple[BucketLayout, Tensor]], list[Tensor]]:
        """Residuals, which are this worker's, and what is the same on all workers."""
        states = [(layout, self.of(layout)) for layout in layouts]
        residuals = [(x, state.residual) for x, state in states if state.residual is not None]
        return residuals, [tensor for _, state in states for tensor in state.tensors.values()]

    def _drop(self, layout: BucketLayout) -> None:
        pieces = _pieces(layout, self._states.pop(layout))
        self._unsent |= {name: piece.clone() for name, piece in pieces.items()}


def _pieces(layout: BucketLayout, state: WireState) -> dict[str, Tensor]:
    """name -> its slice of a bucket's residual; empty for formats without."""
    if state.residual is None:
        return {}
    return dict(zip(layout.names, layout.pieces(state.residual), strict=True))
