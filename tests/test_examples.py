"""The example gives the same numbers alone, under torchrun and under mpirun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import mpi

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples" / "own_loop.py")
pytestmark = pytest.mark.process


def run(*command: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def alone() -> str:
    return run(sys.executable, SCRIPT)


def test_alone_it_learns(alone):
    assert float(alone.split()[2].rstrip(",")) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_torchrun_gives_the_same(alone, num_workers):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_workers]
    assert run(sys.executable, *torchrun, SCRIPT) == alone


@pytest.mark.slow
@pytest.mark.parametrize("package", mpi.LAUNCHERS)
def test_mpirun_gives_the_same(alone, package):
    mpirun = mpi.LAUNCHERS[package]
    if mpirun is None:
        pytest.skip(f"{package} is not installed")
    assert run(*mpirun, "2", sys.executable, SCRIPT) == alone
