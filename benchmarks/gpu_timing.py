"""How bench_gpu.py measures: synchronised clocks, and what a profiler counts in a step."""

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import estimate, interleave, ratio
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from allstep.device import synchronize

__all__ = ["Counts", "Setting", "count", "first_lines", "in_ms", "peak_product", "seconds", "share"]

GPU_GEMM, CPU_GEMM = 8192, 512
HOST_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Setting:
    """How to measure: the command line's arguments.

    Attributes:
        device: "cuda" or "cpu".
        repeats: of each variant.
        tiny: whether models are so small that a CPU can run them, to try the benchmark itself.
    """

    device: str
    repeats: int
    tiny: bool = False

    @property
    def torch_device(self) -> torch.device:
        """Of all tensors, with its number."""
        return torch.device("cuda:0" if self.device == "cuda" else "cpu")

    def take_effect(self) -> None:
        """On this process: TF32 for whatever is float32."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(0)
        if self.device == "cuda":
            torch.cuda.set_device(0)


def seconds(
    variants: Mapping[str, Callable[[], object]],
    setting: Setting,
    *,
    calls: int = 1,
    warmups: int = 1,
) -> dict[str, list[float]]:
    """Wall-clock seconds of a call of each variant, in turns; the device's work is waited for.

    Args:
        variants: what to call.
        setting: how often.
        calls: in a repeat, without waiting between them.
        warmups: repeats that do not count.
    """

    def timed(variant: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                variant()
            synchronize(setting.torch_device)

        return run

    synchronize(setting.torch_device)
    taken = interleave(
        {name: timed(variant) for name, variant in variants.items()},
        setting.repeats,
        warmups=warmups,
    )
    return {name: [s / calls for s in values] for name, values in taken.items()}


def peak_product(dtype: torch.dtype, setting: Setting) -> tuple[Callable[[], object], float]:
    """A square product of random matrices, and its floating-point operations."""
    size = GPU_GEMM if setting.device == "cuda" else CPU_GEMM
    a, b = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


@dataclass(frozen=True)
class Counts:
    """What happened in one step, by torch.profiler.

    Attributes:
        kernels: that ran; on a CPU torch's operations.
        kernel_ms: of all of them together.
        waits: calls by which the host waits for the device's streams or events.
        copies_to_host: from the device.
        copies_from_pageable: to the device, of memory that is not pinned: the host waits for those.
        event_queries: looks at an event.
        launches: calls of the driver that start a kernel; 0 with kernels if calls were not traced.
    """

    kernels: int
    kernel_ms: float
    waits: int = 0
    copies_to_host: int = 0
    copies_from_pageable: int = 0
    event_queries: int = 0
    launches: int = 0


def count(step: Callable[[], object], setting: Setting) -> Counts:
    """Runs a step under a profiler."""
    is_gpu = setting.device == "cuda"
    synchronize(setting.torch_device)
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        step()
        synchronize(setting.torch_device)
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    names = Counter[str]()
    kernels, kernel_ns = 0, 0
    for event in events:
        name = event.name()
        is_on_device = event.device_type() == DeviceType.CUDA
        if event.is_user_annotation():
            continue  # what a kernel is part of
        is_kernel = is_on_device and not name.startswith(("Memcpy", "Memset"))
        if is_kernel if is_gpu else name.startswith("aten::"):
            kernels += 1
            kernel_ns += event.duration_ns()
        elif is_on_device or name.startswith(("cuda", "cu")):
            names[name] += 1

    def number(*starts: str) -> int:
        return sum(n for name, n in names.items() if name.startswith(starts))

    return Counts(
        kernels=kernels,
        kernel_ms=kernel_ns / 1e6,
        waits=number(*HOST_WAITS),
        copies_to_host=number("Memcpy DtoH"),
        copies_from_pageable=number("Memcpy HtoD (Pageable"),
        event_queries=number("cudaEventQuery"),
        launches=number("cudaLaunch", "cuLaunch"),
    )


def in_ms(values: list[float]) -> dict[str, float]:
    """Median and interval in milliseconds."""
    return asdict(estimate([1e3 * s for s in values]))


def share(values: list[float], base: list[float]) -> dict[str, float]:
    """Median and interval of values over base."""
    return asdict(ratio(values, base))


def first_lines(error: BaseException, most: int = 12) -> dict[str, Any]:
    """An error for the results: what it says, and the end of its traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    said = f"{type(error).__name__}: {error}".splitlines()
    return {"error": "\n".join(said[:most]), "traceback": lines[-2 * most :]}
