"""Workers on two hosts whose links, disks, processes and clocks are disturbed: `make nemesis`."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.nemesis.clock import build_clock, environment_with_clock, set_clock
from tests.helpers.nemesis.faults import Fault, Schedule
from tests.helpers.nemesis.fit import Fit
from tests.helpers.nemesis.own_loop import OwnLoop, check_counts
from tests.helpers.nemesis.trial import Nemesis, nemesis
from tests.helpers.nemesis.workload import Notes, Workload

pytestmark = [pytest.mark.net, pytest.mark.process]

# Of all kinds but "drop", which has a test of its own, and clocks.
SEEDS = (1, 12, 20, 32)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nemesis]:
    with nemesis(tmp_path_factory.mktemp("nemesis")) as made:
        yield made


@pytest.mark.parametrize(
    "workload",
    [pytest.param(Fit(), marks=pytest.mark.slow, id="fit"), pytest.param(OwnLoop(), id="own loop")],
)
def test_a_worker_is_killed_and_a_link_is_cut_for_a_moment(
    here: Nemesis, workload: Workload
) -> None:
    faults = Fault("kill", 0, 5, math.inf), Fault("link down", 2, 9, 0.5)
    here.run(Schedule(2, 1, 2, faults), workload)


@pytest.mark.slow
def test_a_host_is_cut_off_for_good(here: Nemesis) -> None:
    here.run(Schedule(2, 1, 2, (Fault("drop", 2, 8, math.inf),)), Fit())


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_seeds(seed: int, here: Nemesis) -> None:
    here.run(Schedule.draw(seed), Fit())


@pytest.mark.slow
def test_clocks_of_workers_of_a_users_own_loop_are_set(here: Nemesis) -> None:
    """Ahead and back amid waits for a worker that is stopped, for a moment and for good."""
    faults = (
        Fault("clock back", 0, 4, 0.5),  # is set right, an hour ahead, half a second later
        Fault("stop", 1, 4, 2.0),
        Fault("clock ahead", 0, 10, 6.0),  # back amid what others may wait for the stopped one
        Fault("stop", 1, 10, math.inf),
    )
    here.run(Schedule(2, 1, 2, faults), OwnLoop())


def test_a_clock_of_a_process_of_its_own(tmp_path: Path) -> None:
    code = "import time\nwhile input(): print(time.time() - time.monotonic(), flush=True)"
    file = tmp_path / "clock"
    environ = environment_with_clock(build_clock(tmp_path), file)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        found = []
        for ahead_s in (0, 7200, -7200):
            set_clock(file, ahead_s)
            process.stdin.write("go on\n")
            process.stdin.flush()
            found.append(float(process.stdout.readline()))
        process.stdin.write("\n")
        process.stdin.close()
    assert [round((date_s - found[0]) / 3600) for date_s in found] == [0, 2, -2]


def test_a_sample_that_counts_twice_is_found() -> None:
    """The control: it would be a wrong update, and the next one's bits others."""
    with pytest.raises(AssertionError, match=r"\{3: 6\.0\}"):
        check_counts(torch.tensor([-5.0, -5.0, -5.0, -6.0]))


def test_schedule_of_a_seed() -> None:
    assert Schedule.draw(3) == Schedule.draw(3) != Schedule.draw(4)


def test_two_groups_are_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The control: what must not be is seen in the notes."""
    for groups, words in [
        ([(1, ["a", "b"], 7), (1, ["c"], 8)], "at once"),
        ([(1, ["a"], 7), (2, ["b"], 7), (1, ["a"], 8)], "go on"),
    ]:
        notes = Notes(tmp_path_factory.mktemp("notes"))
        for group in groups:
            notes.add(*group)
        with pytest.raises(AssertionError, match=words):
            notes.check_one_group()
