"""The files of `examples/clusters`: accepted by their platforms' own checks, and really run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.cluster_tools import run_tool, write_programs
from tests.helpers.compare import differing_names, newest_step, newest_tensors
from tests.helpers.named_hosts import NamedHosts, named_hosts
from tests.helpers.platforms import EXAMPLES, PLATFORMS, Started
from tests.helpers.ports import free_port
from tests.helpers.processes import wait_until

ROOT = Path(__file__).parents[2]
FLAGS = ("--epochs", "4", "--width", "4", "--checkpoint-every-steps", "5")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # threads of nodes that share cores wait for each other
WAIT_S = 450.0  # more than `init` waits: a node that came too early is healed by that

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1000)]

CHECKS = {
    "kubernetes_validate": """
import kubernetes_validate, sys, yaml
for document in yaml.safe_load_all(open(sys.argv[1])):
    kubernetes_validate.validate(document, "1.33", strict=True)
    print("accepted", document["kind"])
""",
    "kubeflow_trainer_api": """
import sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob
document = yaml.safe_load(open(sys.argv[1]))
assert TrainJob.from_dict(document).to_dict() == document, "a field is unknown"
print("accepted", document["kind"])
""",
    "sky": """
import sky, sys
task = sky.Task.from_yaml(sys.argv[1])
print("accepted", task.name, task.num_nodes)
""",
    "dstack": """
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
task = parse_run_configuration(yaml.safe_load(open(sys.argv[1])))
print("accepted", task.name, task.nodes)
""",
}


@pytest.mark.parametrize(
    ("module", "file", "printed"),
    [
        ("kubernetes_validate", "kubernetes/job.yaml", "accepted Service\naccepted Job\n"),
        ("kubeflow_trainer_api", "kubernetes/trainjob.yaml", "accepted TrainJob\n"),
        ("sky", "skypilot/train.sky.yaml", "accepted allstep 2\n"),
        ("dstack", "dstack/train.dstack.yml", "accepted allstep 2\n"),
    ],
)
def test_a_platform_accepts_its_file(module: str, file: str, printed: str, tmp_path: Path) -> None:
    """And refuses a field that it does not know."""
    check = ["python", "-c", CHECKS[module]]
    assert run_tool(module, *check, EXAMPLES / file, home=tmp_path).endswith(printed)

    wrong = tmp_path / "wrong.yaml"
    text = (EXAMPLES / file).read_text()
    for field in ("completions:", "numNodes:", "num_nodes:", "nodes:"):
        if field in text:
            wrong.write_text(text.replace(field, "numbr:"))
            break
    with pytest.raises(AssertionError, match=r"numbr|unknown"):
        run_tool(module, *check, wrong, home=tmp_path)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an undisturbed worker that no platform has started."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "allstep", "train", "digits", *FLAGS, "--run-dir", run_dir]
    environ = os.environ | ONE_THREAD
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    return run_dir


@pytest.fixture(scope="module")
def hosts() -> Iterator[NamedHosts]:
    with named_hosts() as hosts:
        yield hosts


@pytest.mark.net
@pytest.mark.parametrize(
    "platform",
    [
        *("aws", "kubernetes"),
        *(pytest.param(p, marks=pytest.mark.long) for p in ("kubeflow", "skypilot", "dstack")),
    ],
)
def test_a_training_goes_on_after_the_loss_of_a_node(
    platform: str, hosts: NamedHosts, one: Path, tmp_path: Path
) -> None:
    """With the bits of one undisturbed worker."""
    started = PLATFORMS[platform](tmp_path / "shared", hosts.addresses, FLAGS)
    hosts.write_host_files(dict(zip(started.names, hosts.addresses, strict=False)))
    run_dir = tmp_path / "shared" / "runs" / "first"
    with nodes(started, hosts, tmp_path) as them:
        wait_until(lambda: newest_step(run_dir) >= 5, WAIT_S, them.log)
        them.lose(1)
        wait_until(them.have_ended, WAIT_S, them.log)
    assert them.num_starts > 2  # of nodes
    assert "/runs/first is continued" in them.log.read_text()
    assert num_workers(run_dir) == 2
    assert newest_step(run_dir) == newest_step(one)
    assert differing_names(newest_tensors(run_dir), newest_tensors(one)) == []


def num_workers(run_dir: Path) -> int:
    """By the last states that they have left."""
    return len(list((run_dir / "last_state").glob("rank-*.txt")))


class Nodes:
    """Nodes whose commands are started again until they succeed."""

    def __init__(self, started: Started, hosts: NamedHosts, folder: Path) -> None:
        self.log, self.num_starts = folder / "log", 0
        self._started, self._hosts = started, hosts
        self._path = f"{write_programs(folder / 'bin')}:{os.environ['PATH']}"
        self._running = [self._start(rank) for rank in range(len(started.commands))]

    def _start(self, rank: int, delay_s: int = 0) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        # A node's processes end with the first of them.
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        later = ["sh", "-c", 'sleep "$0" && exec "$@"', str(delay_s)]
        command = self._hosts.line(rank, [*alone, *later, *self._started.commands[rank]])
        environ = os.environ | {"PATH": self._path, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ | self._started.environs[rank] | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def lose(self, rank: int) -> None:
        self._running[rank].kill()
        self._running[rank].wait()

    def have_ended(self) -> bool:
        """Whether rank 0's node has succeeded; starts those again that have failed."""
        if self._running[0].poll() == 0:
            return True
        ranks = range(len(self._running))
        failed = [rank for rank in ranks if self._running[rank].poll() not in (None, 0)]
        for rank in ranks if failed and self._started.restarts_all else failed:
            self.lose(rank)
            self._running[rank] = self._start(rank, self._started.restart_delay_s)
        assert self.num_starts < 20, self.log.read_text()[-4000:]
        return False

    def end(self) -> None:
        for rank in range(len(self._running)):
            self.lose(rank)


@contextmanager
def nodes(started: Started, hosts: NamedHosts, folder: Path) -> Iterator[Nodes]:
    them = Nodes(started, hosts, folder)
    try:
        yield them
    finally:
        them.end()


def test_torchx_trains_on_two_nodes(one: Path, tmp_path: Path) -> None:
    """Its scheduler of this machine starts a process for each; with the bits of one worker."""
    write_programs(tmp_path / "bin")
    component = f"{EXAMPLES}/torchx/component.py:train"
    line = ["torchx", "run", "--wait", "--scheduler", "local_cwd", component]
    run_dir = tmp_path / "run"
    line += [
        "--cpu",
        1,
        "--port",
        free_port(),
        "digits",
        *FLAGS,
        "--run-dir",
        run_dir,
        "--resume",
        "auto",
    ]
    run_tool("torchx", *line, home=tmp_path)
    assert differing_names(newest_tensors(run_dir), newest_tensors(one)) == []
