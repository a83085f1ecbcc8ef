"""What `attach` and DDP add to the host's time in a backward pass, as on an accelerator.

    python benchmarks/bench_host.py [--quick]

On a GPU a step takes as long as the host needs to launch it, where kernels are small. So the
host's own work counts: Python's for `attach`, mostly C++ for DDP. Models have as many parameters
as ResNet-50 and BERT-large, of a few elements each, in as many buckets of 25 MiB as those models
fill. CPU tensors are taken for an accelerator's, with streams that cost nothing. The process group
is torch's fake one, whose calls do nothing: the other ranks are only numbers. DDP can't take its
future, and has a hook that returns one at once. The time is the thread's on the processor, so that
other processes don't count.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Estimate, estimate, print_headline, ratio, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import allstep
from allstep import Communicator, Synchronous, device
from allstep.comm.algorithms import Native
from allstep.comm.group import Topology
from allstep.comm.group_wire import GroupWire
from allstep.comm.missing import RankNames
from allstep.comm.work import CompletedWork, Work

SIZES = (2, 32, 1024)  # workers
NUM_ELEMENTS = 4  # of a parameter
FIRST_STEPS = 5  # buckets are made anew after the first
STEPS = 20  # in a repeat, of which the fastest counts
TARGET = 1.5
VARIANTS = ("bare", "attach", "ddp")


@dataclass(frozen=True)
class Parameters:
    """A model's list of parameters, and how many buckets of 25 MiB they fill in float32."""

    name: str
    number: int
    num_buckets: int

    @property
    def bucket_bytes(self) -> int:
        """Of the small parameters here."""
        return -(-self.number // self.num_buckets) * NUM_ELEMENTS * 4


MODELS = (Parameters("resnet50", 161, 4), Parameters("bert_large", 391, 51))


class Small(nn.Module):
    """A sum over many small parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.small = nn.ParameterList(torch.zeros(NUM_ELEMENTS) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p.sum() for p in self.small]).sum() * x


class FreeStream:
    """A stream, and an event, that cost nothing."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> "FreeStream":
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> "FreeStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FreeStreams(device.Driver):
    """Takes CPU tensors for an accelerator's."""

    _stream = FreeStream()

    def is_accelerator(self, device: torch.device) -> bool:
        return True

    def has_streams(self, device: torch.device) -> bool:
        return True

    def current_stream(self, device: torch.device) -> device.Stream:
        return self._stream

    def new_stream(self, device: torch.device, *, is_urgent: bool) -> device.Stream:
        return self._stream

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def record_stream(self, tensor: Tensor, stream: device.Stream) -> None:
        pass

    def new_pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)


class EchoWire(GroupWire):
    """A wire on which all others say what this worker says; only sums go to the process group."""

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        return [buffer.clone() for _ in sizes_bytes]

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        return CompletedWork(None)


class ZeroSums(Native):
    """Leaves zeros, as workers who have come for the same do where they compare that."""

    def post(self, flat: Tensor) -> Work[None]:
        work = super().post(flat)
        flat.zero_()
        return work


@contextmanager
def fake_communicator(size: int) -> Iterator[Communicator]:
    """That of the first of so many workers, who all do the same."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        wire = EchoWire(
            dist.distributed_c10d._get_default_group(), 60.0, names=RankNames(range(size), 0, size)
        )
        yield Communicator(wire, Topology(0, size, 0, 1), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def make(variant: str, parameters: Parameters, comm: Communicator) -> nn.Module:
    model = Small(parameters.number)
    bucket_bytes = parameters.bucket_bytes
    if variant == "attach":
        policy = Synchronous(algorithm=ZeroSums, bucket_bytes=bucket_bytes)
        allstep.attach(model, comm, policy)
    elif variant == "ddp":
        ddp = DistributedDataParallel(
            model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        ddp.register_comm_hook(None, send_nothing)
        return ddp
    return model


def send_nothing(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def backward_s(model: nn.Module) -> float:
    model.zero_grad()
    loss = model(torch.ones(()))
    start_s = time.thread_time()
    loss.backward()
    return time.thread_time() - start_s


def measure(parameters: Parameters, comm: Communicator, repeats: int) -> dict[str, list[float]]:
    """Variant -> milliseconds of a backward pass, in each repeat."""
    models = {variant: make(variant, parameters, comm) for variant in VARIANTS}
    for model in models.values():
        for _ in range(FIRST_STEPS):
            backward_s(model)
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant, model in models.items():
            taken[variant].append(1e3 * min(backward_s(model) for _ in range(STEPS)))
    return taken


def added(taken: dict[str, list[float]], variant: str) -> list[float]:
    """Milliseconds over the bare pass, repeat by repeat."""
    return [a - b for a, b in zip(taken[variant], taken["bare"], strict=True)]


def row(taken: dict[str, list[float]]) -> dict[str, Estimate]:
    attach_ms, ddp_ms = added(taken, "attach"), added(taken, "ddp")
    return {
        "bare_ms": estimate(taken["bare"]),
        "attach_adds_ms": estimate(attach_ms),
        "ddp_adds_ms": estimate(ddp_ms),
        "attach_vs_ddp": ratio(attach_ms, ddp_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some twenty seconds")
    repeats = 7 if parser.parse_args().quick else 30
    torch.set_num_threads(1)
    rows: dict[tuple[str, int], dict[str, Estimate]] = {}
    for size in SIZES:
        with device.using_driver(FreeStreams()), fake_communicator(size) as comm:
            for parameters in MODELS:
                rows[parameters.name, size] = row(measure(parameters, comm, repeats))
    table = Table(
        "parameters of", "workers", *next(iter(rows.values())), title="The host in a backward pass"
    )
    for (name, size), found in rows.items():
        table.add_row(name, str(size), *map(str, found.values()))
    Console(width=150).print(table)
    results = {
        f"{name}_{size}": {key: vars(value) for key, value in found.items()}
        for (name, size), found in rows.items()
    }
    path = write_results("bench_host", {"repeats": repeats, "target": TARGET, "rows": results})
    print(f"target: `attach` adds at most {TARGET} times what DDP adds; written to {path.name}")
    print_headline(
        **{f"host_vs_ddp_{x.name}": rows[x.name, SIZES[0]]["attach_vs_ddp"].median for x in MODELS}
    )


if __name__ == "__main__":
    main()
