"""Trainings that write checkpoints to a disk that fails, and go on from them in further lives."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from allstep import Communicator
from allstep.errors import CheckpointError
from allstep.train.checkpoint import Checkpoints
from tests.helpers.compare import equal
from tests.helpers.simulation.disk import DiskFaults, FaultyDisk
from tests.helpers.simulation.faults import Faults
from tests.helpers.simulation.loop import Loop, undisturbed, undisturbed_steps
from tests.helpers.simulation.scheduler import Process
from tests.helpers.simulation.training import Outcome, Simulation
from tests.helpers.simulation.volume import Volume

_KEEP = 2


@dataclass
class Promised:
    """The steps whose checkpoints were written, as those who wrote them were told."""

    steps: set[int] = field(default_factory=set)
    best_steps: set[int] = field(default_factory=set)


class SavingSimulation(Simulation):
    """One life of a training: rank 0 writes a checkpoint after each step.

    Args:
        seed: as for `Simulation`.
        volume: where they are.
        promised: filled.
        faults: as for `Simulation`.
        disk_faults: what happens to the disk; None to draw it.
    """

    def __init__(
        self,
        seed: int,
        volume: Volume,
        promised: Promised,
        faults: Faults | None = None,
        disk_faults: DiskFaults | None = None,
    ) -> None:
        super().__init__(seed, faults)
        num_hosts = max(self.faults.hosts) + 1
        self.disk_faults = disk_faults or DiskFaults.draw(self.scheduler, num_hosts)
        self._disk = FaultyDisk(volume, self.scheduler, self.disk_faults, self._processes)
        self._folder, self._promised = checkpoint_folder(volume.root), promised

    def _begin(self, loop: Loop, process: Process) -> None:
        found = self._checkpoints(loop.comm, process).load_latest()
        if found is not None:
            loop.elastic.load_state_dict(found[1])

    def _save(self, loop: Loop, process: Process, step: int) -> None:
        if loop.comm.rank > 0:
            return
        checkpoints = self._checkpoints(Communicator.single_process(), process)
        state = loop.elastic.state_dict()
        checkpoints.save(step, state)
        self._promised.steps.add(step)
        checkpoints.save_best(step, state)
        self._promised.best_steps.add(step)

    def _checkpoints(self, comm: Communicator, process: Process) -> Checkpoints:
        return Checkpoints(self._folder, comm, keep=_KEEP, disk=self._disk.of(process))

    def _is_right(self, state: Sequence[Tensor]) -> bool:
        """But for the last loss and evaluation, which a life may begin behind."""
        return equal(state[:-1], undisturbed()[:-1])

    def _was_taken(self, outcome: Outcome) -> bool:
        return super()._was_taken(outcome) or self._is_full(outcome.error)

    def _may_be_lost(self, left: Sequence[Outcome]) -> bool:
        return super()._may_be_lost(left) or self.disk_faults.ends_all

    def _is_full(self, error: Exception | None) -> bool:
        """Whether it is what a full disk ends a worker with, and the disk was full."""
        text = str(error)
        tells_cure = "No space left" in text and "Free some space" in text
        return self._disk.num_refusals > 0 and isinstance(error, CheckpointError) and tells_cure


class Lives:
    """A training that is resumed until it comes to its end.

    Args:
        seed: of all that happens.
        folder: an empty one.

    Attributes:
        faults: of each life that has begun.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._random, self._root = Random(seed), folder / "disk"
        self._root.mkdir()
        self._volume, self._promised = Volume(self._root), Promised()
        self.faults: list[tuple[Faults, DiskFaults]] = []

    def run(self) -> None:
        """Runs one or two disturbed lives, then one that nobody disturbs.

        Raises:
            AssertionError: if what they leave is not what checkpoints promise.
        """
        random = self._random
        for _ in range(random.choice((1, 1, 2))):
            self._live(None, None)
            if random.random() < 0.7:
                self._volume.lose_power(lambda host: True, random)
            self._check(rotten=None)
        rotten = self._rot() if random.random() < 0.4 else None
        self._check(rotten)
        self._live(Faults([0] * random.choice((1, 2, 3, 5))), DiskFaults())
        self._check(rotten=None)

    def _live(self, faults: Faults | None, disk_faults: DiskFaults | None) -> None:
        seed = self._random.getrandbits(32)
        life = SavingSimulation(seed, self._volume, self._promised, faults, disk_faults)
        self.faults.append((life.faults, life.disk_faults))
        life.run()

    def _rot(self) -> int | None:
        """The disk damages the newest checkpoint; its step."""
        folder = checkpoint_folder(self._root)
        newest = max(folder.glob("step-*"), default=None)
        if newest is None:
            return None
        path = self._random.choice(sorted(newest.iterdir()))
        data = bytearray(path.read_bytes())
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        self._volume.write(path, bytes(data), host=0)
        return int(newest.name.removeprefix("step-"))

    def _check(self, rotten: int | None) -> None:
        """Whether all is there that was promised, but for the step that the disk has damaged."""
        copy = self._root.with_name(f"{self._root.name}-copy")
        shutil.copytree(self._root, copy)  # a reader sweeps
        try:
            checkpoints = Checkpoints(checkpoint_folder(copy), Communicator.single_process())
            newest, best = checkpoints.load_latest(), checkpoints.load_best()
        except CheckpointError as error:
            raise AssertionError(f"what was found is damaged: {error}") from error
        finally:
            shutil.rmtree(copy)
        _check_state(newest, self._promised.steps - {rotten})
        # One that was left behind may write an older one.
        _check_state(best, self._promised.best_steps, may_be_older=self._may_be_left_behind)

    @property
    def _may_be_left_behind(self) -> bool:
        return any(faults.freezes_at or faults.parts_at_s for faults, _ in self.faults)


def _check_state(
    found: tuple[int, Any] | None, promised: set[int], *, may_be_older: bool = False
) -> None:
    if found is None:
        assert not promised, f"no checkpoint, though those of {sorted(promised)} were written"
        return
    step, state = found
    newest = max(promised, default=0)
    assert step >= newest or may_be_older, f"the newest is {step}, though {newest} was written"
    loop = Loop(Communicator.single_process(), None)
    try:
        loop.elastic.load_state_dict(state)
    except CheckpointError as error:
        raise AssertionError(f"what was found is of something else: {error}") from error
    assert equal(loop.trained(), undisturbed_steps()[step]), f"another state of step {step}"


def checkpoint_folder(root: Path) -> Path:
    """Of a run on a volume."""
    return root / "run" / "checkpoints"
