"""Times training steps under a policy."""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator
from allstep.doctor.timing import now_s, slowest_s
from allstep.doctor.workload import TimedStep, element_bytes_of, make_workload, time_step
from allstep.exchange import Exchange, ExchangePolicy, attach, make_policy
from allstep.plan import PolicySpec, Workload

_WARM_STEPS = 3  # buckets are made anew after the first
_NUM_FORWARDS = 10
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class RunSteps(Protocol):
    """The function that `steps_under` yields."""

    def __call__(self, num_steps: int, num_repeats: int = 1, /) -> list[float]: ...


@dataclass(frozen=True)
class Training:
    """A step of training.

    Attributes:
        model: what is trained.
        loss_of: the forward pass of a model like `model`, to its loss.
        optimizer: of its parameters.
    """

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer


def forward_share(training: Training, layers: Sequence[nn.Module]) -> float:
    """The share of some layers in a forward pass's time, the median of several passes.

    Args:
        training: whose model has them; it is not trained.
        layers: none of them in another.
    """
    device = next(training.model.parameters()).device
    seconds, starts_s = [0.0], [0.0]

    def begin(*_: object) -> None:
        starts_s[0] = now_s(device)

    def end(*_: object) -> None:
        seconds[0] += now_s(device) - starts_s[0]

    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(end) for layer in layers]
    shares = []
    for _ in range(_NUM_FORWARDS + 1):  # the first one loads kernels
        seconds[0], start_s = 0.0, now_s(device)
        training.loss_of(training.model)
        shares.append(seconds[0] / (now_s(device) - start_s))
    for hook in hooks:
        hook.remove()
    return statistics.median(shares[1:])


def measure_workload(
    comm: Communicator, training: Training, *, num_samples: int, num_steps: int = 15
) -> Workload:
    """Measures the workload of steps without any exchange, on all workers at once. Collective.

    Args:
        comm: the workers.
        training: the same on each.
        num_samples: of a worker's step.
        num_steps: to time; see `make_workload`.
    """
    steps = time_steps(comm, training, num_steps)
    trained = (p for p in training.model.parameters() if p.requires_grad)
    return make_workload(steps, num_samples, element_bytes_of(trained))


def time_steps(comm: Communicator, training: Training, num_steps: int) -> list[TimedStep]:
    """Times steps without any exchange, on all workers at once. Collective.

    Workers begin each step together, and what counts is when the last of them is done with a
    part: that is when an exchange could begin.
    """

    def step() -> TimedStep:
        comm.barrier()
        return time_step(
            training.model, lambda: training.loss_of(training.model), training.optimizer.step
        )

    for _ in range(2):
        step()
    return [slowest_step(comm, step()) for _ in range(num_steps)]


def slowest_step(comm: Communicator, timed: TimedStep) -> TimedStep:
    """The times at which the last worker reached each point of a step."""
    ends_s = [timed.forward_s, timed.forward_s + timed.backward_s, timed.optimizer_s]
    ends_s += [timed.forward_s + ready_s for _, ready_s in timed.gradients]
    last = comm.all_reduce(torch.tensor([*ends_s, timed.core_s], dtype=torch.float64), "max")
    forward_s, backward_end_s, optimizer_s, *ready_s, core_s = last.tolist()
    return TimedStep(
        forward_s=forward_s,
        backward_s=backward_end_s - forward_s,
        optimizer_s=optimizer_s,
        core_s=core_s,
        gradients=[
            (size, max(0.0, seconds - forward_s))
            for (size, _), seconds in zip(timed.gradients, ready_s, strict=True)
        ],
    )


def exchange_policy(policy: PolicySpec) -> ExchangePolicy:
    """The exchange policy of a planner's policy."""
    everything = 1 << 62  # one bucket
    bucket_bytes = policy.bucket_bytes if isinstance(policy.bucket_bytes, int) else everything
    return make_policy(
        compression=policy.compression,
        staleness=policy.staleness,
        algorithm=policy.algorithm,
        bucket_bytes=bucket_bytes,
        sync_every=policy.sync_every if policy.sync_every > 1 else None,
        overlap=policy.bucket_bytes is not None,
    )


def measure_policy(
    comm: Communicator,
    make_training: Callable[[], Training],
    policy: PolicySpec,
    *,
    num_micro_batches: int = 1,
    num_repeats: int = 5,
    seconds: float = 0.5,
) -> list[float]:
    """Times whole steps under a policy: forward, backward, exchange, update. Collective.

    With staleness the pipeline is full when the clock starts, and as full when it stops.

    Args:
        comm: the workers.
        make_training: makes the same training on each worker.
        policy: with nothing left to choose; named "DDP" it is torch's DistributedDataParallel.
        num_micro_batches: passes of a step, of which the last one's gradients are exchanged.
        num_repeats: how often steps are timed.
        seconds: about how long each time; at least one step, whole rounds of local SGD.

    Returns:
        Seconds of a step of the slowest worker, one for each repeat.
    """
    with steps_under(comm, make_training(), policy, num_micro_batches=num_micro_batches) as run:
        num_warm = -(-_WARM_STEPS // policy.sync_every) * policy.sync_every
        run(num_warm + policy.staleness)
        num_steps = whole_rounds(run, policy, seconds)
        return run(num_steps, num_repeats)


@contextmanager
def steps_under(
    comm: Communicator, training: Training, policy: PolicySpec | None, *, num_micro_batches: int = 1
) -> Iterator[RunSteps]:
    """A context with a function that runs any number of steps under a policy. Collective.

    Args:
        comm, num_micro_batches: as in `measure_policy`.
        training: the same on each worker.
        policy: as in `measure_policy`, or None to exchange nothing.

    Yields:
        What runs so many steps so many times, and returns the seconds of one on the slowest
        worker, for each time. Nothing else happens in between: late gradients would travel while
        no clock runs.
    """
    model, exchange = _attached(comm, training, policy)
    no_sync = getattr(model if exchange is None else exchange, "no_sync", nullcontext)

    def step() -> None:
        with no_sync():
            for _ in range(num_micro_batches - 1):
                training.loss_of(model).backward()  # type: ignore[no-untyped-call]
        training.loss_of(model).backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        training.optimizer.zero_grad()

    def run(num_steps: int, num_repeats: int = 1) -> list[float]:
        ends_s = [perf_counter()]
        for _ in range(num_repeats):
            for _ in range(num_steps):
                step()
            ends_s.append(now_s(comm.device))
        own_s = [(end_s - start_s) / num_steps for start_s, end_s in pairwise(ends_s)]
        return [slowest_s(comm, seconds) for seconds in own_s]

    yield run
    if exchange is not None:
        for _ in exchange.flush():
            pass
        exchange.sync_buffers()
        exchange.detach()


def whole_rounds(run: RunSteps, policy: PolicySpec, seconds: float) -> int:
    """The number of steps that take about a given time and end with an exchange; runs a round."""
    (step_s,) = run(policy.sync_every)
    return max(1, round(seconds / (step_s * policy.sync_every))) * policy.sync_every


def _attached(
    comm: Communicator, training: Training, policy: PolicySpec | None
) -> tuple[nn.Module, Exchange | None]:
    if comm.size == 1 or policy is None:
        return training.model, None
    if policy.name == "DDP":
        return DistributedDataParallel(training.model, process_group=comm.process_group), None
    with _quiet():
        return training.model, attach(
            training.model, comm, exchange_policy(policy), optimizer=training.optimizer
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the log line of each policy."""
    logger = logging.getLogger("allstep")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Pause(torch.autograd.Function):
    """A layer that sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, backward_s
        if forward_s:
            sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.seconds:
            sleep(ctx.seconds)
        # So small that a bucket's sum is finite in 16 bits, as a real gradient's is.
        return grads[0], torch.full_like(ctx.weight, 2**-10), None, None


class PausingLayer(nn.Module):
    """A layer that only sleeps, with a parameter that gets a gradient.

    Args:
        num_elements, dtype: of its weight.
        forward_s, backward_s: how long it sleeps.
    """

    def __init__(
        self,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_elements, dtype=dtype))
        self._seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pause.apply(x, self.weight, *self._seconds)  # type: ignore[no-untyped-call]
        return out


def sleeping_training(workload: Workload) -> Training:
    """A training whose compute is replaced by sleep, for hosts that aren't what it will run on.

    Args:
        workload: seconds of a step; its gradients become as many layers, or eight, of a dtype
            that has as many bytes.
    """
    eighth_bytes = -(-workload.num_params // 8) * workload.element_bytes
    sizes = workload.gradients or tuple(workload.bucket_sizes(eighth_bytes))
    buckets = reversed(workload.buckets(sizes))  # ready first is last in the forward pass
    forward_s = workload.forward_s / len(sizes)
    dtype = _DTYPES[workload.element_bytes]
    layers = [PausingLayer(b.num_elements, dtype, forward_s, b.backward_s) for b in buckets]
    return pausing_training(layers)


def pausing_training(
    layers: Sequence[PausingLayer], device: torch.device | str = "cpu"
) -> Training:
    """A training of pausing layers."""
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.zeros((), requires_grad=True, device=device)
    return Training(model, lambda net: net(x), optimizer)
