"""Which large-batch method keeps the accuracy on `fashion`, each with its fair share of tuning.

    python benchmarks/large_batch/study.py [--part search ...] [--minutes M] [--report] [--quick]

Every point is one training on one thread, two at a time, and one JSON file in
benchmarks/results/large_batch/; what is there is not done again, so the study may be stopped at any
time and goes on where it was. All of it takes some 8 hours on 2 cores; the part `text` needs a
folder of texts (--texts). --report writes docs/tables/large_batch.md and
docs/guides/large_batch.png from what there is.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `common`

from common import RESULTS, circumstances
from points import PARTS, Plan, Point, read_results

from allstep.files import write_whole

FOLDER = RESULTS / "large_batch"
NUM_PARALLEL = 2
_POLL_S = 0.2


def open_points(plan: Plan, parts: Sequence[str], folder: Path) -> Iterator[Point]:
    """What is still to do, in order; a part begins when what it needs is there."""
    for part in parts:
        handed_out: set[str] = set()
        try:
            for point in PARTS[part](plan, read_results(folder)):
                if point["id"] not in handed_out and not path_of(folder, point).exists():
                    handed_out.add(point["id"])
                    yield point
        except LookupError as error:
            print(f"part {part} has to wait: {error}", flush=True)


def path_of(folder: Path, point: Point) -> Path:
    path: Path = folder / f"{point['id']}.json"
    return path


def run_all(points: Iterator[Point], folder: Path, deadline_s: float) -> None:
    """Runs points two at a time until there is none, or the time is over."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    is_over = False
    try:
        while True:
            while not is_over and len(running) < NUM_PARALLEL:
                point = next(points, None) if time.monotonic() < deadline_s else None
                is_over = point is None
                if point is not None:
                    running[point["id"]] = start(point, folder)
            for name in [name for name, child in running.items() if child.poll() is not None]:
                if running.pop(name).returncode:
                    print(f"{name} failed", flush=True)
            if is_over and not running:
                return
            time.sleep(_POLL_S)
    finally:
        for child in running.values():
            child.kill()


def start(point: Point, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--point", json.dumps(point), "--folder", str(folder)]
    return subprocess.Popen(command)


def run_point(point: Point, folder: Path) -> None:
    """Trains one point and writes its file, whole or not at all."""
    from training import train

    result = point | train(point) | {"date": circumstances()["date"]}
    if "texts" in point:
        result["texts"] = Path(point["texts"]).name
    path = path_of(folder, point)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    shown = "diverged" if result["accuracy"] is None else f"{result['accuracy']:.2%}"
    print(f"{point['id']}: {shown}, {result['seconds']:.0f} s", flush=True)


def stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true", help="a minute, in a folder of its own")
    parser.add_argument("--report", action="store_true", help="only write table and plot")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the points are kept")
    parser.add_argument("--texts", help="folder of texts, for the part `text`")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point is not None:
        return run_point(arguments.point, arguments.folder)
    signal.signal(signal.SIGTERM, stop)
    plan = Plan.quick() if arguments.quick else Plan(texts=arguments.texts)
    folder = Path(tempfile.mkdtemp()) if arguments.quick else arguments.folder
    deadline_s = time.monotonic() + 60 * arguments.minutes
    if not arguments.report:
        run_all(open_points(plan, arguments.part, folder), folder, deadline_s)
    from report import write_report

    docs = folder if arguments.quick else None
    write_report(plan, read_results(folder), docs)
    return None


if __name__ == "__main__":
    main()
