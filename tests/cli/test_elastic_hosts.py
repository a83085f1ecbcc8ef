"""`allstep join` from another host than the launcher's."""

import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from allstep.errors import UsageError
from tests.helpers import elastic_script
from tests.helpers.compare import differing_names
from tests.helpers.joiners import num_joiners, unreachable_store
from tests.helpers.launched import Launched
from tests.helpers.named_hosts import NamedHosts, named_hosts

SCRIPT = Path(elastic_script.__file__)


@pytest.fixture(scope="module")
def hosts() -> Iterator[NamedHosts]:
    with named_hosts() as made:
        yield made


def num_joiners_on(hosts: NamedHosts, run_dir: Path) -> int:
    """As the launcher's host sees it."""
    source = Path(num_joiners.__code__.co_filename)
    code = (
        f"import sys; sys.path.insert(0, {str(source.parents[2])!r});"
        "from pathlib import Path; from allstep.cli.exits import read_store;"
        "from tests.helpers.joiners import num_joiners;"
        f"print(num_joiners(read_store(Path({str(run_dir)!r})).reachable_address()))"
    )
    return int(hosts.run(0, sys.executable, "-c", code))


def is_held(out: Path, step: int, num_workers: int) -> bool:
    return len(list(out.glob(f"held-{step}-*"))) == num_workers


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.process
@pytest.mark.parametrize("num_lost", [1, pytest.param(2, marks=pytest.mark.long)])
def test_workers_of_the_launcher_are_lost(num_lost: int, hosts: NamedHosts, tmp_path: Path) -> None:
    """A worker of another host has joined, and goes on with the other, or alone."""
    run_dir = tmp_path / "run"
    given = ("--", SCRIPT, tmp_path, "5,8", 3)
    flags = ("--elastic", "--workers", 2, "--run-dir", run_dir)
    launched = Launched("-m", "allstep", "launch", *flags, *given, on=partial(hosts.line, 0))
    launched.wait_until(lambda: is_held(tmp_path, 5, 2))
    joining = Launched("-m", "allstep", "join", run_dir, on=partial(hosts.line, 1))
    joining.wait_until(lambda: num_joiners_on(hosts, run_dir) == 1)
    (tmp_path / "goes_on-5").touch()
    joining.wait_until(lambda: is_held(tmp_path, 8, 3))
    for worker in launched.workers()[:num_lost]:
        worker.send_signal(signal.SIGKILL)
    (tmp_path / "goes_on-8").touch()
    launched.finish(within_s=120)
    joining.finish(within_s=200)
    assert (launched.code, joining.code) == (0, 0), launched.errors + joining.errors
    alone = tmp_path / "alone"
    alone.mkdir()
    elastic_script.main(alone, [], 3)
    (expected,) = (torch.load(file) for file in alone.glob("model-*"))
    results = [torch.load(file) for file in tmp_path.glob("model-*")]
    assert len(results) == 3 - num_lost
    for result in results:
        assert differing_names(result, expected) == []


def test_a_launcher_that_cannot_be_reached() -> None:
    """Its host is named, and what to do."""
    message = r"on gamma can't be reached .* of 127\.0\.0\.1"
    with (
        unreachable_store("gamma", is_apart=False) as record,
        pytest.raises(UsageError, match=message),
    ):
        record.reachable_address()
