"""What bench_gpu.py measures besides steps: optimizers, exact sums, formats, batch norm."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from bench_overhead import Cut, fashion_task
from gpu_models import bert_large, make_workload
from gpu_timing import Setting, count, in_ms, seconds, share
from optim_variants import Groups, make_groups, with_own_gradients
from torch import Tensor, nn

import allstep
from allstep import Communicator, Synchronous
from allstep.comm.algorithms import Dummy
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import WIRES, Transport
from allstep.nn import convert_batch_norm
from allstep.optim import LAMB, LARS, Adam, LayerWise
from allstep.recipes.bert_model import BertForPreTraining

__all__ = ["FORMATS", "measure_batch_norm", "measure_exact", "measure_format", "measure_optimizers"]

Step = Callable[[], object]
FORMATS = tuple(WIRES)
BUCKET_BYTES = 25 << 20
FIRST_GLOBAL_BATCHES = 20  # the units of exact sums are made in each of the first 16
NUM_MICRO_BATCHES = 2
# A parameter's numbers that a step reads and writes at least, its gradient included.
ADAM_PASSES, MOMENTUM_PASSES = 7, 5


# -- optimizers ------------------------------------------------------------------------------------


def measure_optimizers(setting: Setting) -> dict[str, Any]:
    """Steps over BERT-large's parameters, float32, against torch's fused AdamW and SGD."""
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in BertForPreTraining(bert_large(setting)).parameters()]
    weights = make_groups(shapes, setting.device, 0.01)
    variants = _optimizers()
    steps: dict[str, Step] = {
        name: make(with_own_gradients(weights)).step for name, (make, _) in variants.items()
    }
    taken = seconds(steps, setting, calls=3, warmups=2)
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    bases = {ADAM_PASSES: "AdamW, fused", MOMENTUM_PASSES: "SGD, fused"}
    return {
        name: {
            "step_ms": in_ms(taken[name]),
            "gb_per_s": passes * num_bytes / sorted(taken[name])[len(taken[name]) // 2] / 1e9,
            "against": bases[passes],
            "ratio": share(taken[name], taken[bases[passes]]),
            "counts": asdict(count(steps[name], setting)),
        }
        for name, (_, passes) in variants.items()
    }


def _optimizers() -> dict[str, tuple[Callable[[Groups], torch.optim.Optimizer], int]]:
    def unadapted(groups: Groups) -> torch.optim.Optimizer:
        return LayerWise([{**group, "adapt": False} for group in groups], Adam(), 1e-4)

    optim = torch.optim
    return {
        "AdamW, fused": (lambda g: optim.AdamW(g, 1e-4, fused=True), ADAM_PASSES),
        "AdamW, foreach": (lambda g: optim.AdamW(g, 1e-4, foreach=True), ADAM_PASSES),
        "LAMB": (lambda g: LAMB(g, 1e-4), ADAM_PASSES),
        'LAMB, nonfinite="propagate"': (
            lambda g: LAMB(g, 1e-4, nonfinite="propagate"),
            ADAM_PASSES,
        ),
        "LayerWise(Adam), no ratio": (unadapted, ADAM_PASSES),
        "SGD, fused": (lambda g: optim.SGD(g, 1e-4, 0.9, fused=True), MOMENTUM_PASSES),
        "SGD, foreach": (lambda g: optim.SGD(g, 1e-4, 0.9, foreach=True), MOMENTUM_PASSES),
        "LARS": (lambda g: LARS(g, 1e-4), MOMENTUM_PASSES),
    }


# -- exact sums ------------------------------------------------------------------------------------


def measure_exact(name: str, comm: Communicator, setting: Setting) -> dict[str, Any]:
    """Global batches of two micro-batches on a lone worker, with exact sums and without."""
    make, batch, mean_loss = _training(name, setting)
    parts = list(zip(*(x.chunk(NUM_MICRO_BATCHES) for x in batch), strict=True))
    loops = {
        compression: _steps(make(), Cut([parts]), comm, compression, mean_loss)
        for compression in ("fp32", "exact")
    }
    steps: dict[str, Step] = {compression: loop.__next__ for compression, loop in loops.items()}
    for step in steps.values():
        for _ in range(4 if setting.tiny else FIRST_GLOBAL_BATCHES):
            step()
    taken = seconds(steps, setting, calls=2)
    return {
        "batch": len(batch[0]),
        "step_ms": {compression: in_ms(values) for compression, values in taken.items()},
        "price": share(taken["exact"], taken["fp32"]),
        "counts": {
            compression: asdict(count(step, setting)) for compression, step in steps.items()
        },
    }


def _training(name: str, setting: Setting) -> tuple[Any, Any, Any]:
    """What makes a model and its optimizer, a batch on the device, and the loss of a part of it."""
    device = setting.torch_device
    if name == "fashion":
        task = fashion_task(128)
        batch = tuple(x.to(device) for x in task.train_set.tensors)

        def make_fashion() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = fashion_task(128).model.to(device)
            return model, torch.optim.SGD(model.parameters(), 1e-3, 0.9, fused=True)

        return make_fashion, batch, task.loss
    workload = make_workload(name, setting)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = workload.make()
        return model, workload.optimizer(model)

    return make, workload.data(workload.batch), workload.mean_loss


def _steps(
    trained: tuple[nn.Module, torch.optim.Optimizer],
    batches: Cut,
    comm: Communicator,
    compression: str,
    mean_loss: Callable[[nn.Module, Any], Tensor],
) -> Iterator[None]:
    model, optimizer = trained
    exchange = allstep.attach(model, comm, Synchronous(compression=compression))
    while True:
        for batch in allstep.steps(batches, exchange):
            for part in batch:
                batch.backward(mean_loss(model, part))
            optimizer.step()
            optimizer.zero_grad()
            yield


# -- formats ---------------------------------------------------------------------------------------


class NoNetwork(Transport):
    """Two workers of which the other sends what this one does, at once."""

    @property
    def size(self) -> int:
        return 2

    def all_reduce(self, payload: Tensor) -> None:
        pass

    def all_to_all(self, payload: Tensor) -> Tensor:
        return payload

    def all_gather(self, payload: Tensor) -> Tensor:
        return payload.expand(2, *payload.shape)


def measure_format(name: str, setting: Setting) -> dict[str, Any]:
    """What a format does to a bucket of 25 MiB, without what travels."""
    side = 64 if setting.tiny else 1024
    num_layers = BUCKET_BYTES // (4 << 20)
    parameters = [
        (f"{kind}{i}", nn.Parameter(torch.empty(shape, device=setting.torch_device)))
        for i in range(num_layers)
        for kind, shape in (("weight", (side, side)), ("bias", (side,)))
    ]
    layout = BucketLayout.of(parameters, num_tail=64)
    comm = Communicator.single_process(setting.torch_device)
    wire = WIRES[name]()
    state = wire.new_state(layout)
    transport = NoNetwork(comm, Dummy(comm))
    flat = layout.new_flat()
    flat[: layout.num_elements].normal_()
    gradients = flat.clone()

    def sum_() -> None:
        flat.copy_(gradients)  # else errors that come back would grow
        with torch.no_grad():
            wire.sum_(flat, layout, state, transport)

    steps: dict[str, Step] = {"copy": lambda: flat.copy_(gradients), name: sum_}
    taken = seconds(steps, setting, calls=10, warmups=2)
    own = [max(0.0, s - c) for s, c in zip(taken[name], taken["copy"], strict=True)]
    median_s = sorted(own)[len(own) // 2]
    counts = count(sum_, setting)
    return {
        "bucket_bytes": layout.num_bytes,
        "sum_ms": in_ms(own),
        "copy_ms": in_ms(taken["copy"]),
        "gb_per_s": layout.num_bytes / median_s / 1e9 if median_s > 0 else None,
        "counts": asdict(counts),
    }


# -- batch norm ------------------------------------------------------------------------------------


def measure_batch_norm(comm: Communicator, setting: Setting) -> dict[str, Any]:
    """Forward and backward of one, whose statistics are of both workers' samples.

    torch's has none for CPUs.
    """
    micro_batch, channels, side = (2, 8, 8) if setting.tiny else (32, 256, 56)
    device = setting.torch_device
    x = torch.randn(micro_batch, channels, side, side, device=device, requires_grad=True)
    grad = torch.randn_like(x)

    def own() -> nn.Module:
        return nn.BatchNorm2d(channels).to(device)

    modules = {"one worker's": own()}
    modules["ours"] = convert_batch_norm(
        own(),
        comm,
        group_size=comm.size * micro_batch,
        micro_batch=micro_batch,
        global_batch=comm.size * micro_batch,
    )
    if device.type == "cuda":
        modules["SyncBatchNorm"] = nn.SyncBatchNorm.convert_sync_batchnorm(own())

    def step_of(module: nn.Module) -> Step:
        def step() -> None:
            x.grad = None
            module(x).backward(grad)

        return step

    steps = {name: step_of(module) for name, module in modules.items()}
    taken = seconds(steps, setting, calls=5, warmups=2)
    row: dict[str, Any] = {
        "shape": list(x.shape),
        "num_workers": comm.size,
        "step_ms": {name: in_ms(values) for name, values in taken.items()},
        "counts": {name: asdict(count(step, setting)) for name, step in steps.items()},
    }
    if "SyncBatchNorm" in taken:
        row["ours_vs_sync"] = share(taken["ours"], taken["SyncBatchNorm"])
    return row
