"""What bench_local.py measures in a process of its own each time, so that memory starts afresh."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import Estimate, estimate, interleave, keep_heap, ratio
from local_variants import Jax, Ours, Shape, Unfold, Views, check, jax, sparse_forwards

__all__ = ["Setting", "curve_point", "measure", "working_memory_bytes"]

CPU_GEMM, CUDA_GEMM = 1024, 8192
PEAK_CALLS, CUDA_CALLS = 10, 10
SPARSE_MOST_VALUES = 100_000_000  # an index takes eight bytes for each
JAX_MOST_WEIGHTS = 200_000_000  # with 263 million it takes more than 24 GB
SLOW_REPEATS = 3  # of what takes many times as long
LONG_S = 20.0  # what takes longer runs once


@dataclass(frozen=True)
class Setting:
    """How to measure: the command line's arguments."""

    repeats: int
    device: str
    dtype: str
    tf32: bool
    threads: int | None

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def take_effect(self) -> None:
        """On this process."""
        torch.manual_seed(0)
        if self.device == "cpu":
            keep_heap()
        if self.threads:
            torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = self.tf32

    @property
    def calls(self) -> int:
        """In a repeat: a GPU's are short beside what starting and waiting take."""
        return 1 if self.device == "cpu" else CUDA_CALLS


class Peak:
    """Square products of random matrices; a GPU is faster with zeros and ones."""

    def __init__(self, dtype: torch.dtype, device: str):
        size = CPU_GEMM if device == "cpu" else CUDA_GEMM
        self.flops = 2 * size**3
        self.a = torch.randn(size, size, device=device).to(dtype)
        self.b, self.out = torch.randn_like(self.a), torch.empty_like(self.a)

    def __call__(self) -> None:
        torch.mm(self.a, self.b, out=self.out)


def seconds(
    variants: dict[str, Callable[[], object]], repeats: int, setting: Setting
) -> dict[str, list[float]]:
    """Wall-clock seconds of a call of each variant, in turns, with the device's work done."""

    def timed(variant: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(setting.calls):
                variant()
            if setting.device == "cuda":
                torch.cuda.synchronize()

        return run

    taken = interleave({n: timed(v) for n, v in variants.items()}, repeats, warmups=2)
    return {name: [s / setting.calls for s in values] for name, values in taken.items()}


def once(variant: Callable[[], object]) -> float:
    """Seconds of the first call."""
    start_s = time.perf_counter()
    variant()
    return time.perf_counter() - start_s


def measure(shape: Shape, setting: Setting) -> dict[str, Any]:
    """Shares of the peak and ratios to the others, for one shape."""
    setting.take_effect()
    repeats, dtype, device = setting.repeats, setting.torch_dtype, setting.device
    ours, peak = Ours(shape, dtype, device), Peak(dtype, device)
    own = {"forward": ours.forward, "step": ours.step}
    is_cpu = device == "cpu"
    peak_calls = PEAK_CALLS if is_cpu else 1  # a GPU's product is large, and called often
    products = {"peak": lambda: [peak() for _ in range(peak_calls)]}
    fast: dict[str, Callable[[], object]] = {**products, **own}
    slow: dict[str, Callable[[], object]] = {}
    if not is_cpu:
        unfold = Unfold(shape, ours.layer.weight, ours.x)
        for name, other in {"unfold": unfold, "views": Views(shape, unfold)}.items():
            fast |= {name: other.step, f"{name} forward": other.forward}
            if dtype == torch.float32:
                check(shape, ours, {name: other.forward().flatten(2)})
    elif dtype == torch.float32:
        unfold = Unfold(shape, ours.layer.weight, ours.x)
        others: dict[str, Any] = {"unfold": unfold, "views": Views(shape, unfold)}
        results = {name: other.forward().flatten(2) for name, other in others.items()}
        for name, other in others.items():
            fast |= {name: other.step, f"{name} forward": other.forward}
        if jax is not None and shape.num_weights <= JAX_MOST_WEIGHTS:
            of_jax = Jax(shape, unfold)
            slow |= {"jax": of_jax.step, "jax forward": of_jax.forward}
            results["jax"] = torch.from_dlpack(of_jax.forward()).flatten(2)
        if shape.num_weights <= SPARSE_MOST_VALUES:
            for name, product in sparse_forwards(shape, ours).items():
                slow[f"{name} forward"] = product
                results[name] = product().view(shape.rows**2, shape.filters, -1).permute(2, 1, 0)
        check(shape, ours, results)
    taken = seconds(fast, repeats, setting)
    long = {name: [s] * SLOW_REPEATS for name, f in slow.items() if (s := once(f)) > LONG_S}
    of_slow = {}
    if slow:
        shorter = {name: f for name, f in slow.items() if name not in long}
        of_slow = seconds(own | shorter, SLOW_REPEATS, setting) | long
    peak_rate = [peak_calls * peak.flops / s for s in taken["peak"]]

    def share(name: str, passes: int) -> Estimate:
        return ratio([passes * shape.flops / s for s in taken[name]], peak_rate)

    row: dict[str, Any] = {
        "peak_gflops": estimate(peak_rate).median / 1e9,
        "forward_share_of_peak": share("forward", 1),
        "step_share_of_peak": share("step", 3),
    }
    row["run_once"] = sorted(long)
    for times, names in ((taken, fast), (of_slow, slow)):
        for name in names.keys() - own.keys() - {"peak"}:
            pass_ = "forward" if name.endswith(" forward") else "step"
            key = f"{name.split()[0]}_{pass_}"
            row[f"vs_{key}"] = ratio(times[name], times[pass_])
    return {k: asdict(v) if isinstance(v, Estimate) else v for k, v in row.items()}


def curve_point(shape: Shape, setting: Setting) -> float:
    """The forward pass's share of the peak."""
    setting.take_effect()
    repeats, dtype, device = max(3, setting.repeats // 3), setting.torch_dtype, setting.device
    ours, peak = Ours(shape, dtype, device), Peak(dtype, device)
    taken = seconds({"peak": peak, "ours": ours.forward}, repeats, setting)
    rates = [shape.flops / s for s in taken["ours"]], [peak.flops / s for s in taken["peak"]]
    return ratio(*rates).median


def working_memory_bytes(name: str, shape: Shape, setting: Setting) -> int:
    """Peak of a step beyond what every variant has."""
    if setting.device == "cuda":
        return _working_memory_on_gpu(name, shape, setting)
    ours = Ours(shape)
    variant = ours if name == "ours" else Unfold(shape, ours.layer.weight, ours.x)
    if name != "ours":
        del ours
    variant.grad.sum()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    variant.step()
    peak = _status_bytes("VmHWM") - before
    x, weight = variant.x, variant.layer.weight if name == "ours" else variant.weight
    return peak - x.nbytes - weight.nbytes - variant.grad.nbytes


def _working_memory_on_gpu(name: str, shape: Shape, setting: Setting) -> int:
    """By torch's allocator, after a step in which libraries have taken what they keep."""
    ours = Ours(shape, setting.torch_dtype, setting.device)
    variant = ours if name == "ours" else Unfold(shape, ours.layer.weight, ours.x)
    weight = ours.layer.weight if name == "ours" else variant.weight
    if name != "ours":
        del ours
    variant.step()
    variant.x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    variant.step()
    gradients = variant.x.nbytes + weight.nbytes
    return torch.cuda.max_memory_allocated() - before - gradients


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
