"""Steps of training under many exchanges, which take turns in the same processes.

    python benchmarks/exchange_worker.py POINT.json      # as a rank; started by the benchmarks

What is compared is a whole step: forward, backward, exchange and, where it says so, the update.
With staleness the pipeline is full when the clock starts and as full when it stops.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from common import run_worker
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep import Communicator, ExchangePolicy, LocalSGD, Nesterov, Stale, Synchronous

__all__ = ["Point", "measure", "policies"]

FIRST_STEPS = 5  # buckets are made anew after the first, and tuned after some
FIRST_GLOBAL_BATCHES = 20  # the units of exact sums are made in each of the first 16
MATRIX = 1024  # rows and columns of a layer that computes


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is measured in one go.

    Attributes:
        variants: "alone" (no exchange), "ddp", "ddp view" (`gradient_as_bucket_view`), or names
            in `policies`, or "ALGORITHM/BYTES" for fp32 with that algorithm and bucket size.
        gradient_bytes: of all gradients, float32.
        bucket_bytes: of a bucket, DDP's included; None for everyone's own default.
        num_layers: equal ones.
        compute: "real" layers multiply matrices; "sleep" ones do nothing for as long.
        compute_s: of forward and backward; None for the smallest real batch.
        updates: whether an optimizer's step is part of it.
        repeats: of each variant.
        steps: in a repeat.
        in_global_batches: whether a step is a global batch of one micro-batch a worker, as in
            `allstep.steps`; only there are sums exact.
    """

    variants: Sequence[str]
    gradient_bytes: int
    num_layers: int
    compute: Literal["real", "sleep"] = "real"
    compute_s: float | None = None
    bucket_bytes: int | None = None
    updates: bool = True
    repeats: int = 7
    steps: int = 4
    in_global_batches: bool = False


def policies() -> dict[str, ExchangePolicy]:
    """Every way to exchange that has a name here."""
    return {
        "fp32": Synchronous(),
        "native": Synchronous(algorithm="native"),
        "auto": Synchronous(algorithm="auto", bucket_bytes="auto"),
        "bf16": Synchronous(compression="bf16"),
        "fp16": Synchronous(compression="fp16"),
        "int8": Synchronous(compression="int8"),
        "powersgd 4": Synchronous(compression="powersgd"),
        "topk 1%": Synchronous(compression="topk"),
        "exact": Synchronous(compression="exact"),
        "fp32 stale 1": Stale(steps=1),
        "fp16 stale 1": Stale(compression="fp16", steps=1),
        "int8 stale 1": Stale(compression="int8", steps=1),
        "fp16 stale 2": Stale(compression="fp16", steps=2),
        "local H=4": LocalSGD(sync_every=4),
        "local H=16": LocalSGD(sync_every=16),
        "diloco H=16": LocalSGD(sync_every=16, outer_optimizer=Nesterov()),
    }


def find_policy(name: str, bucket_bytes: int | None) -> ExchangePolicy:
    """The policy of a name, with its buckets scaled to the model."""
    if "/" in name:
        algorithm, own_bytes = name.split("/")
        return Synchronous(algorithm=algorithm, bucket_bytes=int(own_bytes))
    policy = policies()[name]
    if bucket_bytes is None or policy.bucket_bytes == "auto":
        return policy
    return replace(policy, bucket_bytes=bucket_bytes)


class Pause(torch.autograd.Function):
    """A layer that takes time, but no core: what a rank alone on its host would do there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds / 3)  # forward is a third of the whole, as with matrices
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, ctx.gradient.clone(), None, None


class SleepingLayer(nn.Module):
    """Holds a matrix whose gradient is always the same random one."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self._gradient = torch.randn(size, size)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(x, self.weight, self._gradient, self._seconds)


def make_model(point: Point) -> nn.Module:
    torch.manual_seed(0)
    num_elements = point.gradient_bytes // 4 // point.num_layers
    if point.compute == "sleep":
        seconds = (point.compute_s or 0.0) / point.num_layers
        size = round(num_elements**0.5)
        return nn.Sequential(*(SleepingLayer(size, seconds) for _ in range(point.num_layers)))
    layers: list[nn.Module] = []
    for _ in range(point.num_layers):
        layers += [nn.Linear(MATRIX, num_elements // MATRIX, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def make_batch(point: Point, comm: Communicator) -> Tensor:
    """As large as it takes for `compute_s`, the same on all workers."""
    if point.compute == "sleep":
        return torch.zeros(1, requires_grad=True)
    if point.compute_s is None:
        return torch.randn(1, MATRIX)
    model, trial = make_model(point), 128
    for _ in range(3):
        x = torch.randn(trial, MATRIX)
        best_s = min(_seconds_of(lambda x=x: model(x).mean().backward()) for _ in range(6))
        own_s = torch.tensor(best_s, dtype=torch.float64)
        trial = max(1, round(trial * point.compute_s / comm.all_reduce(own_s, "mean").item()))
    return torch.randn(trial, MATRIX)


def _seconds_of(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


class Trainer:
    """A model under one way to exchange."""

    def __init__(self, name: str, point: Point, comm: Communicator, x: Tensor) -> None:
        self._x, self._updates = x, point.updates
        self._size = comm.size if point.in_global_batches else None
        self._number = 0
        self._model: nn.Module = make_model(point)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self.exchange: allstep.Exchange | None = None
        self.staleness, self.steps = 0, point.steps
        if name in ("ddp", "ddp view"):
            caps = (
                {} if point.bucket_bytes is None else {"bucket_cap_mb": point.bucket_bytes / 2**20}
            )
            self._model = DistributedDataParallel(
                self._model, gradient_as_bucket_view=name == "ddp view", **caps
            )
        elif name != "alone":
            policy = find_policy(name, point.bucket_bytes)
            self.staleness = policy.staleness
            every = policy.sync_every if isinstance(policy, LocalSGD) else 1
            self.steps = max(point.steps, every)  # whole rounds
            self.exchange = allstep.attach(self._model, comm, policy, optimizer=self._optimizer)

    def step(self) -> None:
        if self.exchange is None or self._size is None:
            self._model(self._x).mean().backward()
        else:
            with self.exchange.global_batch(self._number, num_micro_batches=self._size):
                self.exchange.begin_micro_batch()
                (self._model(self._x).mean() / self._size).backward()
            self._number += 1
        if self._updates:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def fill(self) -> None:
        """As many steps as it takes until each is like the one before it."""
        for _ in range(self.staleness + 1):
            self.step()

    def drain(self) -> None:
        """Leaves the wire to others."""
        if self.exchange is not None:
            for _ in self.exchange.flush():
                pass


def measure(comm: Communicator, point: Point) -> dict[str, dict[str, Any]]:
    """Variant -> seconds of a step in each repeat, of the slowest rank; bytes that a step sends."""
    x = make_batch(point, comm)
    trainers = {name: Trainer(name, point, comm, x) for name in point.variants}
    for trainer in trainers.values():
        for _ in range(FIRST_GLOBAL_BATCHES if point.in_global_batches else FIRST_STEPS):
            trainer.step()
        trainer.drain()
    sent_bytes = {name: _sent_bytes_of_step(trainer) for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for repeat in range(point.repeats):
        for name in list(trainers) if repeat % 2 else list(reversed(trainers)):
            seconds[name].append(_timed(trainers[name], comm))
    return {n: {"seconds": seconds[n], "sent_bytes": sent_bytes[n]} for n in trainers}


def _timed(trainer: Trainer, comm: Communicator) -> float:
    comm.barrier()
    trainer.fill()
    start_s = time.perf_counter()  # no barrier here: its messages would wait for the wire
    for _ in range(trainer.steps):
        trainer.step()
    own_s = (time.perf_counter() - start_s) / trainer.steps
    trainer.drain()
    return comm.all_reduce(torch.tensor(own_s, dtype=torch.float64), "max").item()


def _sent_bytes_of_step(trainer: Trainer) -> int | None:
    """By the exchange's own count; it doesn't count averages of parameters."""
    if trainer.exchange is None or trainer.exchange.averaging is not None:
        return None
    before = trainer.exchange.stats().sent_bytes
    trainer.step()
    trainer.drain()
    return trainer.exchange.stats().sent_bytes - before


def run_point(
    point: Point, run: Callable[..., None], folder: Path, *, timeout_s: float = 3600
) -> dict[str, dict[str, Any]]:
    """Measures a point with ranks that `run(command, timeout_s=…)` starts."""
    file = folder / "point.json"
    file.write_text(json.dumps(asdict(point)))
    run([sys.executable, __file__, file], timeout_s=timeout_s)
    measured: dict[str, dict[str, Any]] = json.loads(file.with_suffix(".measured").read_text())
    return measured


def main() -> None:
    file = Path(sys.argv[1])
    point = Point(**json.loads(file.read_text()))
    run_worker(lambda comm: measure(comm, point), file.with_suffix(".measured"))


if __name__ == "__main__":
    main()
