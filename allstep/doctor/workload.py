"""Times a worker's step without any exchange."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

from allstep.doctor.timing import now_s, runnable_s
from allstep.plan import Workload

_NUM_STRETCHES = 5


@dataclass
class TimedStep:
    """Seconds of one step, and when each gradient was ready: (elements, seconds of backward).

    Attributes:
        forward_s, backward_s, optimizer_s: of its three parts.
        core_s: seconds in which the process needed a core, over all its threads; see `runnable_s`.
        gradients: in the order in which they were ready.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    core_s: float = 0.0
    gradients: list[tuple[int, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


def time_step(
    model: nn.Module, loss_of: Callable[[], Tensor], update: Callable[[], object]
) -> TimedStep:
    """Times a forward pass, a backward pass and an update.

    Args:
        model: whose gradients are watched.
        loss_of: the forward pass.
        update: what follows the backward pass; gradients are dropped after it.
    """
    device = next(model.parameters()).device
    timed = TimedStep()

    core_start_s, start_s = runnable_s(), now_s(device)
    loss = loss_of()
    timed.forward_s, start_s = now_s(device) - start_s, now_s(device)

    def note(parameter: Tensor) -> None:
        # On CUDA this is when the host got there, early in the pass.
        timed.gradients.append((num_elements_of(parameter), perf_counter() - start_s))

    hooks = [
        p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for p in model.parameters()
        if p.requires_grad
    ]
    loss.backward()  # type: ignore[no-untyped-call]
    timed.backward_s = now_s(device) - start_s
    for hook in hooks:
        hook.remove()
    start_s = now_s(device)
    update()
    model.zero_grad()
    timed.optimizer_s = now_s(device) - start_s
    timed.core_s = runnable_s() - core_start_s
    return timed


def num_elements_of(parameter: Tensor) -> int:
    """The number of elements of a parameter's gradient as sent; a complex one counts twice."""
    return parameter.nbytes // parameter.dtype.to_real().itemsize


def element_bytes_of(parameters: Iterable[Tensor]) -> int:
    """Bytes of an element of the gradients; of several dtypes, of the one with most elements.

    >>> element_bytes_of(nn.Linear(2, 2, dtype=torch.bfloat16).parameters())
    2
    """
    num_elements: Counter[int] = Counter()
    for parameter in parameters:
        num_elements[parameter.dtype.to_real().itemsize] += num_elements_of(parameter)
    return max(num_elements, key=num_elements.__getitem__)


def make_workload(steps: Sequence[TimedStep], num_samples: int, element_bytes: int = 4) -> Workload:
    """The planner's workload, from several equal steps.

    Each part is the mean that lasts over many steps, small hiccups included; large ones are not
    in it: the median of the means of five stretches of the steps, one after the other.

    Args:
        steps: at least one, without those that load kernels.
        num_samples: of a step.
        element_bytes: of the gradients.
    """
    sizes = tuple(size for size, _ in steps[0].gradients)
    same = [s for s in steps if tuple(size for size, _ in s.gradients) == sizes]
    ready_s = [_lasting_mean([s.gradients[i][1] for s in same]) for i, _ in enumerate(sizes)]
    backward_s = _lasting_mean([s.backward_s for s in steps])
    core_s = statistics.median(s.core_s / s.seconds for s in steps)
    return Workload(
        num_params=sum(sizes),
        forward_s=_lasting_mean([s.forward_s for s in steps]),
        backward_s=backward_s,
        optimizer_s=_lasting_mean([s.optimizer_s for s in steps]),
        num_samples=num_samples,
        ready=_ready(sizes, ready_s, backward_s),
        gradients=sizes,
        core_share=min(1.0, max(0.0, core_s / torch.get_num_threads())),
        element_bytes=element_bytes,
    )


def _lasting_mean(seconds: Sequence[float]) -> float:
    """The median of the means of several stretches of steps.

    >>> _lasting_mean([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 90.0])
    1.5
    """
    num_stretches = min(_NUM_STRETCHES, len(seconds))
    bounds = [len(seconds) * i // num_stretches for i in range(num_stretches + 1)]
    return statistics.median(statistics.mean(seconds[i:j]) for i, j in pairwise(bounds))


def _ready(
    sizes: Sequence[int], ready_s: Sequence[float], backward_s: float
) -> tuple[tuple[float, float], ...]:
    """The times at which gradients are ready, as shares of the backward pass, for `Workload`.

    >>> _ready((30, 10), (0.1, 0.3), 0.4)
    ((0.0, 0.0), (0.75, 0.25), (1.0, 1.0))
    """
    totals = list(accumulate(sizes))
    latest_s = accumulate(ready_s, max)
    shares = [
        (total / totals[-1], min(1.0, seconds / backward_s))
        for total, seconds in zip(totals, latest_s, strict=True)
    ]
    return ((0.0, 0.0), *shares[:-1], (1.0, 1.0))
