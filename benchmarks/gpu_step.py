"""Steps of bench_gpu.py: bare, under `allstep.attach`, and under torch's DDP.

[Note: active] A lone worker has nothing to exchange, and `attach` leaves its gradients alone:
"attach, lone". So "attach" here does all that it does among several workers but comparing them:
hooks, buckets, streams and the backend's all-reduce of each bucket, which DDP calls for one worker
as well.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from gpu_models import Batch, Workload, make_workload
from gpu_timing import (
    Setting,
    count,
    in_ms,
    peak_product,
    seconds,
    share,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep import Communicator, Synchronous
from allstep.comm.algorithms import Native
from allstep.device import synchronize
from allstep.exchange.optimizer_watch import watch
from allstep.exchange.overlapped import OverlappedExchange
from allstep.train.flops import count_flops

__all__ = ["LONE_VARIANTS", "SHARED_VARIANTS", "Trainer", "measure_step"]

LONE_VARIANTS = ("bare", "attach, lone", "attach", "ddp")
SHARED_VARIANTS = ("bare", "attach", "ddp")
FIRST_STEPS = 4  # buckets are made anew after the first
CALLS = 2  # steps in a repeat


class AlwaysNative(Native):
    """The backend's all-reduce, also of one rank. [Note: active]"""

    def reduce_(self, flat: Tensor) -> None:
        self._reduce_(flat.detach())


class ActiveExchange(OverlappedExchange):
    """Exchanges also where there is one rank. [Note: active]"""

    @property
    def _is_active(self) -> bool:
        return True


def attach_active(model: nn.Module, comm: Communicator) -> None:
    """`attach` as among several workers."""
    if comm.size > 1:
        allstep.attach(model, comm)
    else:
        watch(ActiveExchange(model, comm, Synchronous(algorithm=AlwaysNative)))


class Trainer:
    """A model under one way to exchange."""

    def __init__(self, variant: str, workload: Workload, comm: Communicator) -> None:
        self._workload = workload
        model = workload.make()
        self._optimizer = workload.optimizer(model)
        self._model = model
        if variant == "attach, lone":
            allstep.attach(model, comm)
        elif variant == "attach":
            attach_active(model, comm)
        elif variant == "ddp":
            devices = [comm.device.index] if comm.device.type == "cuda" else None
            self._model = DistributedDataParallel(
                model, device_ids=devices, gradient_as_bucket_view=True
            )

    def gradients(self, batch: Batch) -> None:
        """Forward and backward."""
        self._workload.mean_loss(self._model, batch).backward()

    def step(self, batch: Batch) -> None:
        self.gradients(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def backward_s(self, batch: Batch) -> float:
        """Until backward returns, all before being done."""
        loss = self._workload.mean_loss(self._model, batch)
        synchronize(batch[0].device)
        start_s = time.perf_counter()
        loss.backward()
        own_s = time.perf_counter() - start_s
        synchronize(batch[0].device)
        self._optimizer.zero_grad()
        return own_s

    def flops(self, batch: Batch) -> float | None:
        """Floating-point operations of the products of a step."""
        found = count_flops(lambda: self.gradients(batch))
        self._optimizer.zero_grad()
        return found


def measure_step(name: str, comm: Communicator, setting: Setting) -> dict[str, Any]:
    """All that is measured of a workload's step."""
    workload = make_workload(name, setting)
    is_lone = comm.size == 1
    batch = workload.data(workload.batch if is_lone else workload.shared_batch)
    small = workload.data(workload.small_batch)
    trainers = {
        variant: Trainer(variant, workload, comm)
        for variant in (LONE_VARIANTS if is_lone else SHARED_VARIANTS)
    }
    for trainer in trainers.values():
        for _ in range(FIRST_STEPS):
            trainer.step(batch)
    steps: dict[str, Callable[[], object]] = {
        variant: lambda trainer=trainer: trainer.step(batch)  # type: ignore[misc]
        for variant, trainer in trainers.items()
    }
    taken = seconds(steps, setting, calls=CALLS)
    hosts = {
        "backward_host_ms": backward_seconds(trainers, batch, setting.repeats),
        "small_backward_host_ms": backward_seconds(trainers, small, 2 * setting.repeats),
    }
    counts = {variant: asdict(count(step, setting)) for variant, step in steps.items()}
    row: dict[str, Any] = {
        "batch": len(batch[0]),
        "dtype": "tf32" if workload.dtype == torch.float32 else str(workload.dtype)[6:],
        "num_workers": comm.size,
        "step_ms": {variant: in_ms(values) for variant, values in taken.items()},
        "vs_bare": {v: share(taken[v], taken["bare"]) for v in taken if v != "bare"},
        "attach_vs_ddp": share(taken["attach"], taken["ddp"]),
        **{key: {v: in_ms(x) for v, x in values.items()} for key, values in hosts.items()},
        "counts": counts,
    }
    if is_lone:
        row |= _share_of_peak(trainers["bare"], workload, batch, taken["bare"], setting)
    return row


def backward_seconds(
    trainers: Mapping[str, Trainer], batch: Batch, repeats: int
) -> dict[str, list[float]]:
    """Until backward returns, of each variant, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for repeat in range(-1, repeats):
        for name in list(trainers) if repeat % 2 else list(reversed(trainers)):
            own_s = trainers[name].backward_s(batch)
            if repeat >= 0:
                taken[name].append(own_s)
    return taken


def _share_of_peak(
    trainer: Trainer, workload: Workload, batch: Batch, taken: list[float], setting: Setting
) -> dict[str, Any]:
    """What a bare step makes of the rate of large products in the same dtype."""
    product, product_flops = peak_product(workload.dtype, setting)
    rates = [product_flops / s for s in seconds({"peak": product}, setting, calls=10)["peak"]]
    flops = trainer.flops(batch)
    if flops is None:
        return {}
    return {
        "flops": flops,
        "peak_tflops_per_s": sum(rates) / len(rates) / 1e12,
        "share_of_peak": share([flops / s for s in taken], rates),
    }
