"""Two versions of allstep, benchmark by benchmark, in turns on one machine.

    python benchmarks/compare.py OLD NEW [--benches bench_exchange ...] [--repeats 3] [--full]

OLD and NEW are commits of this repository or folders that hold a checkout. Each version runs its
own benchmark script with `--quick` (or whole with `--full`), OLD and NEW in turns, so that a slow
hour of the machine meets both. A headline that is a ratio is compared as new / old, one that is a
percentage as new - old; "better" and "worse" are said only where the interval excludes no change.

Results: benchmarks/results/compare.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from common import Estimate, estimate, print_headline, ratio, write_results
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
BENCHES = (
    *("bench_exchange", "bench_allreduce", "bench_overhead"),
    *("bench_slow_network", "bench_optim", "bench_local"),
)
LOWER_IS_BETTER = {
    *("native_vs_ddp", "slowest_vs_best_peer", "lamb_vs_adamw", "lars_vs_sgd"),
    *("memory_vs_unfold", "agreement_pct", "overhead_pct", "noise_scale_pct"),
    *("hook_us", "hook_vs_ddp"),
}


def checkout(version: str, folder: Path) -> Path:
    """`folder` with a copy of that version, so that a checkout's own results stay as they are."""
    if Path(version).is_dir():
        for name in ("allstep", "benchmarks"):
            shutil.copytree(Path(version) / name, folder / name)
        return folder
    archive = subprocess.run(
        ["git", "archive", version], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def run(bench: str, root: Path, arguments: list[str]) -> dict[str, float]:
    """The headline of one run: the JSON object in the last line."""
    result = subprocess.run(
        [sys.executable, str(root / "benchmarks" / f"{bench}.py"), *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"{bench} of {root} failed:\n{result.stderr[-3000:]}")
    headline: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return headline


def compare(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, Estimate]:
    """Headline -> new / old, or new - old for percentages, pair by pair."""
    found = {}
    for key in [key for key in old[0] if key in new[0]]:
        before, after = [row[key] for row in old], [row[key] for row in new]
        if key.endswith("_pct"):
            found[key] = estimate([b - a for a, b in zip(before, after, strict=True)])
        else:
            found[key] = ratio(after, before)
    return found


def in_words(key: str, change: Estimate) -> str:
    """>>> in_words("speedup_vs_ddp", Estimate(1.1, 1.05, 1.2))
    'better'
    """
    unchanged = 0.0 if key.endswith("_pct") else 1.0
    if change.low <= unchanged <= change.high:
        return ""
    return "better" if (change.median < unchanged) == (key in LOWER_IS_BETTER) else "worse"


def show(bench: str, rows: dict[str, dict[str, Estimate]]) -> None:
    table = Table("headline", "old", "new", "change", "", title=bench)
    for key, row in rows.items():
        values = (str(row[name]) for name in ("old", "new", "change"))
        table.add_row(key, *values, in_words(key, row["change"]))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--benches", nargs="+", default=BENCHES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="without --quick")
    arguments = parser.parse_args()
    options = [] if arguments.full else ["--quick"]
    changes: dict[str, float] = {}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        roots = {
            name: checkout(getattr(arguments, name), Path(folder) / name) for name in ("old", "new")
        }
        for bench in arguments.benches:
            found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
            for repeat in range(arguments.repeats):
                for name in ("old", "new") if repeat % 2 else ("new", "old"):
                    found[name].append(run(bench, roots[name], options))
            rows = {
                key: {
                    "old": estimate([row[key] for row in found["old"]]),
                    "new": estimate([row[key] for row in found["new"]]),
                    "change": change,
                }
                for key, change in compare(found["old"], found["new"]).items()
            }
            show(bench, rows)
            changes |= {f"{bench}.{key}": row["change"].median for key, row in rows.items()}
            results[bench] = found
            write_results("compare", {"old": arguments.old, "new": arguments.new, "runs": results})
    print_headline(**changes)


if __name__ == "__main__":
    main()
