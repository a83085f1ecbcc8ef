"""Runs the tests many times in random order on a busy machine; counts the failures of each test.

    python scripts/test_many.py 10 [--processes 3] [--busy 2] [--first-seed 0] [PYTEST ARGS ...]

Run k shuffles the tests with seed `first-seed + k`. `--busy` processes turn round and round beside
them. A test that fails once is broken: the last lines name it with the seeds to see it again.
"""

import argparse
import collections
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree


def spin() -> None:
    """Keeps a core busy until the parent ends it."""
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def failures_in(report: Path) -> list[str]:
    """Names of the tests that failed, from a JUnit report."""
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def run_once(seed: int, processes: int, pytest_args: list[str], folder: Path) -> list[str] | None:
    """One run in the order of a seed; None if it left no report."""
    report = folder / f"{seed}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not long"]
    command += ["--shuffle-seed", str(seed)]
    command += ["--numprocesses", str(processes), "--dist", "worksteal", f"--junit-xml={report}"]
    result = subprocess.run([*command, *pytest_args], capture_output=True, text=True)
    (folder / f"{seed}.log").write_text(result.stdout + result.stderr)
    return failures_in(report) if report.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=int)
    parser.add_argument("--processes", type=int, default=(os.cpu_count() or 1) + 1)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments, pytest_args = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="test-many-"))
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(arguments.busy)]
    for process in spinning:
        process.start()
    seeds_of: dict[str, list[int]] = collections.defaultdict(list)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
        start_s = time.monotonic()
        failed = run_once(seed, arguments.processes, pytest_args, folder)
        minutes = (time.monotonic() - start_s) / 60
        for name in ["(no report: pytest itself ended)"] if failed is None else failed:
            seeds_of[name].append(seed)
        count = "no report" if failed is None else f"{len(failed)} failed"
        print(f"seed {seed}: {count} in {minutes:.1f} minutes", flush=True)
    for process in spinning:
        process.terminate()
    print(f"\n{arguments.runs} runs; logs in {folder}")
    for name, seeds in sorted(seeds_of.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds)} of {arguments.runs}  {name}  (seeds {', '.join(map(str, seeds))})")
    return 1 if seeds_of else 0


if __name__ == "__main__":
    sys.exit(main())
