"""What a machine with a GPU shows of allstep: its tests there and its benchmarks, in one report.

    python scripts/first_gpu_run.py [--parts tests bench_gpu ...] [--minutes 10] [--out gpu_report]

    environment   versions of Python, torch, CUDA, NCCL and the driver; the GPUs; what is missing
    tests         `pytest -m gpu`, on 8 processes where xdist is installed
    bench_gpu     benchmarks/bench_gpu.py --quick, all but its part "local"
    bench_local   benchmarks/bench_local.py --quick --device cuda, in float32 and bfloat16

Each part has a share of the minutes; one that fails or takes longer does not stop the others.
FOLDER/report.md and FOLDER/report.json say what ran, what failed and how, and hold the tables, the
latter all results as well; FOLDER/output.log is what was printed. They are written anew after each
part. It uses the Python that runs it and what is installed there, and installs nothing.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SHARES = {"environment": 0.05, "tests": 0.3, "bench_gpu": 0.45, "bench_local": 0.2}
LEAST_S = 40.0  # of the first part, which waits for a cold disk and the driver
TEST_PROCESSES = 8
FIRST_LINES = 12  # of a failure
MOST_OF_A_PART = 0.6  # of the time of a benchmark
GRACE_S = 5.0
MODULES = ("numpy", "msgpack", "safetensors", "rich", "tyro", "pytest", "xdist", "hypothesis")
MODULES += ("pytest_timeout", "psutil", "transformers", "tokenizers", "tensorboard")

ENVIRONMENT = """
import json, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__}
found["cuda"] = torch.version.cuda
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["cudnn"] = torch.backends.cudnn.version()
    (torch.ones(2, device="cuda") + 1).sum().item()
print(json.dumps(found))
"""


@dataclass
class Part:
    """What became of a part.

    Attributes:
        name: of the part.
        state: "passed", "failed" or "timed out".
        seconds: that it took.
        commands: that it ran.
        summary: in a line.
        failures: what failed -> its first lines.
        output: tables.
        numbers: what else is worth keeping.
        results: what benchmarks have written, by the files' names.
    """

    name: str
    state: str = "passed"
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    summary: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    output: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def fail(self, what: str, words: str, state: str = "failed") -> None:
        """Notes a failure."""
        self.state = state if self.state == "passed" else self.state
        self.failures[what] = "\n".join(words.strip().splitlines()[:FIRST_LINES])


@dataclass(frozen=True)
class Runner:
    """Runs commands for a part, all of them within its time.

    Attributes:
        part: whose.
        folder: for its output.
        deadline_s: of the monotonic clock.
    """

    part: Part
    folder: Path
    deadline_s: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.deadline_s - time.monotonic())

    def run(self, *words: object) -> tuple[int | None, str]:
        """The exit code, None for one that took too long, and what the command printed."""
        command = [str(word) for word in words]
        shown = " ".join([Path(command[0]).name, *command[1:]])
        self.part.commands.append(shown.replace(f"{ROOT}/", ""))
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that those that it has started end with it
            )
            code: int | None = None
            try:
                code = process.wait(self.left_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                end(process)
            output.seek(0)
            said = output.read()
        with (self.folder / "output.log").open("a") as log:
            log.write(f"$ {self.part.commands[-1]}\n{said}\n")
        return code, said


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a command and all that it has left running; gently first, so that it can report."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def environment() -> Mapping[str, str]:
    """A command's variables: it finds allstep here, installed or not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "150"}


# -- parts -----------------------------------------------------------------------------------------


def run_environment(part: Part, runner: Runner) -> None:
    """Versions, GPUs, and modules that are missing."""
    code, said = runner.run(sys.executable, "-c", ENVIRONMENT)
    part.commands.clear()
    if code is None:
        part.fail("torch", "it took longer than its time", "timed out")
    elif code:
        part.fail("torch", "\n".join(said.splitlines()[-FIRST_LINES:]))
    else:
        part.numbers |= json.loads(said.splitlines()[-1])
        if not part.numbers.get("gpus"):
            part.fail("GPU", "torch sees no GPU")
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,compute_mode"
        _, said = runner.run("nvidia-smi", query, "--format=csv,noheader")
        part.numbers["nvidia_smi"] = said.strip()
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    part.numbers["missing_modules"] = missing
    part.numbers["cpus"] = len(os.sched_getaffinity(0))
    words = [f"{name} {part.numbers.get(name)}" for name in ("torch", "cuda", "nccl")]
    part.summary = ", ".join([*words, *part.numbers.get("gpus", [])])
    if missing:
        part.summary += f"; not installed: {', '.join(missing)}"


def run_tests(part: Part, runner: Runner) -> None:
    """`pytest -m gpu`, of the files with such tests: others may import what is not installed."""
    files = [f for f in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in f.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        words: list[object] = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short"]
        words += ["--continue-on-collection-errors", f"--junit-xml={report}"]
        if importlib.util.find_spec("pytest_timeout") is None:  # whose setting is unknown then
            words += ["-o", "addopts=--import-mode=importlib -ra"]
            words += ["-W", "ignore::pytest.PytestConfigWarning"]
        if importlib.util.find_spec("xdist"):
            words += ["-n", TEST_PROCESSES, "--dist", "worksteal"]
        code, said = runner.run(*words, *(file.relative_to(ROOT) for file in files))
        part.commands = ["python -m pytest -m gpu"]
        if report.exists():
            read_tests(part, report)
        else:
            read_lines(part, said)
    if code is None:
        part.fail("pytest", f"took longer than its time; it ended with\n{_end_of(said)}")
        part.state = "timed out"
    elif code and not part.failures:
        part.fail("pytest", _end_of(said))
    outcomes = [f"{n} {kind}" for kind, n in part.numbers.items()]
    part.summary = ", ".join(outcomes) or "none ran"


def read_lines(part: Part, said: str) -> None:
    """The same of what pytest has printed before it was ended."""
    kinds, name = "(PASSED|FAILED|ERROR|SKIPPED)", r"(\S+::\S+)"
    outcome_of = dict(re.findall(f"{name} {kinds}", said))
    outcome_of |= {test: kind for kind, test in re.findall(f"{kinds} {name}", said)}  # xdist's
    for name, outcome in outcome_of.items():
        kind = "failed" if outcome in ("FAILED", "ERROR") else outcome.lower()
        part.numbers[kind] = part.numbers.get(kind, 0) + 1
        if kind == "failed":
            part.fail(name, outcome)


def read_tests(part: Part, report: Path) -> None:
    """What a JUnit report says of failures, and how many tests there were."""
    outcomes = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure")
        bad = case.find("error") if bad is None else bad
        if bad is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            part.fail(name, f"{bad.get('message', '')}\n{_end_of(bad.text or '')}")
        kind = "failed" if bad is not None else "passed"
        outcomes["skipped" if case.find("skipped") is not None else kind] += 1
    part.numbers |= outcomes


def run_bench_gpu(part: Part, runner: Runner) -> None:
    """benchmarks/bench_gpu.py, all but what the next part runs."""
    parts = ["step", "optim", "exact", "formats", "shared", "batch_norm"]
    limit_s = f"{runner.left_s * MOST_OF_A_PART:.0f}"
    run_benchmark(part, runner, "bench_gpu", "--limit-s", limit_s, "--parts", *parts)


def run_bench_local(part: Part, runner: Runner) -> None:
    """benchmarks/bench_local.py for two dtypes."""
    for dtype in ("float32", "bfloat16"):
        run_benchmark(part, runner, "bench_local", "--device", "cuda", "--dtype", dtype)


def run_benchmark(part: Part, runner: Runner, name: str, *words: str) -> None:
    """Runs a benchmark; keeps its tables, its results, and what it says has failed."""
    start_s = time.time()
    code, said = runner.run(sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", *words)
    part.output += said
    before = len(part.failures)
    for line in said.splitlines():
        if line.startswith("FAILED "):
            what, _, why = line.removeprefix("FAILED ").partition(": ")
            part.fail(what, why)
    what = " ".join([name, *words])
    if code is None:
        part.fail(what, f"took longer than its time; it ended with\n{_end_of(said)}")
        part.state = "timed out"
    elif code and len(part.failures) == before:
        part.fail(what, _end_of(said))
    for file in sorted((ROOT / "benchmarks" / "results").glob(f"{name}_cuda*.json")):
        if file.stat().st_mtime >= start_s:
            part.results[file.stem] = results = json.loads(file.read_text())
            part.numbers[file.stem] = results.get("headline", {})
    part.summary = f"{sum(map(len, part.numbers.values()))} headline numbers"


def _end_of(said: str) -> str:
    """The last lines, where errors are."""
    return "\n".join(said.strip().splitlines()[-FIRST_LINES:])


PARTS: Mapping[str, Callable[[Part, Runner], None]] = {
    "environment": run_environment,
    "tests": run_tests,
    "bench_gpu": run_bench_gpu,
    "bench_local": run_bench_local,
}


# -- the report ------------------------------------------------------------------------------------


def write_report(folder: Path, date: str, parts: list[Part]) -> None:
    """Markdown for people, and JSON."""
    data = {"date": date, "revision": revision(), "parts": [asdict(part) for part in parts]}
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n")
    lines = ["# A run on a GPU", "", f"{date}, revision {data['revision']}", ""]
    lines += ["| Part | State | Seconds | Summary |", "|---|---|---|---|"]
    for part in parts:
        summary = part.summary.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {part.name} | {part.state} | {part.seconds:.0f} | {summary} |")
    for part in parts:
        lines += ["", f"## {part.name}", ""]
        lines += [f"`{command}`\n" for command in part.commands]
        for what, words in part.failures.items():
            lines += [f"Failed: {what}", "", "```text", words, "```", ""]
        if part.numbers:
            lines += ["```json", json.dumps(part.numbers, indent=2), "```"]
        if part.output:
            lines += ["", "```text", part.output.strip(), "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def revision() -> str:
    """Of this tree, where git knows it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0, help="of all parts; default: 10")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    arguments = parser.parse_args()
    folder: Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.log").unlink(missing_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    end_s = time.monotonic() + 60 * arguments.minutes
    done: list[Part] = []
    for index, name in enumerate(arguments.parts):
        start_s = time.monotonic()
        rest = sum(SHARES[other] for other in arguments.parts[index:])
        limit_s = max(0.0, end_s - start_s) * SHARES[name] / rest  # what others left is shared
        if index == 0:
            limit_s = max(limit_s, LEAST_S)
        part = Part(name)
        try:
            PARTS[name](part, Runner(part, folder, start_s + limit_s))
        except Exception as error:
            part.fail(name, f"{type(error).__name__}: {error}")
        part.seconds = time.monotonic() - start_s
        done.append(part)
        write_report(folder, date, done)
        print(f"{name}: {part.state} in {part.seconds:.0f} s; {part.summary}", flush=True)
        for what, words in part.failures.items():
            print(f"  {what}\n    " + words.replace("\n", "\n    "), flush=True)
    print(f"written to {folder / 'report.md'}")
    return 0 if all(part.state == "passed" for part in done) else 1


if __name__ == "__main__":
    sys.exit(main())
