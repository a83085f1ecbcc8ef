"""Real workers on two hosts whose links, disks and processes are disturbed; see `make nemesis`."""

import math
from collections.abc import Iterator

import pytest

from tests.helpers.nemesis.faults import Fault, Schedule
from tests.helpers.nemesis.training import Notes
from tests.helpers.nemesis.trial import Nemesis, nemesis

pytestmark = [pytest.mark.net, pytest.mark.process]

SEEDS = (1, 8, 16, 52)  # of all kinds but "drop", which has a test of its own


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nemesis]:
    with nemesis(tmp_path_factory.mktemp("nemesis")) as made:
        yield made


def test_a_worker_is_killed_and_a_link_is_cut_for_a_moment(here: Nemesis) -> None:
    here.run(Schedule(2, 1, 2, (Fault("kill", 0, 5, math.inf), Fault("link down", 2, 9, 0.5))))


@pytest.mark.slow
def test_a_host_is_cut_off_for_good(here: Nemesis) -> None:
    here.run(Schedule(2, 1, 2, (Fault("drop", 2, 8, math.inf),)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_seeds(seed: int, here: Nemesis) -> None:
    here.run(Schedule.draw(seed))


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
