"""A locally connected layer against unfold + einsum, sparse matrices, JAX, and the GEMM peak.

    python benchmarks/bench_local.py [--quick] [--device cuda] [--dtype bfloat16] [--shapes 2 3]

The layer is `allstep.nn.LocallyConnected2d` on one worker, without bias, on batch-last memory, as
it comes from the layer before. A step is forward and both gradients. The peak is that of square
matrix products, measured in turns with the rest.

"unfold" is `torch.nn.functional.unfold` and einsum with the weight in the order that is fastest
for it, [position, filter, fan_in]; "views" is `Tensor.unfold` twice and einsum. JAX's
`conv_general_dilated_local` is compiled beforehand and takes part if `jax` is installed; where its
step takes more than 20 s it runs once, and that once counts, and the largest shape is left out,
for which it takes more than 24 GB. The sparse formats have the forward pass alone.

glibc gives blocks beyond 32 MB back to the system at every release, so that each step would pay
for new pages; here all variants keep their heap, as allocators that are made for training do.
Working memory is what a step needs at its peak beyond input, weight, output and their gradients,
which every variant has; each is measured in a process of its own.

On a GPU times are of the wall clock between synchronisations, of ten calls without one, memory is
that of torch's allocator, and JAX and the sparse formats are left out.

Prints tables, adds each shape to benchmarks/results/bench_local.json (with `--quick`:
..._quick.json) as it ends, and ends with one line of JSON, the worst over the shapes:
`forward_share_of_peak` (aim: 0.75) and `step_share_of_peak` (0.65), `speedup_vs_unfold`,
`speedup_vs_views` and `speedup_vs_jax` (2.5, of the step), `speedup_vs_csr` and `speedup_vs_bsr`
(2.5, of the forward pass), and `memory_vs_unfold` (under 0.5, of the working memory).
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch
from common import RESULTS, print_headline, write_results
from local_variants import Shape, jax
from local_worker import Setting, curve_point, measure, working_memory_bytes
from rich.console import Console
from rich.table import Table

T = TypeVar("T")

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


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns in a new process; in this one on a GPU, whose memory is torch's."""
    if any(isinstance(x, Setting) and x.device == "cuda" for x in arguments):
        result = function(*arguments)
        torch.cuda.empty_cache()
        return result
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def row_of(shape: Shape, setting: Setting) -> dict[str, Any]:
    """All that is measured of a shape."""
    row = in_own_process(measure, shape, setting)
    if setting.device == "cuda" or setting.dtype == "float32":
        names = ("ours", "unfold")
        found = {n: in_own_process(working_memory_bytes, n, shape, setting) for n in names}
        row["memory_vs_unfold"] = found["ours"] / found["unfold"]
        row["working_memory_bytes"] = found
    return row


def headline(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The worst over the shapes."""
    keys = {key: key for key in ("forward_share_of_peak", "step_share_of_peak")}
    keys |= {f"speedup_vs_{name}": f"vs_{name}_step" for name in ("unfold", "views", "jax")}
    keys |= {f"speedup_vs_{name}": f"vs_{name}_forward" for name in ("csr", "bsr")}
    found = {
        key: min(row[name]["median"] for row in rows.values() if name in row)
        for key, name in keys.items()
        if any(name in row for row in rows.values())
    }
    memory = [row["memory_vs_unfold"] for row in rows.values() if "memory_vs_unfold" in row]
    return {**found, "memory_vs_unfold": max(memory)} if memory else found


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Prints a column for each shape."""
    keys = sorted({key for row in rows.values() for key in row} - {"working_memory_bytes"})
    version = "not installed" if jax is None else jax.__version__
    table = Table("ratio", *rows, title=f"One worker; JAX {version}")
    for key in keys:
        table.add_row(key, *(_cell(row.get(key, "")) for row in rows.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "{median:.4g} [{low:.4g}, {high:.4g}]".format(**value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show_curve(curve: dict[str, float], points: tuple[Shape, ...]) -> None:
    """Prints the slides' point."""
    table = Table("shape", "neurons a block", "share of peak", title="Forward, by block and maps")
    for shape in points:
        table.add_row(str(shape), str(shape.filters), f"{curve[str(shape)]:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="of torch, such as bfloat16")
    parser.add_argument("--tf32", action="store_true", help="let CUDA use it for float32")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of those to measure")
    arguments = parser.parse_args()
    setting = Setting(
        repeats=3 if arguments.quick else 15,
        device=arguments.device,
        dtype=arguments.dtype,
        tf32=arguments.tf32,
        threads=arguments.threads,
    )
    name = "bench_local" if setting.device == "cpu" else f"bench_local_cuda_{setting.dtype}"
    name += "_quick" if arguments.quick else ""
    numbers = arguments.shapes
    if numbers is None:
        numbers = range(2 if arguments.quick else len(SHAPES))
    file = RESULTS / f"{name}.json"
    adds = arguments.shapes is not None and file.exists()
    rows = json.loads(file.read_text())["shapes"] if adds else {}
    curve: dict[str, float] = {}

    def write() -> None:
        version = None if jax is None else jax.__version__
        found = {"headline": headline(rows), "jax": version, "shapes": rows, "curve": curve}
        write_results(name, found)

    for number in numbers:
        rows[str(SHAPES[number])] = row_of(SHAPES[number], setting)
        print(f"{SHAPES[number]}: done", flush=True)
        write()
    show(rows)
    points = CURVE[::3] if arguments.quick else CURVE
    curve |= {str(shape): in_own_process(curve_point, shape, setting) for shape in points}
    show_curve(curve, points)
    write()
    print_headline(**headline(rows))


if __name__ == "__main__":
    main()
