"""One exchange of whole numbers, to which every backward pass adds without rounding.

[Note: what p.grad stands for] An exact sum needs the gradient of each backward pass by itself,
not what autograd makes of it and of what `p.grad` holds. So `p.grad` is set aside before a
gradient is added to it. Then the gradient's whole numbers are added to the sum, and the gradient
to what was set aside, as autograd would have done. The sum begins with what `p.grad` held, so that
the result is that of the plain exchange:

    p.grad before the gradient                   the sum begins with
    None                                         0
    what the last gradient left, as it was       what it was
    a delivered mean, the same on all workers    that mean, once
    anything else                                the workers' mean of it

Where the sum is not divided, a mean counts once if rank 0 alone adds it, and a changed sum has no
meaning that doesn't depend on the number of workers: only zero is taken. That `p.grad` was changed
in place is seen by torch's version counter, which `p.grad.data` goes past.
"""

from collections.abc import Mapping, MutableMapping, MutableSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from allstep.errors import UsageError
from allstep.exchange.buckets import BucketPlan, BucketSet
from allstep.exchange.wires.exact import Exact


@dataclass(frozen=True)
class Left:
    """What an exchange has left in a parameter's `p.grad`.

    Attributes:
        gradient: refers to it, weakly.
        version: of the tensor, which grows when it is changed in place.
        total: the whole numbers that it stands for; None for a mean.
        divisor: what they will be divided by, in the end.
    """

    gradient: TensorWeakRef
    version: int
    total: Tensor | None
    divisor: int


class ExactSums:
    """Makes the buckets of one exchange, which share what they have left in `p.grad`.

    Args:
        exact: the format.
        rank: this worker.
    """

    def __init__(self, exact: Exact, rank: int) -> None:
        self._exact, self._rank = exact, rank
        self._left: MutableMapping[nn.Parameter, Left] = WeakTensorKeyDictionary()

    def new_buckets(self, plan: BucketPlan) -> "FixedPointBuckets":
        """Empty buckets; see `FixedPointBuckets.of`."""
        return FixedPointBuckets.of(plan, self._exact, self._rank, self._left)


@dataclass
class FixedPointBuckets(BucketSet):
    """Buckets of whole numbers. [Note: what p.grad stands for]

    Attributes:
        exact: the format; its numbers are in `flats`.
        rank: this worker.
        left: by parameter; all buckets of an exchange share it.
        set_aside_of: name -> what `p.grad` held before the gradient that is being made.
        divisor: what the sum is divided by in the end.
        factor: by which the result is then multiplied.
    """

    exact: Exact = field(default_factory=Exact)
    rank: int = 0
    left: MutableMapping[nn.Parameter, Left] = field(default_factory=dict)
    set_aside_of: dict[str, Tensor | None] = field(default_factory=dict)
    divisor: int = 1
    factor: float = 1.0

    @classmethod
    def of(
        cls, plan: BucketPlan, exact: Exact, rank: int, left: MutableMapping[nn.Parameter, Left]
    ) -> "FixedPointBuckets":
        """Empty buckets.

        Raises:
            UsageError: if a parameter is complex.
        """
        for layout in plan.layouts:
            if layout.dtype.is_complex:
                raise UsageError(
                    f"Parameter `{layout.names[0]}` is {layout.dtype}, which has no fixed-point"
                    ' form; choose another `compression` (="exact").'
                )
        flats = [torch.zeros_like(x.new_flat(), dtype=torch.int64) for x in plan.layouts]
        return cls(plan, flats, exact=exact, rank=rank, left=left)

    def recycle(self) -> None:
        super().recycle()
        self.set_aside_of.clear()
        self.factor = 1.0

    def set_aside(self, name: str, p: nn.Parameter, scale: float) -> None:
        """Has autograd leave the next gradient alone in `p.grad`.

        Args:
            name, p: the parameter.
            scale: as in `fill`; a sum of whole numbers is scaled in the end.
        """
        self.divisor = round(1 / scale)
        self.set_aside_of[name], p.grad = p.grad, None

    def place(self, name: str, p: nn.Parameter) -> None:
        """Adds a gradient to the sum, and to what `p.grad` held before."""
        if name not in self.set_aside_of:
            return  # autograd knows that it is zero
        held, new = self.set_aside_of.pop(name), p.grad
        assert new is not None
        self._begin(name, p, held)
        if held is not None:
            p.grad = held + new if new.requires_grad else held.add_(new)
        self.views[name].add_(self.exact.encode(new.detach(), name))
        self._note(p, self.views[name])

    def fill(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        touched: MutableSet[str],
        scale: float,
    ) -> None:
        """Has the sums be what `p.grad` stands for, also where no gradient has come."""
        self.divisor = round(1 / scale)
        for name in self.plan.layouts[index].names:
            p = parameters[name]
            if p.grad is None:
                touched.discard(name)
            self._begin(name, p, p.grad)

    def deliver(self, name: str, p: nn.Parameter) -> None:
        p.grad = torch.empty_like(p)
        self.exact.decode_(self.views[name], p.grad, self.divisor / self.factor)
        self._note(p, None)

    def rescale(self, factor: float) -> None:
        self.factor = factor  # of a mean that has left whole numbers behind

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "divisor": self.divisor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.divisor = state["divisor"]

    def _begin(self, name: str, p: nn.Parameter, held: Tensor | None) -> None:
        """Has the sum be what `p.grad` stands for.

        Raises:
            UsageError: if that depends on the number of workers, or is out of range.
        """
        view, left = self.views[name], self.left.get(p)
        if left is not None and left.gradient() is not held:
            left = None
        if held is None:
            view.zero_()
        elif left is not None and left.total is not None and self._is_unchanged(held, left):
            if left.total is not view:  # the buckets are others than then
                view.copy_(left.total)
        elif (share := self._share(held, left, name)) == 0 or _is_zero(held):
            view.zero_()
        else:
            value = held.detach()
            view.copy_(self.exact.encode(value if share == 1 else value * share, name))

    def _is_unchanged(self, held: Tensor, left: Left) -> bool:
        return held._version == left.version and self.divisor == left.divisor

    def _share(self, held: Tensor, left: Left | None, name: str) -> float:
        """The part of `held` that this worker adds to the sum."""
        size = self.plan.size
        if left is not None and left.total is None:
            return 1 if self.rank == 0 or self.divisor == size else 0
        if left is None or left.divisor == size:
            return self.divisor / size
        if held.any():
            raise UsageError(
                f"`p.grad` of `{name}` was changed between two backward passes that add up to one"
                ' sum; `compression` (="exact") takes only it as it was or zero, so that the number'
                ' of workers doesn\'t matter. Change it after the exchange, or use "fp32".'
            )
        return 0

    def _note(self, p: nn.Parameter, total: Tensor | None) -> None:
        """Remembers what is in `p.grad` now."""
        if p.grad is not None:
            reference = TensorWeakRef(p.grad)
            self.left[p] = Left(reference, p.grad._version, total, self.divisor)


def _is_zero(x: Tensor) -> bool:
    """Whether all is; False on CUDA, where the host would have to wait for the answer."""
    if x.is_cuda or not x.numel():
        return False
    smallest, largest = torch.aminmax(x.detach())
    return bool(smallest == 0) and bool(largest == 0)
