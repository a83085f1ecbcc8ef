"""What allstep costs a step of a model that torch divides over workers.

    python benchmarks/bench_mesh.py [--quick]

The transformer of the recipe `text`, divided over the axis `tensor` of a mesh by the same plan:
with `allstep.nn.tensor_parallel`, `attach` and `steps`, against `parallelize_module` and a plain
loop with DTensors as parameters. Both have two micro-batches of 16 sequences a step and AdamW; the
plain loop takes the mean over the axis `data` in one flat message. Under "fsdp" the transformer is
sharded by `fully_shard` for both, each block for itself; under "tensor + fsdp" what is divided is
sharded along `data`. The loops take turns step by step, on processes of one thread. "gradients" is
a step without the optimizer. "speedup" is over a whole model on each worker for the same samples,
so that all along `tensor` compute the same. Keys:
`overhead_pct` of a step and `gradients_pct` of one without the optimizer, the largest of the rows.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_overhead import CLOCKS
from common import estimate, print_headline, ratio, write_results
from network import run_on_one_host
from rich.console import Console
from rich.table import Table

# Engine, width; workers along data, and along tensor.
ROWS = (("tensor", 128, 1, 2), ("tensor", 256, 1, 2), ("tensor", 128, 2, 2))
ROWS += (("fsdp", 128, 2, 1), ("fsdp", 256, 2, 1), ("tensor + fsdp", 128, 2, 2))
QUICK_ROWS = ROWS[:1] + ROWS[3:4]


def measure(
    engine: str, width: int, num_data: int, num_tensor: int, repeats: int, clock: str
) -> Any:
    """Variant -> seconds of a step on rank 0."""
    worker = Path(__file__).with_name("mesh_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.measured"
        command = [sys.executable, worker, file, engine, width, num_data, repeats, clock]
        run_on_one_host(num_data * num_tensor, command, timeout_s=1800)
        return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rows, about a minute")
    parser.add_argument("--repeats", type=int, help="default: 60, quick 20")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine")
    known = parser.parse_args()
    repeats = known.repeats or (20 if known.quick else 60)
    columns = ("engine", "width", "data x tensor", "of", "bare, ms", "overhead, %", "speedup")
    table = Table(*columns, title="Divided steps")
    rows: list[dict[str, Any]] = []
    for engine, width, num_data, num_tensor in QUICK_ROWS if known.quick else ROWS:
        seconds = measure(engine, width, num_data, num_tensor, repeats, known.clock)
        for part in ("step", "gradients"):
            bare_s = estimate(seconds[f"bare {part}"])
            cost_pct = ratio(seconds[f"allstep {part}"], seconds[f"bare {part}"]).excess()
            speedup = ratio(seconds["whole step"], seconds["allstep step"])
            layout = f"{num_data}x{num_tensor}"
            words = f"{cost_pct.median:.1f} [{cost_pct.low:.1f}, {cost_pct.high:.1f}]"
            gain = str(speedup) if part == "step" else ""
            bare_ms = f"{1e3 * bare_s.median:.1f}"
            table.add_row(engine, str(width), layout, part, bare_ms, words, gain)
            named = {"engine": engine, "width": width, "layout": layout, "part": part}
            found = {
                "bare_s": bare_s.median,
                "overhead_pct": cost_pct.median,
                "interval_pct": [cost_pct.low, cost_pct.high],
                "speedup": speedup.median,
            }
            rows.append(named | found)
    Console().print(table)
    keys = {
        key: max(row["overhead_pct"] for row in rows if row["part"] == part)
        for key, part in (("gradients_pct", "gradients"), ("overhead_pct", "step"))
    }
    name = "bench_mesh_quick" if known.quick else "bench_mesh"
    write_results(name, {"clock": known.clock, "repeats": repeats, "rows": rows, **keys})
    print_headline(**keys)


if __name__ == "__main__":
    main()
