"""The buckets of a model, and one exchange of them from the first gradient to the mean."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Work
from allstep.comm.agreement import digest
from allstep.comm.algorithms import AllReduce, SharedMemory
from allstep.comm.shared_memory import Block
from allstep.exchange.layout import BucketLayout
from allstep.exchange.parameters import Signature
from allstep.exchange.tail import check_size, write_check

__all__ = ["BucketPlan", "Flight"]

_LARGE = 1 << 14  # elements; below, a call costs more than another pass


@dataclass(frozen=True)
class BucketPlan:
    """Which parameter travels in which bucket, the same on every worker.

    Attributes:
        layouts: of the buckets, in the order in which they are sent. The tail of the first
            begins with the comparison of the workers, the tail of the last ends with the
            failure mark and a flag for each parameter, in the plan's order.
        size: the number of workers.
    """

    layouts: tuple[BucketLayout, ...]
    size: int

    @classmethod
    def of(
        cls, buckets: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter], size: int
    ) -> "BucketPlan":
        """The plan for buckets given by their parameters' names."""
        num_flags = 1 + sum(map(len, buckets))
        layouts = []
        for index, names in enumerate(buckets):
            num_tail = check_size(size) if index == 0 else 0
            num_tail += num_flags if index == len(buckets) - 1 else 0
            members = [(name, parameters[name]) for name in names]
            layouts.append(BucketLayout.of(members, num_tail))
        return cls(tuple(layouts), size)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All parameters in the order of their buckets."""
        return tuple(name for layout in self.layouts for name in layout.names)

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """name -> index of its bucket."""
        return {n: i for i, layout in enumerate(self.layouts) for n in layout.names}

    @cached_property
    def form_of(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """name -> shape and dtype of its gradient."""
        return {
            name: (torch.Size(shape), layout.dtype)
            for layout in self.layouts
            for name, shape in zip(layout.names, layout.shapes, strict=True)
        }

    @cached_property
    def digest(self) -> int:
        """A number that stands for the plan."""
        return digest([(x.names, x.shapes, str(x.dtype)) for x in self.layouts])

    @property
    def buckets(self) -> list[list[str]]:
        """The names, bucket by bucket."""
        return [list(layout.names) for layout in self.layouts]

    @property
    def num_bytes(self) -> int:
        """Bytes of all flat tensors side by side."""
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

    def flags(self, flats: Sequence[Tensor]) -> Tensor:
        """The failure mark and the parameters' flags, in the last bucket's tail."""
        return flats[-1][-(1 + len(self.names)) :]


def copy_scaled(pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
    """view = scale * gradient, for pairs of them; large ones go through memory once.

    >>> view = torch.zeros(2)
    >>> copy_scaled([(view, torch.tensor([2.0, 4.0]))], 0.5)
    >>> view
    tensor([1., 2.])
    """
    is_once = [scale != 1 and view.numel() >= _LARGE for view, _ in pairs]
    for (view, gradient), once in zip(pairs, is_once, strict=True):
        if once:
            torch.mul(gradient.expand_as(view), scale, out=view)  # or raises
    small = [pair for pair, once in zip(pairs, is_once, strict=True) if not once]
    if small:
        views, gradients = map(list, zip(*small, strict=True))
        torch._foreach_copy_(views, gradients)
        if scale != 1:
            torch._foreach_mul_(views, scale)


def _aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // 64) * 64


@dataclass
class Flight:
    """One exchange under way: the flat tensors of all buckets.

    Attributes:
        plan: the buckets.
        flats: one a bucket: gradients and tail.
        touched: parameters that this worker has a gradient for.
        step: the exchange's number.
        action: what the worker believes it does; must be the same on all.
        described: the tensors to do it with, for the error if it isn't.
        scale: the gradients' factor when they were made (a GradScaler's).
        remembered: residuals of parameters without a gradient here, in case no worker has one.
        failure: why this worker can't take part; the flight then fails for all.
        jobs: the buckets' exchanges, as far as they have been sent.
        block: what `flats` lie in, where workers sum them in place.
    """

    plan: BucketPlan
    flats: list[Tensor]
    touched: frozenset[str] = frozenset()
    step: int = 0
    action: str = ""
    described: Signature = ()
    scale: float = 1.0
    failure: str | None = None
    jobs: list[Work[None]] = field(default_factory=list)
    block: Block | None = None
    remembered: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def new(cls, plan: BucketPlan, algorithm: AllReduce | None = None) -> "Flight":
        """An empty flight; collective with an algorithm that can sum its tensors in place."""
        if isinstance(algorithm, SharedMemory) and plan.layouts:
            block = algorithm.new_block(plan.num_bytes)
            if block is not None:
                return cls(plan, plan.flats_in(block.own), block=block)
        return cls(plan, [layout.new_flat() for layout in plan.layouts])

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """name -> its gradient, as a view of a flat tensor."""
        views: dict[str, Tensor] = {}
        for layout, flat in zip(self.plan.layouts, self.flats, strict=True):
            views |= zip(layout.names, layout.views(flat), strict=True)
        return views

    def write_check(self, rank: int) -> None:
        """Has the first bucket's tail compare plan and action with the other workers'."""
        mine = digest((self.plan.digest, self.action, self.described))
        write_check(self.plan.check(self.flats), rank, mine)

    def clear(self) -> None:
        """Makes an old flight's memory ready for gradients."""
        self.touched, self.failure, self.jobs, self.remembered = frozenset(), None, [], []

    def place(self, name: str, p: nn.Parameter) -> None:
        """A gradient has been made; it is put in its bucket when that is full."""

    def fill(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        touched: Set[str],
        scale: float,
    ) -> None:
        """Puts the gradients of a bucket in their places, scaled, to be summed.

        What this worker has a new gradient for then lies in the bucket only, and `p.grad` points
        there. What `p.grad` holds of others is sent, too, but left as it is.

        Args:
            index: of the bucket.
            parameters: by name.
            touched: those with a new gradient.
            scale: the only factor between a gradient and its share of the sum.
        """
        copied: list[tuple[Tensor, Tensor]] = []
        in_place: list[Tensor] = []
        for name in self.plan.layouts[index].names:
            p, view = parameters[name], self.views[name]
            gradient = p.grad
            if gradient is None:
                view.zero_()
            elif gradient is view or gradient.data_ptr() == view.data_ptr():
                in_place.append(view)
                if name not in touched:
                    p.grad = view.clone(memory_format=torch.preserve_format)
            else:
                copied.append((view, gradient.detach()))
                # What belongs to a graph for second derivatives stays there.
                if name in touched and not gradient.requires_grad:
                    p.grad = view
        copy_scaled(copied, scale)
        if scale != 1 and in_place:
            torch._foreach_mul_(in_place, scale)

    def deliver(self, name: str, p: nn.Parameter) -> None:
        """Has `p.grad` be the mean."""
        view = self.views[name]
        if p.grad is not None and p.grad.requires_grad:
            p.grad.detach().copy_(view)
        elif p.grad is not view:
            p.grad = view

    def rescale(self, factor: float) -> None:
        """Multiplies the means."""
        for layout, flat in zip(self.plan.layouts, self.flats, strict=True):
            flat[: layout.num_elements].mul_(factor)

    def flags_of(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """name -> its flag, for some of a bucket's parameters."""
        start = 1 + sum(len(layout.names) for layout in self.plan.layouts[:index])
        flags = self.plan.flags(self.flats)[start:]
        wanted = set(names)
        members = self.plan.layouts[index].names
        return {name: flags[i] for i, name in enumerate(members) if name in wanted}

    def write_flags(self) -> None:
        """Tells the others which gradients this worker has, and whether it failed."""
        flags = self.plan.flags(self.flats)
        flags.fill_(len(self.touched) == len(self.plan.names))
        if len(self.touched) < len(self.plan.names):
            has = [float(name in self.touched) for name in self.plan.names]
            flags[1:].copy_(torch.tensor(has, dtype=flags.dtype), non_blocking=True)
        flags[0] = self.failure is not None

    def landed_names(self) -> Collection[str]:
        """The parameters that any worker had a gradient for, after the exchange."""
        if len(self.touched) == len(self.plan.names):
            return self.plan.names
        flags = self.plan.flags(self.flats)[1:].tolist()
        return [name for name, flag in zip(self.plan.names, flags, strict=True) if flag > 0]

    def state_dict(self) -> dict[str, Any]:
        """A flight that has landed, but was not delivered."""
        return {
            "step": self.step,
            "scale": self.scale,
            "sums": {name: self.views[name].clone() for name in self.landed_names()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a flight of a checkpoint, under any buckets.

        Parameters that were frozen after it was sent are in no bucket, and get no gradient.
        """
        self.step, self.scale = state["step"], state["scale"]
        sums = {name: saved for name, saved in state["sums"].items() if name in self.views}
        self.touched = frozenset(sums)
        self.write_flags()
        for name, saved in sums.items():
            self.views[name].copy_(saved)
