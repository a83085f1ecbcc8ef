"""Who writes the parts of divided tensors: each worker its own where all see one folder."""

import itertools
import math
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.nn import Layout
from allstep.train import Checkpoints, read_checkpoint, write_checkpoint
from allstep.train.disk import LOCAL_DISK, Disk
from tests.helpers.ranks import run_ranks
from tests.helpers.simulation.disk import SimulatedDisk, no_space
from tests.helpers.simulation.scheduler import KilledError, Process
from tests.helpers.simulation.scratch import scratch
from tests.helpers.simulation.volume import Volume
from tests.train.test_checkpoint_power import Calls
from tests.train.test_divided_checkpoint import OtherDisk, divided

X = torch.arange(60.0).view(12, 5)


class FullDisk(Disk):
    """Has no space for a second file of tensors."""

    def __init__(self) -> None:
        self._num_files = 0

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._num_files += 1
        if self._num_files == 2:
            raise no_space()
        super().write_tensors(path, tensors)


def state_of(comm: Communicator, x: Tensor = X) -> dict[str, Any]:
    """Rows of `x` on each worker."""
    leaf = divided(x, comm, Layout.split(x.shape[:1], [comm.size]))
    return {"x": leaf, "of all": torch.ones(2), "step": 3}


def save(
    comm: Communicator,
    folder: Path,
    step: int = 3,
    disk: Disk = LOCAL_DISK,
    message_bytes: int = 48,
    x: Tensor = X,
) -> str:
    """What went wrong, or nothing."""
    try:
        checkpoints = Checkpoints(folder, comm, message_bytes=message_bytes, disk=disk)
        checkpoints.save(step, state_of(comm, x))
    except CheckpointError as error:
        return str(error)
    return ""


def writers(folder: Path, step: int = 3) -> set[str]:
    """Of whose parts there are files."""
    names = [path.name for path in (folder / f"step-{step:08d}").glob("*.safetensors")]
    ranks = {name.split("-")[2].split(".")[0] for name in names if "rank" in name}
    assert "tensors.safetensors" in names
    return ranks


def found(folder: Path, step: int = 3) -> Tensor:
    x: Tensor = read_checkpoint(folder / f"step-{step:08d}")["x"]
    return x


def test_each_worker_writes_its_parts(tmp_path: Path) -> None:
    assert run_ranks(3, lambda comm: save(comm, tmp_path)) == ["", "", ""]
    assert writers(tmp_path) == {"1", "2"}
    assert torch.equal(found(tmp_path), X)
    assert not [*tmp_path.glob("*/token-*"), *tmp_path.glob("*/probe-*"), *tmp_path.glob(".*")]


def test_a_folder_has_another_name_on_another_host(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    run_ranks(2, lambda comm: save(comm, tmp_path / ("there" if comm.rank else "here")))
    assert writers(tmp_path / "here") == {"1"}
    assert torch.equal(found(tmp_path / "here"), X)


def test_rank_0_writes_for_all_where_one_does_not_see_its_folder(tmp_path: Path) -> None:
    def run(comm: Communicator) -> str:
        return save(comm, tmp_path, disk=OtherDisk() if comm.rank == 2 else LOCAL_DISK)

    assert run_ranks(3, run) == ["", "", ""]
    assert writers(tmp_path) == set()
    assert torch.equal(found(tmp_path), X)


def test_another_folder_of_the_same_name_is_not_written(tmp_path: Path) -> None:
    """As of a worker of the same host's name and number that has died."""
    name = f".tmp-step-00000003-{LOCAL_DISK.host}-{LOCAL_DISK.pid}"
    (tmp_path / "1" / name).mkdir(parents=True)
    run_ranks(2, lambda comm: save(comm, tmp_path / str(comm.rank)))
    assert writers(tmp_path / "0") == set()
    assert torch.equal(found(tmp_path / "0"), X)
    assert not list((tmp_path / "1" / name).iterdir())


@pytest.mark.parametrize(("full", "is_shared"), [(0, True), (2, True), (0, False)])
def test_a_full_disk_is_named_on_rank_0_and_keeps_nobody_waiting(
    tmp_path: Path, full: int, is_shared: bool
) -> None:
    run_ranks(3, lambda comm: save(comm, tmp_path, 1))

    def save_on_full_disk(comm: Communicator) -> str:
        other = LOCAL_DISK if is_shared else OtherDisk()
        return save(comm, tmp_path, 2, FullDisk() if comm.rank == full else other)

    first, *others = run_ranks(3, save_on_full_disk)
    assert others == ["", ""]
    assert "could not be written" in first and "No space left" in first
    assert ("rank 2: " in first) == (full == 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(found(tmp_path, 1), X)


@pytest.mark.parametrize("size", [1, 3])
def test_a_large_state_is_read_with_few_open_files(tmp_path: Path, size: int) -> None:
    """A process may have 1,024 open by default, some of which others need."""
    x = torch.arange(3000.0).view(3000, 1)
    run_ranks(size, lambda comm: save(comm, tmp_path, message_bytes=4, x=x))
    assert len(list(tmp_path.glob("*/*.safetensors"))) < 600
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 600, hard))
    try:
        assert torch.equal(found(tmp_path), x)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_shared", [True, False])
def test_parts_of_the_same_memory_and_of_names_that_read_alike(
    tmp_path: Path, is_shared: bool
) -> None:
    z = torch.complex(X, -X)

    def run(comm: Communicator) -> None:
        x, other = state_of(comm)["x"], state_of(comm, 2 * X)["x"]
        conjugate = state_of(comm, z)["x"]
        conjugate = replace(conjugate, local=conjugate.local.conj())
        state = {"a": x, "b": x, "c/d": x, "c": {"d": other}, "conjugate": conjugate}
        disk = LOCAL_DISK if is_shared or comm.rank == 0 else OtherDisk()
        Checkpoints(tmp_path, comm, disk=disk).save(3, state)

    run_ranks(3, run)
    read = read_checkpoint(tmp_path / "step-00000003")
    for name in ("a", "b", "c/d"):
        assert torch.equal(read[name], X)
    assert torch.equal(read["c"]["d"], 2 * X)
    assert torch.equal(read["conjugate"], z.conj())


def test_numbers_of_16_bytes_are_where_the_processor_wants_them(tmp_path: Path) -> None:
    """A copy of a part of what is elsewhere ends the process."""
    z = X.to(torch.complex128)
    write_checkpoint(tmp_path / "c", {"a": torch.zeros(1, dtype=torch.uint8), "z": z})
    read = read_checkpoint(tmp_path / "c")["z"]
    assert read.data_ptr() % 16 == 0
    assert torch.equal(torch.zeros_like(z)[:, :3].copy_(read[:, :3]), z[:, :3])


@pytest.mark.parametrize("rank", [0, 2])
def test_another_error_keeps_nobody_waiting(tmp_path: Path, rank: int) -> None:
    """And is raised where it is; of another worker rank 0 tells, too."""

    class SmallMemory(Disk):
        def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
            raise MemoryError("no room")

    def run(comm: Communicator) -> str:
        try:
            return save(comm, tmp_path, disk=SmallMemory() if comm.rank == rank else LOCAL_DISK)
        except MemoryError as error:
            return f"raised {error}"

    found = run_ranks(3, run)
    assert found[rank] == "raised no room" and found[1] == ""
    assert rank == 0 or "rank 2: no room" in found[0]
    assert not list(tmp_path.iterdir())


def test_a_state_that_cannot_be_stored_keeps_nobody_waiting(tmp_path: Path) -> None:
    def run(comm: Communicator) -> str:
        state = state_of(comm) | {"bad": object() if comm.rank == 0 else None}
        try:
            Checkpoints(tmp_path, comm).save(3, state)
        except UsageError as error:
            return str(error)
        return save(comm, tmp_path) if comm.rank else "not raised"

    def run_and_save(comm: Communicator) -> str:
        said = run(comm)
        return said if comm.rank else said + save(comm, tmp_path)

    first, *others = run_ranks(3, run_and_save)
    assert "`state` holds a builtins.object at `bad`" in first and others == ["", ""]
    assert torch.equal(found(tmp_path), X)


def save_on_volume(volume: Volume, step: int, dies: int, dies_at: float) -> list[int] | None:
    """Two workers save; the number of calls of each, or nothing if one dies."""

    def run(comm: Communicator) -> int:
        calls = Calls(dies_at=dies_at if comm.rank == dies else math.inf)
        process = Process(10 * step + comm.rank)
        never: Callable[[int], bool] = lambda pid: False  # noqa: E731
        disk = SimulatedDisk(volume, process, calls, never, time.monotonic)
        save(comm, volume.root / "run", step, disk, x=X * step)
        return calls.count

    try:
        return run_ranks(2, run)
    except KilledError:
        return None


@pytest.mark.parametrize("dies", [0, 1])
def test_a_worker_dies_at_any_call_of_its_disk_and_power_fails(dies: int) -> None:
    """What is under a checkpoint's name is whole."""
    with scratch() as folder:
        numbers = itertools.count()

        def volume() -> Volume:
            root = folder / str(next(numbers))
            root.mkdir()
            return Volume(root)

        whole = volume()
        save_on_volume(whole, 1, dies, math.inf)
        num_calls = save_on_volume(whole, 2, dies, math.inf)
        assert num_calls is not None and num_calls[dies] > 10
        num_saved = 0
        for dies_at in range(1, num_calls[dies] + 1):
            site = volume()
            assert save_on_volume(site, 1, dies, math.inf) is not None
            assert save_on_volume(site, 2, dies, dies_at) is None
            site.lose_power(lambda host: True, Random(dies_at))
            steps = [int(path.name[5:]) for path in (site.root / "run").glob("step-*")]
            assert 1 in steps
            for step in steps:
                assert torch.equal(found(site.root / "run", step), X * step)
            num_saved += 2 in steps
        assert num_saved < num_calls[dies] / 2
