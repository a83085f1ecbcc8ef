"""A locally connected layer against unfold + einsum, sparse matrices, JAX, and the GEMM peak.

    python benchmarks/bench_local.py [--quick] [--device cuda] [--dtype bfloat16]

The layer is `allstep.nn.LocallyConnected2d` on one worker, without bias, on batch-last memory, as
it comes from the layer before. A step is forward and both gradients. The peak is that of square
matrix products, measured in turns with the rest.

"unfold" is `torch.nn.functional.unfold` and einsum with the weight in the order that is fastest
for it, [position, filter, fan_in]; "views" is `Tensor.unfold` twice and einsum. JAX's
`conv_general_dilated_local` is compiled beforehand and takes part if `jax` is installed; where its
step takes more than 20 s it runs once, and that once counts. The sparse formats have the forward
pass alone.

glibc gives blocks beyond 32 MB back to the system at every release, so that each step would pay
for new pages; here all variants keep their heap, as allocators that are made for training do.
Working memory is what a step needs at its peak beyond input, weight, output and their gradients,
which every variant has; each is measured in a process of its own.

Prints tables, writes benchmarks/results/bench_local.json and ends with one line of JSON, the worst
over the shapes: `forward_share_of_peak` (aim: 0.75) and `step_share_of_peak` (0.65),
`speedup_vs_unfold`, `speedup_vs_views` and `speedup_vs_jax` (2.5, of the step), `speedup_vs_csr`
and `speedup_vs_bsr` (2.5, of the forward pass), and `memory_vs_unfold` (under 0.5, of the working
memory).
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from common import Estimate, estimate, interleave, keep_heap, print_headline, ratio, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

import allstep
from allstep.nn import Grid, LocallyConnected2d

try:
    import jax
except ImportError:
    jax = None

BATCH = 96
CPU_GEMM, CUDA_GEMM = 1024, 8192
SPARSE_MOST_VALUES = 100_000_000  # an index takes eight bytes for each
SLOW_REPEATS = 3  # of what takes many times as long
LONG_S = 20.0  # what takes longer runs once


@dataclass(frozen=True)
class Shape:
    """A layer: a square array of `size`, blocks of (depth, height, width)."""

    size: int
    channels: int
    kernel: int
    step: int
    block: tuple[int, int, int]
    batch: int = BATCH

    @property
    def rows(self) -> int:
        return (self.size - self.kernel) // self.step + 1

    @property
    def filters(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def fan_in(self) -> int:
        return self.kernel**2 * self.channels

    @property
    def num_weights(self) -> int:
        return self.rows**2 * self.filters * self.fan_in

    @property
    def flops(self) -> int:
        return 2 * self.num_weights * self.batch

    def __str__(self) -> str:
        block = "x".join(map(str, self.block))
        return f"{self.size}x{self.size}x{self.channels} k={self.kernel} s={self.step} {block}"


SHAPES = (
    Shape(48, 8, 10, 2, (192, 1, 1)),
    Shape(100, 8, 10, 4, (48, 2, 2)),
    Shape(200, 3, 18, 6, (144, 1, 1)),
    Shape(200, 3, 18, 4, (8, 4, 4)),
)
# The slides' point: a bigger block, and a bigger step for as many neurons, makes dense products.
CURVE = tuple(
    Shape(48, 8, 10, 2 * side, (maps, side, side)) for side in (1, 2, 4) for maps in (1, 8, 48, 192)
)


def batch_last(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """[batch, channel, height, width] in the layer's own memory format."""
    batch, channels, height, width = shape
    x = torch.randn(height, width, channels, batch, device=device).to(dtype)
    return x.permute(3, 2, 0, 1)


class Ours:
    """The layer, its input and the gradient of its output."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        grid = Grid(allstep.Communicator.lone(device))
        layout = grid.split((shape.size, shape.size))
        self.layer = LocallyConnected2d(
            grid,
            layout,
            shape.channels,
            shape.kernel,
            shape.step,
            shape.block,
            bias=False,
            dtype=dtype,
            seed=0,
        )
        size = (shape.batch, shape.channels, shape.size, shape.size)
        self.x = batch_last(*size, dtype=dtype, device=device).requires_grad_()
        out = self.layer.out_layout.shape
        self.grad = batch_last(shape.batch, shape.block[0], *out, dtype=dtype, device=device)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.layer(self.x)

    def step(self) -> None:
        self.x.grad = self.layer.weight.grad = None
        self.layer(self.x).backward(self.grad)


class Unfold:
    """One product with every receptive field of the array at once."""

    def __init__(self, shape: Shape, weight: Tensor, x: Tensor):
        self.shape = shape
        filters = weight.detach().unflatten(3, (shape.kernel**2, -1)).transpose(3, 4)
        self.weight = filters.reshape(shape.rows**2, shape.filters, -1).requires_grad_()
        self.x = x.detach().contiguous().requires_grad_()
        self.grad = torch.randn(shape.batch, shape.filters, shape.rows**2)

    def _response(self) -> Tensor:
        fields = torch.nn.functional.unfold(self.x, self.shape.kernel, stride=self.shape.step)
        return torch.einsum("bkl,lfk->bfl", fields, self.weight)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._response()

    def step(self) -> None:
        self.x.grad = self.weight.grad = None
        self._response().backward(self.grad)


class Views(Unfold):
    """The same by strided views of the input."""

    def __init__(self, shape: Shape, unfold: Unfold):
        self.shape = shape
        self.x = unfold.x.detach().requires_grad_()
        side, kernel = (shape.rows, shape.rows), (shape.kernel, shape.kernel)
        weight = unfold.weight.detach().view(*side, shape.filters, shape.channels, *kernel)
        self.weight = weight.permute(2, 0, 1, 3, 4, 5).contiguous().requires_grad_()
        self.grad = unfold.grad.unflatten(2, side)

    def _response(self) -> Tensor:
        kernel, step = self.shape.kernel, self.shape.step
        fields = self.x.unfold(2, kernel, step).unfold(3, kernel, step)
        return torch.einsum("bcijuv,fijcuv->bfij", fields, self.weight)


class Jax:
    """JAX's own locally connected convolution."""

    def __init__(self, shape: Shape, unfold: Unfold):
        self.x = jax.numpy.asarray(unfold.x.detach().numpy())
        weight = unfold.weight.detach().view(shape.rows, shape.rows, shape.filters, -1)
        self.weight = jax.numpy.asarray(weight.permute(2, 3, 0, 1).numpy())
        self.grad = jax.numpy.asarray(unfold.grad.unflatten(2, (shape.rows, -1)).numpy())

        def response(x: Any, weight: Any) -> Any:
            return jax.lax.conv_general_dilated_local(
                x,
                weight,
                (shape.step, shape.step),
                "VALID",
                (shape.kernel, shape.kernel),
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )

        def step(x: Any, weight: Any, grad: Any) -> Any:
            y, backward = jax.vjp(response, x, weight)
            return y, backward(grad)

        self._response, self._step = jax.jit(response), jax.jit(step)

    def forward(self) -> Any:
        return jax.block_until_ready(self._response(self.x, self.weight))

    def step(self) -> None:
        jax.block_until_ready(self._step(self.x, self.weight, self.grad))


def sparse_forwards(shape: Shape, ours: Ours) -> dict[str, Callable[[], Tensor]]:
    """The same layer as a matrix of all outputs by all inputs, in torch's sparse formats."""
    x = ours.x.detach().permute(2, 3, 1, 0).reshape(-1, shape.batch)
    first = torch.arange(shape.rows) * shape.step
    place = first[:, None] * shape.size + first  # of each block's first input pixel
    offsets = torch.arange(shape.kernel)[:, None] * shape.size + torch.arange(shape.kernel)
    pixels = place.reshape(-1, 1) + offsets.reshape(1, -1)
    columns = (pixels[:, :, None] * shape.channels + torch.arange(shape.channels)).flatten(1)
    weight = ours.layer.weight.detach().reshape(shape.rows**2, shape.filters, shape.fan_in)
    num_rows = shape.rows**2 * shape.filters
    csr = torch.sparse_csr_tensor(
        torch.arange(num_rows + 1) * shape.fan_in,
        columns[:, None].expand(weight.shape).flatten(),
        weight.flatten(),
        (num_rows, x.shape[0]),
        check_invariants=True,
    )
    side = gcd(shape.filters, shape.step * shape.channels, shape.kernel * shape.channels)
    tiles = weight.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    per_row = shape.fan_in // side
    bsr = torch.sparse_bsr_tensor(
        torch.arange(num_rows // side + 1) * per_row,
        (columns[:, ::side] // side)[:, None].expand(-1, shape.filters // side, -1).flatten(),
        tiles.reshape(-1, side, side),
        (num_rows, x.shape[0]),
        check_invariants=True,
    )
    return {"csr": lambda: csr @ x, "bsr": lambda: bsr @ x}


def check(shape: Shape, ours: Ours, others: dict[str, Tensor]) -> None:
    """All variants compute the same."""
    y = ours.forward().detach()
    _, height, width = shape.block
    blocks = y.unflatten(2, (-1, height)).unflatten(4, (-1, width))  # [b, d, i, r, j, s]
    y = blocks.permute(0, 3, 5, 1, 2, 4).reshape(shape.batch, shape.filters, -1)
    for name, other in others.items():
        torch.testing.assert_close(
            other, y, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


class Peak:
    """Square matrix products, as `allstep.doctor` measures them."""

    def __init__(self, dtype: torch.dtype, device: str):
        size = CPU_GEMM if device == "cpu" else CUDA_GEMM
        self.flops = 2 * size**3
        self.a = torch.ones(size, size, dtype=dtype, device=device)
        self.b, self.out = torch.ones_like(self.a), torch.empty_like(self.a)

    def __call__(self) -> None:
        torch.mm(self.a, self.b, out=self.out)


def seconds(
    variants: dict[str, Callable[[], object]], repeats: int, device: str
) -> dict[str, list[float]]:
    """Each variant's seconds, in turns, with the device's work done."""

    def timed(variant: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            variant()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    return interleave({n: timed(v) for n, v in variants.items()}, repeats, warmups=2)


def once(variant: Callable[[], object]) -> float:
    """Seconds of the first call."""
    start_s = time.perf_counter()
    variant()
    return time.perf_counter() - start_s


def measure(shape: Shape, repeats: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Shares of the peak and ratios to the others, for one shape."""
    ours, peak = Ours(shape, dtype, device), Peak(dtype, device)
    own = {"forward": ours.forward, "step": ours.step}
    fast: dict[str, Callable[[], object]] = {"peak": lambda: [peak() for _ in range(10)], **own}
    slow: dict[str, Callable[[], object]] = {}
    if device == "cpu" and dtype == torch.float32:
        unfold = Unfold(shape, ours.layer.weight, ours.x)
        others: dict[str, Any] = {"unfold": unfold, "views": Views(shape, unfold)}
        results = {name: other.forward().flatten(2) for name, other in others.items()}
        for name, other in others.items():
            fast |= {name: other.step, f"{name} forward": other.forward}
        if jax is not None:
            of_jax = Jax(shape, unfold)
            slow |= {"jax": of_jax.step, "jax forward": of_jax.forward}
            results["jax"] = torch.from_dlpack(of_jax.forward()).flatten(2)
        if shape.num_weights <= SPARSE_MOST_VALUES:
            for name, product in sparse_forwards(shape, ours).items():
                slow[f"{name} forward"] = product
                results[name] = product().view(shape.rows**2, shape.filters, -1).permute(2, 1, 0)
        check(shape, ours, results)
    taken = seconds(fast, repeats, device)
    long = {name: [s] * SLOW_REPEATS for name, f in slow.items() if (s := once(f)) > LONG_S}
    of_slow = seconds(own | {n: f for n, f in slow.items() if n not in long}, SLOW_REPEATS, device)
    of_slow |= long
    peak_rate = [10 * peak.flops / s for s in taken["peak"]]

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
    return row


def curve_point(shape: Shape, repeats: int, dtype: torch.dtype, device: str) -> float:
    """The forward pass's share of the peak."""
    ours, peak = Ours(shape, dtype, device), Peak(dtype, device)
    taken = seconds({"peak": peak, "ours": ours.forward}, repeats, device)
    rates = [shape.flops / s for s in taken["ours"]], [peak.flops / s for s in taken["peak"]]
    return ratio(*rates).median


def working_memory_bytes(name: str, shape: Shape) -> int:
    """Peak of a step beyond what every variant has; call it in a process of its own."""
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


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def memory(shape: Shape) -> dict[str, int]:
    """Working memory of both, each in a fresh process."""
    found = {}
    for name in ("ours", "unfold"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found[name] = pool.submit(working_memory_bytes, name, shape).result()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="of torch, such as bfloat16")
    parser.add_argument("--tf32", action="store_true", help="let CUDA use it for float32")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    arguments = parser.parse_args()
    keep_heap()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    repeats = 3 if arguments.quick else 15
    shapes = SHAPES[:2] if arguments.quick else SHAPES

    rows, started_s = {}, time.perf_counter()
    for shape in shapes:
        row = measure(shape, repeats, dtype, device)
        if device == "cpu" and dtype == torch.float32:
            found = memory(shape)
            row["memory_vs_unfold"] = found["ours"] / found["unfold"]
            row["working_memory_bytes"] = found
        rows[str(shape)] = row
        print(f"{shape}: done after {time.perf_counter() - started_s:.0f} s", flush=True)
    show(rows, jax.__version__ if jax is not None else "not installed")
    points = CURVE[::3] if arguments.quick else CURVE
    curve = {str(s): curve_point(s, max(3, repeats // 3), dtype, device) for s in points}
    table = Table("shape", "neurons a block", "share of peak", title="Forward, by block and maps")
    for shape in points:
        table.add_row(str(shape), str(shape.filters), f"{curve[str(shape)]:.2f}")
    Console().print(table)

    def worst(key: str) -> float | None:
        return min((row[key].median for row in rows.values() if key in row), default=None)

    keys = {key: key for key in ("forward_share_of_peak", "step_share_of_peak")}
    keys |= {f"speedup_vs_{name}": f"vs_{name}_step" for name in ("unfold", "views", "jax")}
    keys |= {f"speedup_vs_{name}": f"vs_{name}_forward" for name in ("csr", "bsr")}
    headline = {key: value for key, name in keys.items() if (value := worst(name)) is not None}
    if device == "cpu" and dtype == torch.float32:
        headline["memory_vs_unfold"] = max(row["memory_vs_unfold"] for row in rows.values())
    path = write_results(
        "bench_local" if device == "cpu" else f"bench_local_{device}_{arguments.dtype}",
        {
            "jax": jax.__version__ if jax is not None else None,
            "shapes": {name: plain(row) for name, row in rows.items()},
            "curve": curve,
            "headline": headline,
        },
    )
    print(f"written to {path.name}")
    print_headline(**headline)


def show(rows: dict[str, dict[str, Any]], jax_version: str) -> None:
    """Prints a column for each shape."""
    keys = sorted({key for row in rows.values() for key in row} - {"working_memory_bytes"})
    table = Table("ratio", *rows, title=f"One worker; JAX {jax_version}")
    for key in keys:
        values = [row.get(key, "") for row in rows.values()]
        table.add_row(key, *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values))
    Console().print(table)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: asdict(v) if isinstance(v, Estimate) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
