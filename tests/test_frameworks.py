"""Other people's frameworks train a lone worker's model, each started as its users start it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import allstep
from allstep import Communicator
from tests.helpers import plain_ddp
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "frameworks"
TIMEOUT_S = 600  # Ray takes half a minute to start; much more on a busy machine
PACKAGES = {"fabric": "lightning"}  # where it is not the framework's own name

State = dict[str, Tensor]
pytestmark = [pytest.mark.slow, pytest.mark.process]


def require(framework: str) -> None:
    package = PACKAGES.get(framework, framework)
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-slow` does it where it can be had")


@pytest.fixture
def home() -> Iterator[Path]:
    """Where a framework keeps what is its own; Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run(home: Path, *arguments: object) -> str:
    """Runs `python *arguments` and returns what it prints; none of its processes stays."""
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",  # whoever aborts says where
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)]),
        "RAY_TMPDIR": str(home),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how often it asks for results
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(TIMEOUT_S // 2),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=home,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def torchrun(num_workers: int) -> list[str]:
    """What runs a script or a module on workers."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
    return [*launcher, "-m", "tests.helpers.leave_at_once"]


def train(framework: str, num_workers: int, home: Path) -> tuple[State, str]:
    """What the framework's example has trained, and what it has printed."""
    saved = home / "model.pt"
    if framework == "ray":
        storage = ["--workers", num_workers, "--storage", home]
        output = run(home, EXAMPLES / "with_ray.py", *storage)
        saved = max(home.glob("digits/checkpoint_*/model.pt"))
    elif framework == "accelerate":
        launcher = torchrun(num_workers) if num_workers > 1 else []
        output = run(home, *launcher, EXAMPLES / "with_accelerate.py", "--save", saved)
    else:
        name = {"fabric": "with_lightning_fabric.py"}.get(framework, f"with_{framework}.py")
        output = run(home, EXAMPLES / name, "--workers", num_workers, "--save", saved)
    return load(saved), output


def load(path: Path) -> State:
    saved = torch.load(path, weights_only=True)
    state = saved.get("state_dict", saved.get("model", saved))  # Lightning's, Fabric's
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def train_alone(comm: Communicator) -> State:
    from examples.frameworks import digits  # scikit-learn takes a second

    model = digits.net()
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = allstep.data.loader(
        digits.data()[0], comm, global_batch=digits.GLOBAL_BATCH, micro_batch=digits.MICRO_BATCH
    )
    for _ in range(digits.EPOCHS):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def alone() -> State:
    """Of one worker that no framework has started."""
    return run_processes(1, train_alone)[0]


@pytest.fixture(scope="module")
def plain_alone() -> dict[str, State]:
    return plain_ddp.alone()


@pytest.mark.parametrize(
    ("framework", "num_workers"),
    [
        *(("fabric", 3), ("lightning", 3), ("accelerate", 3), ("ray", 2)),
        *(
            pytest.param(name, n, marks=pytest.mark.long)
            for name in ("fabric", "lightning")
            for n in (1, 2)
        ),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("accelerate", 2), ("ray", 1))),
    ],
)
def test_a_framework_trains_the_model_of_one_worker(
    alone: State, home: Path, framework: str, num_workers: int
) -> None:
    require(framework)
    state, output = train(framework, num_workers, home)
    assert state_difference(state, alone) < 1e-10
    # The framework's number of workers, and allstep's.
    assert f"{num_workers} workers, test accuracy 0.9" in output
    assert f"mean over {num_workers} worker" in output


@pytest.mark.long
@pytest.mark.parametrize("framework", ["fabric", "lightning", "accelerate", "ray"])
def test_a_framework_by_itself_trains_another(
    plain_alone: dict[str, State], home: Path, framework: str
) -> None:
    """Batch norm sees a worker's samples. And `attach` refuses the wrapped model."""
    require(framework)
    launcher = torchrun(plain_ddp.WORKERS) if framework == "accelerate" else ["-m"]
    run(home, *launcher, "tests.helpers.plain_ddp", framework, home / "models.pt")
    found = torch.load(home / "models.pt", weights_only=True)
    assert state_difference(found["no norm"], plain_alone["no norm"]) < 1e-10
    assert state_difference(found["batch norm"], plain_alone["batch norm"]) > 1e-3
    assert "is a DistributedDataParallel" in found["refusal"]
    assert "without DDP and a framework's `setup` or `prepare`" in found["refusal"]


@pytest.mark.parametrize(
    "where", ["end", *(pytest.param(x, marks=pytest.mark.long) for x in ("middle", "reloaded"))]
)
def test_lightning_goes_on_within_an_epoch_and_behind_one(
    alone: State, home: Path, where: str
) -> None:
    """From its own checkpoint, by its own `ckpt_path`; on fewer workers."""
    require("lightning")
    for num_workers in (2, 1):
        run(home, "-m", "tests.helpers.lightning_resumed", num_workers, home, where)
    assert state_difference(load(home / "end.ckpt"), alone) < 1e-10


def test_ray_starts_a_killed_worker_again(alone: State, home: Path) -> None:
    """And `AutoCheckpoint` goes on, in the middle of an epoch."""
    require("ray")
    output = run(home, "-m", "tests.helpers.ray_restarted", home)
    assert (home / "killed").exists()
    assert "goes on after step 30" in output
    assert state_difference(load(home / "model.pt"), alone) < 1e-10
