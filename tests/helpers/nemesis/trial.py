"""One disturbed training, and what is checked of it."""

import contextlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from allstep.cli.exits import StoreAddress
from allstep.cli.worker import log_path
from tests.helpers.elastic_workers import TOO_LATE
from tests.helpers.joiners import num_joiners
from tests.helpers.nemesis.clock import build_clock
from tests.helpers.nemesis.disturb import Scene, Undo, disturb
from tests.helpers.nemesis.faults import CLOCKS, CUTS, Fault, Schedule
from tests.helpers.nemesis.hosts import Host, two_hosts
from tests.helpers.nemesis.workload import TIMEOUT_S, Notes, Workload, work
from tests.helpers.processes import Workers

_LOOK_S = 0.02
_BOUND_S = 120.0  # after all that happens: a minute for heartbeats, 40 s to meet, some timeouts
_HELD_S = 60.0  # for those who join
_DOCUMENTED = re.compile(
    "The store in which workers find each other is gone|The run has ended|have died, or send no"
    " heartbeat any more|were lost before this one|No run with `--elastic` answers"
    "|The others have gone on without this worker"
)
_NO_SPACE = re.compile("No space left on device")


@dataclass(frozen=True)
class Worker:
    """One of a run, alone in its `Workers` or with others.

    Attributes:
        group: it and others.
        rank: in the group.
        host: where it runs.
    """

    group: Workers
    rank: int
    host: Host

    @property
    def code(self) -> int | None:
        """How it has ended."""
        return self.group.exit_codes[self.rank]

    @property
    def pid(self) -> int:
        """Its process."""
        return self.group.pids[self.rank]

    @property
    def error(self) -> str:
        """Its traceback, if it left one, and what it has printed."""
        outcome = self.group.outcomes()[self.rank]
        return f"{outcome.value}\n{self.log}"

    @property
    def log(self) -> str:
        """What it has printed, and where it is if it was asked."""
        return log_path(self.group.folder, self.rank).read_text(errors="replace")


class Nemesis:
    """Two hosts and a disk, on which trainings are disturbed one after the other.

    Args:
        near, far: the launcher's host, and that of those who join.
        folder: has the disk, `disk`, and takes undisturbed runs.
    """

    def __init__(self, near: Host, far: Host, folder: Path) -> None:
        self._near, self._far, self._folder = near, far, folder
        self._run_dir, self._disk = folder / "disk" / "run", folder / "disk"

    def run(self, schedule: Schedule, workload: Workload) -> None:
        """Disturbs a training, and checks what came of it.

        Raises:
            AssertionError: if that is not what an elastic training promises.
        """
        shutil.rmtree(self._run_dir, ignore_errors=True)
        undisturbed = self._folder / workload.name
        if not undisturbed.exists():
            workload.undisturbed(undisturbed)
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder)
            workers = self._train(schedule, workload, notes)
            Notes(notes).check_one_group()
            for number, (code, error) in enumerate(workers):
                is_promised = _may_end_so(schedule, workload, number, code, error)
                assert is_promised, f"worker {number}: {code}, {error}"
            is_whole = any(code == 0 for code, _ in workers)
            assert is_whole or _may_lose_all(schedule, workload), f"nobody is left: {workers}"
            resumes = not is_whole or schedule.has("terminate", "full disk")
            if resumes:
                workload.undisturbed(self._run_dir)  # from what is there, to the end
            workload.check(self._run_dir, undisturbed, notes, was_resumed=resumes)

    def _train(
        self, schedule: Schedule, workload: Workload, notes: Path
    ) -> list[tuple[int | None, str]]:
        """Exit codes and errors, once all have ended."""
        clock = build_clock(self._folder) if schedule.has(*CLOCKS) else None

        def start(num: int, host: Host, joins: StoreAddress | None) -> Workers:
            arguments = (workload, host, self._run_dir, notes, schedule.joins_at_step, clock)
            return stack.enter_context(
                Workers(num, work, arguments, min_workers=1, has_logs=True, joins=joins)
            )

        with contextlib.ExitStack() as stack:
            with self._near.network():  # where the store is to be
                groups = [start(schedule.num_first, self._near, None)]
            store = groups[0].store_address._replace(host=self._near.address)
            with self._far.network():
                groups += [start(1, self._far, store) for _ in range(schedule.num_joiners)]
            workers = [Worker(groups[0], rank, self._near) for rank in range(schedule.num_first)]
            workers += [Worker(group, 0, self._far) for group in groups[1:]]
            try:
                self._disturb(schedule, workers, Notes(notes))
            except TimeoutError as error:
                for group in groups:
                    group.show_stacks()
                logs = [worker.log for worker in workers]
                raise AssertionError("\n".join([str(error), *logs])) from error
            return [(worker.code, worker.error) for worker in workers]

    def _disturb(self, schedule: Schedule, workers: Sequence[Worker], notes: Notes) -> None:
        """Does what the schedule says, until all have ended."""
        todo, undos = list(schedule.faults), list[tuple[float, Fault, Undo]]()
        moved_at_s = start_s = time.monotonic()
        try:
            while running := {n: w for n, w in enumerate(workers) if w.code is None}:
                now_s = time.monotonic()
                if now_s > moved_at_s + _BOUND_S:
                    raise TimeoutError(f"{sorted(running)} have not ended {_BOUND_S:g} s later")
                if not notes.may_go_on and self._all_have_asked(workers, now_s - start_s):
                    notes.let_go_on()
                scene = Scene(
                    {n: w.pid for n, w in running.items()},
                    [w.host for w in workers],
                    self._far,
                    self._disk,
                    notes.folder,
                )
                while todo and notes.has_step(todo[0].at_step):
                    fault = todo.pop(0)
                    undos.append((now_s + fault.for_s, fault, disturb(fault, scene)))
                    moved_at_s = now_s
                stopped = {fault.victim for _, fault, _ in undos if fault.kind == "stop"}
                for due in [u for u in undos if now_s > u[0] or set(running) <= stopped]:
                    undos.remove(due)
                    due[2]()
                    moved_at_s = now_s
                time.sleep(_LOOK_S)
        finally:
            for _, _, undo in undos:
                undo()

    def _all_have_asked(self, workers: Sequence[Worker], after_s: float) -> bool:
        """Whether those who join have; or will not in time, for they are disturbed."""
        joiners = [worker for worker in workers if worker.host is self._far]
        store = workers[0].group.store_address
        with self._near.network():
            return num_joiners(store) >= len(joiners) or after_s > _HELD_S


def _may_lose_all(schedule: Schedule, workload: Workload) -> bool:
    """Whether nobody need come to the end."""
    lost = schedule.victims("kill")
    # Those who have gone on without a stopped one may be cut off.
    if schedule.has(*CUTS) or not workload.rejoins:
        lost |= schedule.victims("stop")
    return set(range(schedule.num_first)) <= lost or schedule.has("full disk", "terminate")


def _may_end_so(
    schedule: Schedule, workload: Workload, number: int, code: int | None, error: str
) -> bool:
    """Whether that is promised of a worker."""
    joins = number >= schedule.num_first
    ends = {
        "kill": code == -signal.SIGKILL,
        "terminate": code == -signal.SIGTERM,  # where it can't answer yet, or the second time
    }
    if code == 0 or any(ends.get(f.kind, False) for f in schedule.faults if f.victim == number):
        return True
    if code != 1:
        return False
    is_cut = joins and schedule.has(*CUTS, "slow link")
    is_left = is_cut or number in schedule.victims("stop", TIMEOUT_S)
    expected = [
        (joins, TOO_LATE),
        (is_left, _DOCUMENTED),
        (schedule.has("full disk"), _NO_SPACE),
    ]
    return any(given and words.search(error) is not None for given, words in expected)


@contextmanager
def nemesis(folder: Path) -> Iterator[Nemesis]:
    """Where trainings are disturbed; skips where there can't be hosts.

    Args:
        folder: for the disk, and undisturbed runs to compare with.
    """
    (folder / "disk").mkdir()
    with two_hosts(folder / "disk") as (near, far):
        yield Nemesis(near, far, folder)
