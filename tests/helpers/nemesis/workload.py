"""What workers run under the nemesis, and the notes that they leave of it."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from allstep.comm import Communicator, init
from tests.helpers.nemesis.clock import has_own_clock, restart_with_clock
from tests.helpers.nemesis.hosts import Host

TIMEOUT_S = 4.0  # of a call, and for which the others wait
_START_S = 60.0  # of a call before all have met


class Notes:
    """Who has made which updates.

    Args:
        folder: of all workers of a run; not on its disk, which may be full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.goes_on = folder / "goes_on"

    def add(self, generation: int, names: Sequence[str], step: int) -> None:
        """This worker has made one."""
        line = f"{generation} {step} {','.join(names)}\n"
        with (self.folder / f"notes-{os.getpid()}").open("a") as file:
            file.write(line)
        (self.folder / f"step-{step}").touch()

    def has_step(self, step: int) -> bool:
        """Whether somebody has made that step's update."""
        return (self.folder / f"step-{step}").exists()

    @property
    def may_go_on(self) -> bool:
        """Whether workers are held no more."""
        return self.goes_on.exists()

    def let_go_on(self) -> None:
        """Holds them no more."""
        self.goes_on.touch()

    def check_one_group(self) -> None:
        """No two groups are the same generation, and none goes on where the next one does.

        Raises:
            AssertionError: else.
        """
        groups: dict[int, set[str]] = {}
        steps: dict[int, set[int]] = {}
        for file in self.folder.glob("notes-*"):
            for line in file.read_text().splitlines():
                generation, step, names = line.split()
                groups.setdefault(int(generation), set()).add(names)
                steps.setdefault(int(generation), set()).add(int(step))
        assert all(len(group) == 1 for group in groups.values()), f"two groups at once: {groups}"
        for earlier, later in itertools.pairwise(sorted(steps)):
            assert max(steps[earlier]) <= min(steps[later]), f"two groups go on: {steps}"


class Workload(Protocol):
    """An elastic training of `NUM_STEPS` steps.

    Attributes:
        rejoins: whether a worker that the others have left behind joins again by itself.
        name: of it.
    """

    rejoins: bool
    name: str

    def train(self, comm: Communicator, run_dir: Path, notes: Notes, held_at: int) -> None:
        """Runs a worker.

        Args:
            comm: all that have started with it.
            run_dir: on the disk.
            notes: of each update.
            held_at: before this step it waits until it may go on.
        """

    def undisturbed(self, run_dir: Path) -> None:
        """Runs one worker that nobody disturbs, from the newest checkpoint if there is one."""

    def check(self, run_dir: Path, undisturbed: Path, notes: Path, *, was_resumed: bool) -> None:
        """Whether what is left of a run has an undisturbed one's bits.

        Args:
            run_dir, undisturbed: folders of runs.
            notes: the folder of `Notes`.
            was_resumed: whether the run was undisturbed from its newest checkpoint on.

        Raises:
            AssertionError: else.
        """


def work(
    workload: Workload,
    host: Host,
    run_dir: Path,
    notes: Path,
    held_at: int,
    clock: Path | None,
) -> None:
    """What each worker runs.

    Args:
        workload, run_dir, held_at: see `Workload.train`.
        host: where it lives.
        notes: the folder of `Notes`.
        clock: of `build_clock`, for a worker with a clock of its own.
    """
    if not has_own_clock():
        host.enter()
        if clock is not None:
            restart_with_clock(clock, notes)
    with init(device="cpu", timeout_s=_START_S) as comm:
        comm.set_timeout(TIMEOUT_S)
        workload.train(comm, run_dir, Notes(notes), held_at)
