"""Trainings under a real Slurm, on hosts in namespaces whose own names resolve to 127.0.1.1."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.compare import newest_step, newest_tensors
from tests.helpers.named_hosts import named_hosts
from tests.helpers.processes import wait_until
from tests.helpers.slurm import Slurm, slurm_cluster

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "clusters" / "slurm" / "train.sbatch"
FLAGS = ("digits", "--epochs", "12", "--width", "4", "--checkpoint-every-steps", "5")
WAIT_S = 400.0

pytestmark = [pytest.mark.net, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with named_hosts() as hosts, slurm_cluster(hosts, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def test_an_own_loop_by_srun(slurm: Slurm) -> None:
    script = ROOT / "examples" / "own_loop.py"
    text = slurm.run("srun", "--nodes=2", sys.executable, script, cwd=ROOT, timeout_s=WAIT_S)
    assert "mean over 2 workers" in text


def test_a_batch_job_goes_on_after_sigterm_and_the_loss_of_a_node(
    slurm: Slurm, tmp_path: Path
) -> None:
    """It ends with the bits of one undisturbed worker."""
    run_dir = tmp_path / "run"
    line = ("sbatch", "--parsable", SCRIPT, *FLAGS, "--run-dir", run_dir)
    environ = ("env", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}")
    job = slurm.run(*environ, *line, cwd=tmp_path).strip()
    log = tmp_path / f"allstep-{job}.log"

    wait_until(lambda: newest_step(run_dir) >= 5, WAIT_S, log)
    slurm.run("scancel", "--signal=TERM", job)
    wait_until(lambda: restarts(slurm, job) == 1, WAIT_S, log)
    assert "exit code 143" in log.read_text()

    stopped_at = newest_step(run_dir)
    wait_until(lambda: is_running(slurm, job) and newest_step(run_dir) > stopped_at, WAIT_S, log)
    slurm.run("scontrol", "update", "NodeName=beta", "State=DOWN", "Reason=test")
    wait_until(lambda: restarts(slurm, job) == 2, WAIT_S, log)
    slurm.run("scontrol", "update", "NodeName=beta", "State=RESUME")
    wait_until(lambda: is_running(slurm, job) or slurm.state(job) == "COMPLETED", WAIT_S, log)
    wait_until(lambda: slurm.state(job) == "COMPLETED", WAIT_S, log)

    one = tmp_path / "one"
    alone = [sys.executable, "-m", "allstep", "train", *FLAGS, "--run-dir", str(one)]
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert newest_step(one) == newest_step(run_dir)
    expected, found = newest_tensors(one), newest_tensors(run_dir)
    assert expected.keys() == found.keys() and expected
    for name, value in expected.items():
        assert value.equal(found[name]), name


def is_running(slurm: Slurm, job: str) -> bool:
    """Spares it the two minutes that Slurm lets a job wait that is put back into the queue."""
    if slurm.state(job) == "PENDING" and not slurm.has_files(job):
        line = slurm.line("scontrol", "update", f"JobId={job}", "StartTime=now")
        subprocess.run(line, capture_output=True)  # it may have started by now
    return slurm.state(job) == "RUNNING"


def restarts(slurm: Slurm, job: str) -> int:
    """How often the job was put back into the queue."""
    found = re.search(r"Restarts=(\d+)", slurm.run("scontrol", "show", "job", job))
    assert found is not None
    return int(found[1])
