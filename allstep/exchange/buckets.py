"""The buckets of a model: their layout, and how gradients are put in and taken out."""

from collections.abc import Collection, Iterator, Mapping, MutableSet, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from allstep.comm import Communicator, Work
from allstep.comm.agreement import digest
from allstep.comm.reproducible import ReproducibleSum, reproducible_all_reduce
from allstep.comm.shared_memory import Block
from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.parameters import sparse_gradient_message
from allstep.exchange.piggyback import check_size, note_size
from allstep.exchange.reducer import Bucket
from allstep.exchange.tail import Tail

# [Note: alignment] A GPU's kernels read four elements or more at a time from where a tensor begins,
# if that is a multiple of so many, else one by one; a sum over the elements, such as a norm, has
# other last bits then. So a gradient in a bucket lies as one in memory of its own does.
_ALIGNMENT_ON_ACCELERATOR = 16
_LARGE = 1 << 14  # elements; below, a call costs more than another pass


@dataclass(frozen=True)
class BucketPlan:
    """The assignment of parameters to buckets, the same on every worker.

    Attributes:
        layouts: the buckets' layouts, in the order in which they are sent. The first bucket's tail
            begins with the comparison of the workers and their notes; the last one's ends with the
            failure mark and a flag for each parameter, in the plan's order.
        size: the number of workers.
    """

    layouts: tuple[BucketLayout, ...]
    size: int

    @classmethod
    def of(
        cls, buckets: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter], size: int
    ) -> "BucketPlan":
        """The plan for buckets that are given as lists of parameters' names."""
        num_flags = 1 + sum(map(len, buckets))
        layouts = []
        for index, names in enumerate(buckets):
            num_tail = check_size(size) + note_size(size) if index == 0 else 0
            num_tail += num_flags if index == len(buckets) - 1 else 0
            members = [(name, parameters[name]) for name in names]
            is_aligned = is_accelerator(members[0][1].device)
            alignment = _ALIGNMENT_ON_ACCELERATOR if is_aligned else 1
            layouts.append(BucketLayout.of(members, num_tail, alignment))
        return cls(tuple(layouts), size)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in the order of their buckets."""
        return tuple(name for layout in self.layouts for name in layout.names)

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """name -> index of its bucket."""
        return {n: i for i, layout in enumerate(self.layouts) for n in layout.names}

    @cached_property
    def large(self) -> frozenset[str]:
        """Parameters on the CPU whose gradients are better copied and scaled one by one."""
        return frozenset(
            name
            for layout in self.layouts
            for name, size in zip(layout.names, layout.sizes, strict=True)
            if size >= _LARGE and not is_accelerator(layout.device)
        )

    @cached_property
    def digest(self) -> int:
        """A digest of the plan."""
        return digest([(x.names, x.shapes, str(x.dtype)) for x in self.layouts])

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters' names, bucket by bucket."""
        return [list(layout.names) for layout in self.layouts]

    @property
    def num_bytes(self) -> int:
        """Total size of all flat tensors."""
        return sum(_aligned(layout.num_bytes) for layout in self.layouts)

    def flats_in(self, memory: Tensor) -> list[Tensor]:
        """The flat tensors, side by side in `memory`, [num_bytes], uint8."""
        starts = accumulate((_aligned(layout.num_bytes) for layout in self.layouts), initial=0)
        return [
            memory[start : start + layout.num_bytes].view(layout.flat_dtype)
            for start, layout in zip(starts, self.layouts, strict=False)
        ]

    def check(self, flats: Sequence[Tensor]) -> Tensor:
        """The comparison of the workers, in the first bucket's tail."""
        start = self.layouts[0].num_elements
        return flats[0][start : start + check_size(self.size)]

    def notes(self, flats: Sequence[Tensor]) -> Tensor:
        """The workers' notes, behind their comparison in the first bucket's tail."""
        start = self.layouts[0].num_elements + check_size(self.size)
        return flats[0][start : start + note_size(self.size)]

    def flags(self, flats: Sequence[Tensor]) -> Tensor:
        """The failure mark and the parameters' flags, in the last bucket's tail."""
        return flats[-1][-(1 + len(self.names)) :]


def has_form_of(view: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is dense, and has the shape and dtype of a view."""
    return (
        gradient.layout is torch.strided
        and gradient.dtype is view.dtype
        and gradient.shape == view.shape
    )


def _refuse_form(name: str, gradient: Tensor, view: Tensor) -> NoReturn:
    if gradient.layout != torch.strided:
        raise UsageError(sparse_gradient_message(name))
    raise UsageError(
        f"Parameter `{name}` was {list(view.shape)} {view.dtype} at `attach` and is now"
        f" {list(gradient.shape)} {gradient.dtype}; detach and attach again after a change."
    )


def _aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // 64) * 64


@dataclass
class BucketSet:
    """The buckets of one exchange: memory for all gradients, and their state.

    Attributes:
        plan: the assignment of parameters to buckets.
        flats: one tensor per bucket, with gradients and tail.
        block: the shared memory that holds `flats`, if workers sum them in place.
        touched: names of parameters that this worker has a gradient for.
        parameters: name -> parameter that gets the sum; the model's names may change meanwhile.
        step: the exchange's number.
        amp_scale: the GradScaler's scale when the gradients were computed.
        works: the Works of the buckets whose sums have been started.
        scaled: names of parameters whose `p.grad` is in an unfinished bucket, already scaled.
        off_grid: name -> gradients that are not in `flats` because they don't fit. [Note: grid]
        completed: names of parameters whose off-grid part was added to the sums; None before.
        divisor: divisor of the sums, from a checkpoint; None to use the notes.
    """

    plan: BucketPlan
    flats: list[Tensor]
    block: Block | None = None
    touched: frozenset[str] = frozenset()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    step: int = 0
    amp_scale: float = 1.0
    works: list[Work[None]] = field(default_factory=list)
    scaled: set[str] = field(default_factory=set)
    off_grid: dict[str, ReproducibleSum] = field(default_factory=dict)
    completed: tuple[str, ...] | None = None
    divisor: Tensor | None = None

    @classmethod
    def new(cls, plan: BucketPlan, block: Block | None = None) -> "BucketSet":
        """Empty buckets, in `block` if that is given."""
        if block is not None:
            return cls(plan, plan.flats_in(block.own), block)
        return cls(plan, [layout.new_flat() for layout in plan.layouts])

    @cached_property
    def tail(self) -> Tail:
        """Comparison, notes and failure mark, which are sent behind the gradients."""
        check, notes = self.plan.check(self.flats), self.plan.notes(self.flats)
        return Tail(self.plan.digest, check, notes, self.plan.flags(self.flats)[:1])

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """name -> its gradient, as a view of a flat tensor."""
        return {name: view for places in self._places for name, view in places}

    @cached_property
    def _places(self) -> list[list[tuple[str, Tensor]]]:
        """For each bucket the parameters' names and their views."""
        # With versions of their own: what is compared in the buckets changes no gradient.
        return [
            list(zip(layout.names, layout.views(flat.data), strict=True))
            for layout, flat in zip(self.plan.layouts, self.flats, strict=True)
        ]

    @cached_property
    def _all_gradients(self) -> list[Tensor]:
        """For each bucket everything but the tail."""
        layouts = self.plan.layouts
        return [x[: y.num_elements] for x, y in zip(self.flats, layouts, strict=True)]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All buckets, to be summed."""
        last = len(self.flats) - 1
        return [
            Bucket(layout, flat, index, index == last)
            for index, (layout, flat) in enumerate(zip(self.plan.layouts, self.flats, strict=True))
        ]

    def recycle(self) -> None:
        """Prepares the memory for other gradients."""
        self.touched, self.works, self.divisor = frozenset(), [], None
        self.scaled.clear()
        self.off_grid.clear()
        self.completed = None

    def place_large(self, name: str, p: nn.Parameter, scale: float) -> None:
        """Copies one of the plan's large gradients to its place; nothing may be added once scaled.

        While it is new it is still in the cache, and its memory, freed at once, serves the next
        one. `fill` copies the other gradients, many in a call.
        """
        gradient, view = p.grad, self.views[name]
        if gradient is None or gradient.requires_grad:
            return
        if has_form_of(view, gradient) and gradient.data_ptr() != view.data_ptr():
            self._copy_large(name, gradient, scale)
            p.grad = view

    def _copy_large(self, name: str, gradient: Tensor, scale: float) -> None:
        """Copies and scales a gradient in a single pass over memory."""
        if scale == 1:
            self.views[name].copy_(gradient)
        else:
            torch.mul(gradient, scale, out=self.views[name])
            self.scaled.add(name)

    def fill(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        touched: MutableSet[str],
        scale: float,
    ) -> None:
        """Copies the scaled gradients of a bucket to their places; call it in `no_grad` mode.

        A new gradient is then in the bucket only, and `p.grad` is a view of it. For parameters
        without a new gradient `p.grad` is sent, too, but not changed.

        Args:
            index: the bucket's index.
            parameters: name -> parameter.
            touched: names of parameters with a new gradient; those that turn out to have none are
                removed.
            scale: the only factor between a gradient and its share of the sum.
        """
        small_views: list[Tensor] = []
        small_gradients: list[Tensor] = []
        large, layout = self.plan.large, self.plan.layouts[index]
        dtype = layout.dtype
        is_all_new = touched >= layout.name_set
        for (name, view), shape in zip(self._places[index], layout.shapes, strict=True):
            p = parameters[name]
            gradient, is_new = p.grad, is_all_new or name in touched
            if gradient is None:
                view.zero_()
                touched.discard(name)  # autograd knows that it is zero, or it was dropped since
                continue
            if gradient is not view:
                if (  # not `has_form_of`: its calls are 2 % of what `attach` costs the host
                    gradient.shape != shape
                    or gradient.dtype is not dtype
                    or gradient.layout is not torch.strided
                ):
                    _refuse_form(name, gradient, view)
                if name not in large:  # one in the bucket's memory is copied onto itself
                    small_views.append(view)
                    small_gradients.append(gradient)
                elif gradient.data_ptr() != view.data_ptr():
                    self._copy_large(name, gradient, scale)
                if is_new and not gradient.requires_grad:
                    p.grad = view  # else it belongs to a graph for second derivatives
            if not is_new and gradient.data_ptr() == view.data_ptr():
                p.grad = view.clone(memory_format=torch.preserve_format)
        if small_views:
            torch._foreach_copy_(small_views, small_gradients)
        if scale != 1:
            for unscaled in self._unscaled(index):
                unscaled.mul_(scale)

    def _unscaled(self, index: int) -> Iterator[Tensor]:
        """The parts of a bucket that are not scaled yet."""
        layout, flat = self.plan.layouts[index], self.flats[index]
        if not self.scaled:
            yield self._all_gradients[index]
            return
        members = zip(layout.names, layout.offsets, layout.sizes, strict=True)
        for is_scaled, group in groupby(members, lambda member: member[0] in self.scaled):
            if not is_scaled:
                stretch = list(group)
                yield flat[stretch[0][1] : sum(stretch[-1][1:])]

    def deliver(self, name: str, p: nn.Parameter) -> None:
        """Makes `p.grad` the sum."""
        view = self.views[name]
        if p.grad is not None and p.grad.requires_grad:
            p.grad.detach().copy_(view)
        else:
            p.grad = view

    def rescale(self, factor: float) -> None:
        """Multiplies the sums."""
        for layout, flat in zip(self.plan.layouts, self.flats, strict=True):
            flat[: layout.num_elements].mul_(factor)

    def flags_without(self, index: int, touched: Set[str]) -> dict[str, Tensor]:
        """name -> flag, for a bucket's parameters without a gradient on this worker."""
        layout = self.plan.layouts[index]
        if touched >= layout.name_set:
            return {}
        start = 1 + sum(len(layout.names) for layout in self.plan.layouts[:index])
        flags = self.plan.flags(self.flats)[start:]
        return {name: flags[i] for i, name in enumerate(layout.names) if name not in touched}

    def write_flags(self, touched: Set[str], failure: str | None = None) -> None:
        """Writes in the tail which gradients this worker has, and the failure if there is one."""
        self.touched = frozenset(touched)
        flags = self.plan.flags(self.flats)
        flags.fill_(len(touched) == len(self.plan.names))
        if len(touched) < len(self.plan.names) or self.off_grid:
            off = 2.0 * self.plan.size  # more than the others' flags add up to
            has = [off if n in self.off_grid else float(n in touched) for n in self.plan.names]
            flags[1:].copy_(torch.tensor(has, dtype=flags.dtype), non_blocking=True)
        self.tail.write_mark(failure)

    def summed_names(self) -> Collection[str]:
        """The parameters that any worker has a gradient for, after the exchange."""
        if len(self.touched) == len(self.plan.names):
            return self.plan.names
        flags = self.plan.flags(self.flats)[1:].tolist()
        return [name for name, flag in zip(self.plan.names, flags, strict=True) if flag > 0]

    def complete(self, comm: Communicator | None) -> None:
        """Adds gradients off the grid to the sums. Collective if any worker has such gradients.

        Args:
            comm: the workers; None if nothing is summed over workers.
        """
        if self.completed is not None:
            return
        pairs = zip(self.plan.names, self.plan.flags(self.flats)[1:].tolist(), strict=True)
        self.completed = names = tuple(name for name, flag in pairs if flag > self.plan.size)
        if not names:
            return
        local = [self.off_grid.get(name) or ReproducibleSum(self.views[name]) for name in names]
        totals = (
            [x.total() for x in local] if comm is None else reproducible_all_reduce(comm, local)
        )
        for name, total in zip(names, totals, strict=True):
            self.views[name].copy_(total.add_(self.views[name]))
            self.off_grid.pop(name, None)

    def state_dict(
        self, parameters: Mapping[str, nn.Parameter], divisor: Tensor | None = None
    ) -> dict[str, Any]:
        """Sums that have not been used yet, by the present names of `parameters`."""
        summed = {self.parameters[n]: n for n in self.summed_names() if n in self.parameters}
        sums = {n: self.views[summed[p]].clone() for n, p in parameters.items() if p in summed}
        completed = [n for n, p in parameters.items() if summed.get(p) in (self.completed or ())]
        state = {"step": self.step, "scale": self.amp_scale, "sums": sums, "divisor": divisor}
        return {**state, "completed": completed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the sums of a checkpoint, which may have another plan.

        Parameters that were frozen after they were sent are in no bucket, and get no gradient.
        """
        self.step, self.amp_scale = state["step"], state["scale"]
        self.divisor = state.get("divisor")
        sums = {name: saved for name, saved in state["sums"].items() if name in self.views}
        self.write_flags(sums.keys())
        self.completed = tuple(name for name in state["completed"] if name in sums)
        for name, saved in sums.items():
            self.views[name].copy_(saved)
