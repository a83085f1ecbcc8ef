"""Sums with the same bits on any number of workers, for the policy "exact". [Note: grid]"""

import warnings
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.reproducible import ReproducibleSum
from allstep.device import is_accelerator, read_scalars
from allstep.errors import UsageError
from allstep.exchange.buckets import has_form_of
from allstep.exchange.compiled import compiled_rounding
from allstep.exchange.divided import DividedParameters
from allstep.exchange.grid import Grid, Unit
from allstep.exchange.hooks import will_accumulate

OffGrid = dict[str, ReproducibleSum]  # name -> a worker's gradients that did not fit


class ExactSums:
    """Rounds a global batch's gradients to a grid, and keeps those apart that don't fit.

    Args:
        device: the gradients' device.

    Attributes:
        grid: the grid that gradients are rounded to.
        num_completed: number of exchanges with a second message, for gradients that didn't fit.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.grid = Grid(None if is_accelerator(device) else compiled_rounding())
        # Gradients that may not have fitted, with what `Grid.round_unread` says of them.
        self._unread: dict[tuple[str, int], tuple[Tensor, Tensor, Unit]] = {}  # by (name, rank)
        self._rounded_calls: set[str] = set()  # experts' parameters, whose `p.grad` is next
        self.num_completed = 0

    @staticmethod
    def refuse_complex(parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises UsageError for gradients whose sums can't be made exact."""
        for name, p in parameters.items():
            if p.dtype.is_complex:
                raise UsageError(
                    f"Parameter `{name}` is {p.dtype}, whose sums can't be made exact; choose"
                    ' another `compression` (="exact").'
                )

    def begin(self, off_grid: OffGrid, num_micro_batches: int, num_passes: int) -> None:
        """Called when a global batch begins."""
        self.grid.begin(num_micro_batches, num_passes)
        off_grid.clear()
        self._unread.clear()
        self._rounded_calls.clear()

    def begin_micro_batch(self, off_grid: OffGrid) -> None:
        """Called before the backward passes of each micro-batch."""
        self.settle(off_grid)
        self.grid.begin_micro_batch()

    def settle(self, off_grid: OffGrid) -> None:
        """Adds to `off_grid` what did not fit so far; the host waits for an accelerator here."""
        unread, self._unread = self._unread, {}
        numbers = read_scalars([share for _, share, _ in unread.values()])
        for ((name, _), (gradient, _, unit)), number in zip(unread.items(), numbers, strict=True):
            if not unit.is_good(number):
                _add_apart(off_grid, name, gradient)

    def round(
        self,
        off_grid: OffGrid,
        name: str,
        p: nn.Parameter,
        new: Tensor,
        rank: int = 0,
        view: Tensor | None = None,
    ) -> Tensor:
        """The rounded gradient to add to `p.grad`.

        Args:
            off_grid: receives the gradient if it does not fit.
            name: the parameter's name.
            p: the parameter.
            new: the gradient.
            rank: as in `Grid.round`.
            view: the final place of a large gradient on the CPU, in a bucket.
        """
        rounded = self._round(off_grid, name, p, new, rank, view)
        if rounded is None or rounded is p.grad:
            rounded = new.new_zeros(()).expand_as(new)  # what is left to be added
        # With a graph for second derivatives the difference is taken off, which is exact.
        return new + (rounded - new.detach()) if new.requires_grad else rounded

    def add(
        self, off_grid: OffGrid, name: str, p: nn.Parameter, new: Tensor, view: Tensor | None
    ) -> None:
        """Adds a backward pass's gradient to `p.grad`, rounded.

        Args:
            off_grid, name, p, view: as in `round`.
            new: the pass's gradient, whose memory may be overwritten.
        """
        before = p.grad
        if new.layout != torch.strided:  # which no bucket takes
            p.grad = new if before is None else before + new
            return
        if new.requires_grad:
            with torch.enable_grad():
                rounded = self.round(off_grid, name, p, new)
                p.grad = rounded if before is None else before + rounded
            return
        found = self._round(off_grid, name, p, new, 0, view)
        if before is None:
            p.grad = torch.zeros_like(new) if found is None else found
            if view is not None and p.grad.data_ptr() == view.data_ptr():
                p.grad = view  # and not another tensor there, which would be copied onto itself
        elif found is not None and found is not before:
            before.detach().add_(found)

    def _round(
        self,
        off_grid: OffGrid,
        name: str,
        p: nn.Parameter,
        new: Tensor,
        rank: int,
        view: Tensor | None,
    ) -> Tensor | None:
        """The gradient on the grid; `p.grad` if it was added to it; None if it went apart."""
        gradient = new.detach()
        if is_accelerator(new.device):
            rounded = self._round_unread(off_grid, name, new, rank)
        elif view is not None:
            rounded = self._round_in_place(view, name, p, gradient)
        else:
            rounded = self.grid.round(name, gradient, rank=rank)
        if rounded is None:
            _add_apart(off_grid, name, gradient)
        return rounded

    def round_call(
        self, off_grid: OffGrid, name: str, p: nn.Parameter, rank: int, new: Tensor
    ) -> Tensor | None:
        """The rounded gradient of one worker's data, from a call of a divided module.

        Args:
            off_grid, name, p, new: as in `round`.
            rank: rank of the worker whose data it is.

        Raises:
            UsageError: if a part of the gradient was removed before.
        """
        if not will_accumulate(p):
            return None
        if p._backward_hooks:
            raise UsageError(
                f"Parameter `{name}` has a hook, by `register_hook`, which comes after exact sums"
                " have rounded its gradient: remove it, or put it on what an expert returns."
            )
        self._rounded_calls.add(name)
        return self.round(off_grid, name, p, new, rank) if new.layout == torch.strided else None

    def take_call(self, name: str) -> bool:
        """Whether `round_call` has rounded what is about to be added to `p.grad`; resets it."""
        has_seen = name in self._rounded_calls
        self._rounded_calls.discard(name)
        return has_seen

    def check_call(self, name: str) -> None:
        """Called before a gradient is added to `p.grad` of a divided parameter.

        Raises:
            UsageError: if `round_call` has not rounded it.
        """
        if not self.take_call(name):
            raise UsageError(
                f"Parameter `{name}` got a gradient that no call of its layer has made, as by"
                " reentrant checkpointing in an expert. With exact sums use `use_reentrant=False`,"
                " and experts in their layer only."
            )

    def _round_unread(self, off_grid: OffGrid, name: str, new: Tensor, rank: int) -> Tensor | None:
        """Keeps the gradient until `settle`, at most one for each parameter and micro-batch."""
        if (name, rank) in self._unread:
            self.settle(off_grid)
        found = self.grid.round_unread(name, new.detach(), rank)
        if found is None:
            return None
        rounded, share, unit = found
        self._unread[name, rank] = new, share, unit  # not a view, whose memory autograd may hand on
        return rounded

    def _round_in_place(
        self, view: Tensor, name: str, p: nn.Parameter, gradient: Tensor
    ) -> Tensor | None:
        """Rounds a large gradient into its final place: new memory costs more than rounding."""
        held = p.grad
        if not has_form_of(view, gradient):
            return self.grid.round(name, gradient)
        if held is None:
            # Another tensor in the bucket's memory, which autograd takes over as it is.
            return self.grid.round(name, gradient, view.view_as(view))
        if has_form_of(held, gradient) and not held.requires_grad and not gradient.requires_grad:
            return self.grid.round(name, gradient, held, adds=True)
        return self.grid.round(name, gradient)

    def _complete_divided(
        self, off_grid: OffGrid, divided: Mapping[str, nn.Parameter]
    ) -> Collection[str]:
        """Adds what was off the grid of divided parameters to `p.grad`; returns their names."""
        self.settle(off_grid)
        found = {n: off_grid.pop(n) for n in divided if n in off_grid}
        for name, apart in found.items():
            held = divided[name].grad
            assert held is not None  # zeros at least took its place
            held.detach().copy_(apart.total().add_(held))
        return found

    def follow(
        self,
        off_grid: OffGrid,
        completed: Collection[str],
        summed: Mapping[str, nn.Parameter],
        divided: Mapping[str, nn.Parameter],
        num_exchanges: int,
    ) -> None:
        """Adapts the grid's units to the sums of an exchange.

        Args:
            off_grid: gradients off the grid that are left, of divided parameters.
            completed: names of the parameters whose sums took a second message.
            summed: name -> parameter with a complete sum on all workers.
            divided: name -> divided parameter, whose sum is completed here.
            num_exchanges: number of exchanges so far.
        """
        self.num_completed += bool(completed)
        left = {*completed, *self._complete_divided(off_grid, divided)}
        of_all = {**summed, **divided}
        names = self.grid.names_to_look_at(num_exchanges, of_all, left)
        totals = {name: total for name in names if (total := of_all[name].grad) is not None}
        self.grid.look_at(totals, left)

    def state_dict(self) -> dict[str, Any]:
        """The grid, and the number of threads, on which a worker's products depend."""
        return {"grid": self.grid.state_dict(), "num_threads": self._num_threads}

    def gather_state(self, divided: DividedParameters, comm: Communicator) -> dict[str, Any]:
        """The `state_dict`, on rank 0 including other workers' divided parameters.

        Collective if modules are divided over the workers.

        Args:
            divided: this worker's divided parameters.
            comm: the workers.
        """
        state = self.state_dict()
        if not divided.has_modules:
            return state
        tops = state["grid"]["tops"]
        own = {name: tops[name].cpu() for name in divided.by_name if name in tops}
        for found in comm.gather_object(own) or ():
            tops.update(found)
        return state

    def load_state_dict(self, state: Mapping[str, Any], names: Container[str]) -> None:
        """Continues from `state_dict`, or from the state of an exchange without exact sums.

        Args:
            state: the state for all workers' parameters.
            names: names of the parameters that this worker has.
        """
        self._warn_of_other_threads(state.get("num_threads"))
        if state.get("grid"):
            tops = state["grid"]["tops"].items()
            own = {name: top for name, top in tops if name in names}
            self.grid.load_state_dict({"tops": own}, self._device)

    @property
    def _num_threads(self) -> int | None:
        """The number of threads, which products' last bits depend on; None on an accelerator."""
        return None if is_accelerator(self._device) else torch.get_num_threads()

    def _warn_of_other_threads(self, saved: int | None) -> None:
        own = self._num_threads
        if None not in (own, saved) and own != saved:
            warnings.warn(
                f"The checkpoint's workers computed with {saved} threads each, these do with {own}:"
                " their products have other last bits, so that the run will not be the same to the"
                f" last bit. Call `torch.set_num_threads({saved})` before the first step.",
                stacklevel=6,
            )


def _add_apart(off_grid: OffGrid, name: str, gradient: Tensor) -> None:
    """Adds a gradient that did not fit to `off_grid`."""
    if name not in off_grid:
        off_grid[name] = ReproducibleSum(gradient)
    off_grid[name].add(gradient)
