"""How much of a step the workers of a pipeline wait, beside the formula.

    python benchmarks/bench_pipeline.py [--quick]

Each of p workers has stages that sleep 0.2 s forward and 0.4 s backward for a micro-batch, so that
their processes need no cores of their own, and m micro-batches make a global batch. The bubble is
the share of a step, from when all begin to when all are done, in which the workers' stages are not
at work; the formula is (p - 1) / (m + p - 1) for GPipe and 1F1B, and (p - 1) / (v m + p - 1) where
each worker takes turns between v = 2 stages ("interleaved"). One micro-batch is what stages that
run one after the other have. Key: `bubble_vs_formula`, the measured share over the formula's, of
the row of GPipe or 1F1B where that is farthest from 1.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import estimate, print_headline, write_results
from network import run_on_one_host
from pipeline_worker import STAGES_EACH
from rich.console import Console
from rich.table import Table

ROWS = (  # schedule, workers, micro-batches
    ("gpipe", 2, 1),
    ("gpipe", 2, 4),
    ("1f1b", 2, 4),
    ("interleaved", 2, 4),
    ("gpipe", 4, 1),
    ("gpipe", 4, 4),
    ("1f1b", 4, 4),
    ("interleaved", 4, 4),
    ("gpipe", 4, 8),
    ("1f1b", 4, 8),
    ("interleaved", 4, 8),
)
QUICK_ROWS = ROWS[1:3]


def measure(schedule: str, size: int, num: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of steps of so many micro-batches, and those of them in which a worker is at work."""
    worker = Path(__file__).with_name("pipeline_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.measured"
        command = [sys.executable, worker, file, schedule, num, repeats]
        run_on_one_host(size, command, timeout_s=600)
        found: list[tuple[float, float]] = json.loads(file.read_text())
        return found


def bubble(schedule: str, size: int, num_micro_batches: int) -> float:
    """The formula's share.

    >>> bubble("1f1b", 4, 8)
    0.2727272727272727
    """
    turns = STAGES_EACH if schedule == "interleaved" else 1
    return (size - 1) / (turns * num_micro_batches + size - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rows, about a minute")
    parser.add_argument("--repeats", type=int, help="default: 7, quick 5")
    known = parser.parse_args()
    repeats = known.repeats or (5 if known.quick else 7)
    columns = ("schedule", "p", "m", "step, s", "bubble", "formula", "ratio")
    table = Table(*columns, title="Pipelines")
    rows: list[dict[str, Any]] = []
    for schedule, size, num in QUICK_ROWS if known.quick else ROWS:
        found = measure(schedule, size, num, repeats)
        step_s = estimate([step_s for step_s, _ in found])
        share = estimate([1 - busy_s / step_s for step_s, busy_s in found])
        formula = bubble(schedule, size, num)
        ratio = share.median / formula
        words = f"{share.median:.3f} [{share.low:.3f}, {share.high:.3f}]"
        cells = (f"{step_s.median:.2f}", words, f"{formula:.3f}", f"{ratio:.2f}")
        table.add_row(schedule, str(size), str(num), *cells)
        rows.append(
            {
                "schedule": schedule,
                "workers": size,
                "micro_batches": num,
                "step_s": step_s.median,
                "bubble": share.median,
                "interval": [share.low, share.high],
                "formula": formula,
                "ratio": ratio,
            }
        )
    Console().print(table)
    ratios = [row["ratio"] for row in rows if row["schedule"] != "interleaved"]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    name = "bench_pipeline_quick" if known.quick else "bench_pipeline"
    write_results(name, {"repeats": repeats, "rows": rows, "bubble_vs_formula": worst})
    print_headline(bubble_vs_formula=worst)


if __name__ == "__main__":
    main()
