"""The buckets of a model: which parameter lies where, and how a gradient gets in and out."""

from collections.abc import Collection, Mapping, MutableSet, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Work
from allstep.comm.agreement import digest
from allstep.comm.shared_memory import Block
from allstep.errors import UsageError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.parameters import Signature, sparse_gradient_message
from allstep.exchange.piggyback import AgreementResult, check_size, write_check
from allstep.exchange.reducer import Bucket

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


def _check_form(name: str, gradient: Tensor, view: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise UsageError(sparse_gradient_message(name))
    if gradient.dtype != view.dtype or gradient.shape != view.shape:
        raise UsageError(
            f"Parameter `{name}` was {list(view.shape)} {view.dtype} at `attach` and is now"
            f" {list(gradient.shape)} {gradient.dtype}; detach and attach again after a change."
        )


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
            torch.mul(gradient, scale, out=view)
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
class BucketSet:
    """The buckets of one exchange: memory for all gradients, and what is known of them.

    Attributes:
        plan: which parameter is where.
        flats: one a bucket: gradients and tail.
        block: what `flats` lie in, where workers sum them in place.
        touched: parameters that this worker has a gradient for.
        step: the exchange's number.
        action: what the worker believes it does; must be the same on all.
        described: the tensors to do it with, for the error if it isn't.
        amp_scale: the GradScaler's scale when the gradients were made.
        failure: why this worker can't take part; the exchange then fails for all.
        works: of the buckets whose sums have been started.
    """

    plan: BucketPlan
    flats: list[Tensor]
    block: Block | None = None
    touched: frozenset[str] = frozenset()
    step: int = 0
    action: str = ""
    described: Signature = ()
    amp_scale: float = 1.0
    failure: str | None = None
    works: list[Work[None]] = field(default_factory=list)

    @classmethod
    def new(cls, plan: BucketPlan, block: Block | None = None) -> "BucketSet":
        """Empty buckets, in `block` if that is given."""
        if block is not None:
            return cls(plan, plan.flats_in(block.own), block)
        return cls(plan, [layout.new_flat() for layout in plan.layouts])

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """name -> its gradient, as a view of a flat tensor."""
        views: dict[str, Tensor] = {}
        for layout, flat in zip(self.plan.layouts, self.flats, strict=True):
            views |= zip(layout.names, layout.views(flat), strict=True)
        return views

    def write_check(self, rank: int, action: str, described: Signature) -> None:
        """Has the first bucket's tail compare plan and action with the other workers'."""
        self.action, self.described = action, described
        mine = digest((self.plan.digest, action, described))
        write_check(self.plan.check(self.flats), rank, mine)

    def read_agreement(self, *, compares: bool = True, marks: bool = True) -> AgreementResult:
        """What the summed tails say of the workers' agreement.

        Args:
            compares: whether the first bucket compared the workers.
            marks: whether the last bucket, with the failure mark, has been summed too.
        """
        nothing = self.flats[0][:0]
        return AgreementResult.read(
            self.plan.check(self.flats) if compares else nothing,
            self.plan.flags(self.flats)[:1] if marks else nothing,
            action=self.action,
            described=self.described,
            failure=self.failure,
        )

    def recycle(self) -> None:
        """Makes the memory ready for other gradients."""
        self.touched, self.failure, self.works = frozenset(), None, []

    def bucket(self, index: int) -> Bucket:
        """One of the buckets, to be summed."""
        is_last = index == len(self.flats) - 1
        return Bucket(self.plan.layouts[index], self.flats[index], index, is_last)

    def fill(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        touched: MutableSet[str],
        scale: float,
    ) -> None:
        """Puts the gradients of a bucket in their places, scaled, to be summed.

        What this worker has a new gradient for then lies in the bucket only, and `p.grad` points
        there. What `p.grad` holds of others is sent, too, but left as it is.

        Args:
            index: of the bucket.
            parameters: by name.
            touched: those with a new gradient; loses those that have none after all.
            scale: the only factor between a gradient and its share of the sum.
        """
        copied: list[tuple[Tensor, Tensor]] = []
        in_place: list[Tensor] = []
        for name in self.plan.layouts[index].names:
            p, view = parameters[name], self.views[name]
            gradient = p.grad
            if gradient is None:
                view.zero_()
                touched.discard(name)  # autograd knows that it is zero, or it was dropped since
                continue
            if gradient is view:
                in_place.append(view)
            else:
                _check_form(name, gradient, view)
                copied.append((view, gradient.detach()))
            if name not in touched:
                if gradient.data_ptr() == view.data_ptr():
                    p.grad = view.clone(memory_format=torch.preserve_format)
            elif not gradient.requires_grad:  # else it belongs to a graph for second derivatives
                p.grad = view
        copy_scaled(copied, scale)
        if scale != 1 and in_place:
            torch._foreach_mul_(in_place, scale)

    def deliver(self, name: str, p: nn.Parameter) -> None:
        """Has `p.grad` be the sum."""
        view = self.views[name]
        if p.grad is not None and p.grad.requires_grad:
            p.grad.detach().copy_(view)
        elif p.grad is not view:
            p.grad = view

    def rescale(self, factor: float) -> None:
        """Multiplies the sums."""
        for layout, flat in zip(self.plan.layouts, self.flats, strict=True):
            flat[: layout.num_elements].mul_(factor)

    def flags_without(self, index: int, touched: Set[str]) -> dict[str, Tensor]:
        """name -> its flag, for a bucket's parameters without a gradient here."""
        names = self.plan.layouts[index].names
        if touched >= set(names):
            return {}
        start = 1 + sum(len(layout.names) for layout in self.plan.layouts[:index])
        flags = self.plan.flags(self.flats)[start:]
        return {name: flags[i] for i, name in enumerate(names) if name not in touched}

    def write_flags(self, touched: Set[str], failure: str | None = None) -> None:
        """Tells the others which gradients this worker has, and why it failed if it did."""
        self.touched, self.failure = frozenset(touched), failure
        flags = self.plan.flags(self.flats)
        flags.fill_(len(touched) == len(self.plan.names))
        if len(touched) < len(self.plan.names):
            has = [float(name in touched) for name in self.plan.names]
            flags[1:].copy_(torch.tensor(has, dtype=flags.dtype), non_blocking=True)
        flags[0] = failure is not None

    def summed_names(self) -> Collection[str]:
        """The parameters that any worker has a gradient for, after the exchange."""
        if len(self.touched) == len(self.plan.names):
            return self.plan.names
        flags = self.plan.flags(self.flats)[1:].tolist()
        return [name for name, flag in zip(self.plan.names, flags, strict=True) if flag > 0]

    def state_dict(self) -> dict[str, Any]:
        """Sums that have not been used yet."""
        return {
            "step": self.step,
            "scale": self.amp_scale,
            "sums": {name: self.views[name].clone() for name in self.summed_names()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the sums of a checkpoint, under any plan.

        Parameters that were frozen after they were sent are in no bucket, and get no gradient.
        """
        self.step, self.amp_scale = state["step"], state["scale"]
        sums = {name: saved for name, saved in state["sums"].items() if name in self.views}
        self.write_flags(sums.keys())
        for name, saved in sums.items():
            self.views[name].copy_(saved)
