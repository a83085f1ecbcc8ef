"""Commands on a machine with a real GPU, which they choose by themselves.

With `--gpu-tests-on-cpu` they choose the CPU, and what a GPU alone refuses is skipped.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allstep.train import read_checkpoint
from tests.helpers.gpus import on_cpu

pytestmark = [pytest.mark.gpu, pytest.mark.process]

RUN_S = 200.0
SHORT = ["--epochs", "1", "--warmup-epochs", "0", "--width", "8", "--loader-workers", "1"]
needs_one_gpu = pytest.mark.skipif(
    on_cpu() or torch.cuda.device_count() != 1, reason="needs a machine with one GPU"
)

SCRIPT = """
import torch
import allstep
from torch import nn

samples = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
with allstep.init() as comm:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    model.to(comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(samples, comm, global_batch=12, micro_batch=4)
    for _ in range(4):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    print(f"trained on {comm.device.type}")
"""


def command(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`allstep *arguments` in a folder, in a process of its own."""
    line = [sys.executable, "-m", "allstep", *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=RUN_S)


def output_of(folder: Path, *arguments: object) -> str:
    done = command(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.manual_seed(1)\n" + SCRIPT)
    return path


def test_digits_are_trained_evaluated_and_measured_on_what_is_there(tmp_path: Path) -> None:
    said = output_of(tmp_path, "train", "digits", "--run-dir", "run", *SHORT)
    labels = [line.partition(": ")[0] for line in said.splitlines()]
    assert labels == ["accuracy", "loss", "speed", "MFU", "waiting", "checkpoint", "run", "next"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["workers"], report["num_steps"]) == (1, 15)
    assert 0 < report["mfu"] < 1
    # A number of threads belongs to an exact run on CPUs only.
    state = read_checkpoint(tmp_path / report["checkpoint"])
    assert (state["threads"]["num"] is None) == (not on_cpu())
    correct, count = map(int, report["totals"]["accuracy"])
    assert f"({correct} of {count})" in output_of(tmp_path, "evaluate", "run")


@needs_one_gpu
def test_more_workers_than_gpus_are_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "train", "digits", "--workers", 2, *SHORT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `workers` (=2) exceeds this machine's GPUs (1): ")
    assert not list(tmp_path.iterdir())


def test_sharpness_of_a_run(tmp_path: Path) -> None:
    output_of(tmp_path, "train", "digits", "--run-dir", "run", *SHORT)
    assert "sharpness" in output_of(tmp_path, "sharpness", "run")


@pytest.mark.skipif(not on_cpu(), reason="needs as many GPUs as workers")
def test_a_script_is_the_same_on_two_workers(script: Path) -> None:
    found = json.loads(output_of(script.parent, "verify", script, "-n", "1,2", "--json"))
    assert found["is_same"]


@needs_one_gpu
def test_verify_says_that_there_are_too_few_gpus(script: Path) -> None:
    done = command(script.parent, "verify", script, "-n", "1,2")
    assert done.returncode == 2
    assert "on 2 workers (rank 1)" in done.stderr
    assert "ranks 0 and 1 both compute on accelerator" in done.stderr


def test_advice_on_a_script_and_by_measurement(script: Path) -> None:
    said = output_of(script.parent, "advise", script, "--link", "1gbit", "--workers", "1,2")
    assert "advice: " in said
    flags = ["--workers", "1", "--json", "out.json", "--measure"]
    output_of(script.parent, "advise", "digits", *flags)
    found = json.loads((script.parent / "out.json").read_text())
    assert all(each["measured_s"] > 0 for each in found["predictions"])


def test_doctor_looks_at_the_gpus_of_this_host(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json")
    assert done.returncode in (0, 2), done.stderr
    found = json.loads(done.stdout)
    (host,) = found["hosts"].values()
    assert len(host.get("gpus", ())) == (0 if on_cpu() else torch.cuda.device_count())
    assert not [each for each in found["findings"] if "GPU" in each["what"]]
