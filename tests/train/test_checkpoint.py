"""Checkpoints: exact round trips, whole or not at all, damage told, the same on every worker."""

import errno
import logging
import math
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.train.checkpoint import Checkpoints, receive_state, send_state
from allstep.train.disk import Disk
from allstep.train.fitting import load_model_state, load_optimizer_state
from allstep.train.packing import pack
from allstep.train.storage import read_checkpoint, verify, write_checkpoint, write_manifest
from tests.helpers.compare import assert_identical
from tests.helpers.ranks import run_ranks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randint(0, 2, shape, generator=generator).to(torch.float32).to(dtype)
    return x.mT if len(shape) >= 2 and draw(st.booleans()) else x


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=9)
    | tensors()
)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["1", 1, "a/b", "__metadata__", ""])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(state=states)
def test_checkpoint_round_trip(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("round") / "step"
    write_checkpoint(folder, state)
    assert_identical(read_checkpoint(folder), state)
    shutil.rmtree(folder)


def test_checkpoint_tensor_names_that_could_clash(tmp_path: Path) -> None:
    state = {
        "a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)},
        "a/b": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "": torch.tensor(6),
        "state": torch.tensor(7),
    }
    write_checkpoint(tmp_path / "c", state)
    assert_identical(read_checkpoint(tmp_path / "c"), state)


def test_checkpoint_of_shared_storage_and_special_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "tied": [base, base, base[3:6], base.view(3, 4).t()],
        "parameter": nn.Parameter(torch.ones(2)),
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "ordered": OrderedDict(a=1),
        "huge": 10**6000,
    }
    write_checkpoint(tmp_path / "c", state)
    found = read_checkpoint(tmp_path / "c")
    assert_identical(found["tied"], state["tied"])
    assert_identical(found["parameter"], torch.ones(2))
    assert_identical(found["expanded"], torch.ones(5))
    assert_identical(found["conjugate"], torch.tensor([1 - 2j], dtype=torch.complex64))
    assert_identical(found["ordered"], OrderedDict(a=1))
    assert found["huge"] == 10**6000
    assert math.isnan(_round_trip(tmp_path, float("nan")))


def _round_trip(tmp_path: Path, state: Any) -> Any:
    write_checkpoint(tmp_path / "d", state)
    return read_checkpoint(tmp_path / "d")


def test_checkpoint_of_sets_tuple_keys_and_deep_nesting(tmp_path: Path) -> None:
    state = {
        "seen": {1, 2},
        (1, 2): 3,
        True: 4,
        "complex": 1j,
        "text": "\ud800",
        "deep": nested(300),
    }
    assert _round_trip(tmp_path, state) == state


@pytest.mark.parametrize("wrap", [lambda x: {x}, lambda x: {x: 1}, lambda x: {(x, 2): 1}])
def test_tensors_in_sets_and_keys_are_refused(wrap: Callable[[Tensor], Any]) -> None:
    """What comes behind them was stored in their place."""
    state = {"in": wrap(torch.zeros(2)), "behind": torch.ones(3)}
    with pytest.raises(UsageError, match=r"holds a tensor of shape \[2\] in a set, or as a dict's"):
        pack(state)


def test_dicts_keep_their_class(tmp_path: Path) -> None:
    state = {"counts": Counter({30: 1, 80: 2}), "names": OrderedDict(b=torch.ones(1), a=2)}

    def given(comm: Communicator) -> list[Any]:
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints.save(1, state)
        if comm.rank == 0:
            send_state(comm, state)
        sent = [] if comm.rank == 0 else [(1, receive_state(comm))]
        return [*sent, checkpoints.load_latest(), checkpoints.load_latest(lambda whole: whole)]

    for _, found in (x for ranks in run_ranks(2, given) for x in ranks):
        assert found == state
        assert [type(found[name]) for name in state] == [Counter, OrderedDict]


def nested(depth: int) -> Any:
    state: Any = 0
    for _ in range(depth):
        state = [state]
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"loader": {"seen": {object()}}}, r"builtins\.set at `loader/seen`"),
        ([object()], r"builtins\.object at `0`"),
        ({"x": {True: [range(3)]}}, r"builtins\.range at `x/True/0`"),
        ({"x": [defaultdict(int, a=1)]}, r"collections\.defaultdict at `x/0`"),
        ({"x": torch.ones(2).max(0)}, r"torch\.return_types\.max at `x`"),
        ({"m": torch.eye(2).to_sparse()}, r"sparse_coo tensor .* at `m`"),
        ({"m": torch.empty(2, device="meta")}, r"on meta at `m`"),
        (nested(2000), "nesting 500 levels"),
    ],
)
def test_checkpoint_refuses_what_cannot_be_stored(state: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        write_checkpoint(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_checkpoint_refuses_nested_tensors(tmp_path: Path) -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UsageError, match="nested tensor at `m`"):
        write_checkpoint(tmp_path / "c", {"m": ragged})


def test_checkpoint_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"x": torch.ones(2), "y": b"\x00"})
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        "state.msgpack",
        "tensors.safetensors",
    ]


def a_state(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((5, 3), float(step)), "bias": torch.zeros(3)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "rates": (0.1, math.inf)},
        "step": step,
    }


def saved(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, Communicator.single_process(), keep=keep)
    for step in steps:
        checkpoints.save(step, a_state(step))
    return checkpoints


def loaded_step(folder: Path) -> int | None:
    """The newest whole checkpoint's step, its contents checked."""
    loaded = Checkpoints(folder, Communicator.single_process()).load_latest()
    if loaded is None:
        return None
    step, state = loaded
    assert_identical(state, a_state(step))
    return step


def test_checkpoints_keep_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 20, 30, 40, keep=2)
    assert checkpoints.saved_steps() == [40, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]
    assert loaded_step(tmp_path) == 40
    for keep in (0, 2.5, None):
        with pytest.raises(UsageError, match=rf"`keep` \(={keep}\)"):
            Checkpoints(tmp_path, Communicator.single_process(), keep=keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, True, 2.0, None])
def test_a_step_that_could_not_be_found_again(step: Any, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    for save in (checkpoints.save, checkpoints.save_best):
        with pytest.raises(UsageError, match=rf"`step` \(={step}\) must be"):
            save(step, {})
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_numpy(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save(np.int64(3), {})  # type: ignore[arg-type]
    assert checkpoints.load_latest() == (3, {})


def test_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10)
    checkpoints.save(10, a_state(10) | {"again": True})
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert loaded[1]["again"] is True
    assert len(list(tmp_path.iterdir())) == 1


def test_load_latest_without_checkpoints(tmp_path: Path) -> None:
    assert loaded_step(tmp_path) is None
    assert loaded_step(tmp_path / "missing") is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert loaded_step(tmp_path) is None


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replace_manifest_by_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensors gone": (
        lambda f: (f / "tensors.safetensors").unlink(),
        r"tensors\.safetensors is missing",
    ),
    "manifest gone": (lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing"),
    "empty folder": (empty, r"manifest\.json is missing"),
    "state gone": (lambda f: (f / "state.msgpack").unlink(), r"state\.msgpack is missing"),
    "tensor file flipped": (
        lambda f: flip(f / "tensors.safetensors", -3),
        r"tensors\.safetensors does not match its checksum",
    ),
    "manifest flipped": (
        lambda f: flip(f / "manifest.json", 200),
        r"manifest\.json does not match its checksum",
    ),
    "manifest is a folder": (replace_manifest_by_folder, r"manifest\.json is no file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_latest_skips_a_damaged_checkpoint_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_damage, words = DAMAGES[damage]
    saved(tmp_path, 100, 120)
    make_damage(tmp_path / "step-00000120")
    with pytest.raises(CheckpointError, match=f"step-00000120: {words}"):
        verify(tmp_path / "step-00000120")
    with caplog.at_level(logging.WARNING):
        assert loaded_step(tmp_path) == 100
    (record,) = caplog.records
    assert record.getMessage().startswith("step-00000120: ")
    assert record.getMessage().endswith("; using step-00000100")
    assert (tmp_path / "step-00000120").exists()


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.msgpack", "manifest.json"])
def test_checkpoint_truncated_or_with_a_flipped_byte_is_refused(file: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, 7).path(7)
    data = (folder / file).read_bytes()
    chance = random.Random(0)
    for length in [0, 1, len(data) - 1, *chance.sample(range(len(data)), 20)]:
        (folder / file).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(folder)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        (folder / file).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(folder)
    (folder / file).write_bytes(data + b" ")
    with pytest.raises(CheckpointError, match=file):
        read_checkpoint(folder)
    (folder / file).write_bytes(data)
    assert loaded_step(tmp_path) == 7


def test_load_latest_with_all_checkpoints_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    for folder in list(tmp_path.iterdir()):
        flip(folder / "tensors.safetensors", -1)
    assert loaded_step(tmp_path) is None
    assert [r.getMessage().endswith("there is no older one") for r in caplog.records] == [True] * 2


def test_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1).path(1)
    write_manifest(folder, verify(folder) | {"format": 2})
    with pytest.raises(CheckpointError, match="of format 2, this allstep reads format 1"):
        read_checkpoint(folder)


def test_checkpoint_whose_state_and_tensors_do_not_fit_is_refused(tmp_path: Path) -> None:
    """A checksum proves that nothing changed, not that the writer was right."""
    folder, other = tmp_path / "c", tmp_path / "d"
    write_checkpoint(folder, {"x": torch.ones(1)})
    write_checkpoint(other, {"y": torch.ones(1)})
    manifest = verify(folder)
    manifest["files"]["state.msgpack"] = verify(other)["files"]["state.msgpack"]
    shutil.copy(other / "state.msgpack", folder)
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match="c: the tensor y is missing"):
        read_checkpoint(folder)
    write_manifest(folder, manifest | {"files": {}})
    with pytest.raises(CheckpointError, match=r"does not list tensors\.safetensors"):
        read_checkpoint(folder)


def test_damaged_checkpoint_stays_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    saved(tmp_path, 80, 100, 120, keep=3)
    flip(tmp_path / "step-00000120" / "tensors.safetensors", -1)
    checkpoints = Checkpoints(tmp_path, Communicator.single_process(), keep=2)
    assert checkpoints.load_latest() is not None
    checkpoints.save(110, a_state(110))
    assert checkpoints.saved_steps() == [120, 110, 100]  # it does not push out a whole one
    checkpoints.save(130, a_state(130))
    assert checkpoints.saved_steps() == [130, 110]


def test_damaged_checkpoint_is_replaced_by_its_step(tmp_path: Path) -> None:
    saved(tmp_path, 100, 120)
    flip(tmp_path / "step-00000120" / "tensors.safetensors", -1)
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    assert checkpoints.load_latest() is not None
    checkpoints.save(120, a_state(120))
    assert loaded_step(tmp_path) == 120


@pytest.mark.parametrize("moment", ["safetensors.torch.save_file", "os.fsync", "os.rename"])
def test_write_checkpoint_on_a_full_disk(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 1, 2, keep=2)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(moment, full)
        with pytest.raises(CheckpointError, match=r"step-00000003.*No space left.*untouched"):
            checkpoints.save(3, a_state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert loaded_step(tmp_path) == 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_write_checkpoint_on_a_full_tmpfs(tiny_disk: Path) -> None:
    checkpoints = saved(tiny_disk, 1)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoints.save(2, {"x": torch.zeros(1 << 20)})
    assert [path.name for path in tiny_disk.iterdir()] == ["step-00000001"]
    assert loaded_step(tiny_disk) == 1


def test_write_checkpoint_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


class HourDisk(Disk):
    """One whose clock is set by hand."""

    passed_s = 0.0

    def now_s(self) -> float:
        return self.passed_s


def test_sweep_removes_what_writers_of_another_host_left_an_hour_ago(tmp_path: Path) -> None:
    """By the sweeper's clock: the date here, there and on the disk may be wrong, or set."""
    for name in (names := [".tmp-step-00000009-elsewhere-1", ".tmp-step-00000009-elsewhere-2"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.msgpack").touch()
    disk = HourDisk()
    checkpoints = Checkpoints(tmp_path, Communicator.single_process(), disk=disk)
    for date_s in (time.time() - 7200, time.time() + 7200):
        os.utime(tmp_path / names[0], (date_s, date_s))
        checkpoints.load_latest()
        disk.passed_s += 1800
        assert {path.name for path in tmp_path.iterdir()} == set(names)
    (tmp_path / names[0] / "state.msgpack").write_text("its writer lives")
    disk.passed_s += 1801
    checkpoints.load_latest()
    assert [path.name for path in tmp_path.iterdir()] == names[:1]
    disk.passed_s += 3601
    checkpoints.load_latest()
    assert not list(tmp_path.iterdir())


def test_sweep_removes_what_dead_writers_left(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    host = socket.gethostname().replace("-", "_")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f".tmp-step-00000009-{host}-{os.getppid()}", ".tmp-step-00000009-elsewhere-1"]
    swept = [
        f".tmp-step-00000009-{host}-{dead.pid}",
        f".tmp-step-00000009-{host}-{os.getpid()}",
    ]
    for name in [*kept, *swept]:
        (tmp_path / name).mkdir()
    assert loaded_step(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "step-00000001"])


def test_sweep_restores_a_checkpoint_moved_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".old-step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".old-step-00000001")
    assert loaded_step(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_reader_that_puts_back_what_a_living_writer_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `allstep evaluate RUN --checkpoint best` may, while the run is in training."""
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save_best(1, a_state(1))
    rename, num_sweeps = os.rename, 0

    def rename_and_sweep(source: Path, target: Path) -> None:
        nonlocal num_sweeps
        rename(source, target)
        if Path(target).name == ".old-best" and num_sweeps < 2:
            num_sweeps += 1
            rename(target, source)

    monkeypatch.setattr(os, "rename", rename_and_sweep)
    checkpoints.save_best(2, a_state(2))
    assert num_sweeps == 2
    loaded = checkpoints.load_best()
    assert loaded is not None and loaded[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_best_checkpoint_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save_best(1, a_state(1))
    load_file = safetensors.torch.load_file
    pending = [2]

    def replace_and_load(path: Path) -> Any:
        for step in pending:
            pending.remove(step)
            checkpoints.save_best(step, a_state(step))
        return load_file(path)

    monkeypatch.setattr("safetensors.torch.load_file", replace_and_load)
    loaded = checkpoints.load_best()
    assert loaded is not None and loaded[0] == 2
    assert_identical(loaded[1], a_state(2))  # no mixture of both


def save_for_ever(folder: str, step: int) -> None:
    while True:
        saved(Path(folder), step, keep=2)
        step += 1


@pytest.mark.process
def test_write_checkpoint_killed_at_any_moment(tmp_path: Path) -> None:
    """kill -9 at random instants of a writer that does nothing but write."""
    context = multiprocessing.get_context("forkserver")
    chance = random.Random(1)
    last = 0
    for _ in range(10):
        writer = context.Process(target=save_for_ever, args=(str(tmp_path), last + 1))
        writer.start()
        wanted = last + chance.randint(1, 5)
        while (seen := newest_step(tmp_path)) < wanted:
            assert writer.is_alive()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        writer.kill()
        writer.join()
        step = loaded_step(tmp_path)
        assert step is not None
        assert step >= seen > last
        last = step
        assert not list(tmp_path.glob(".*"))
    assert last > 20


def newest_step(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_load_latest_on_all_workers(size: int, tmp_path: Path) -> None:
    state = a_state(3) | {"more": [torch.zeros(0), torch.ones((), dtype=torch.bfloat16), b"x"]}
    state["items"] = {1: (None, True, 2**70), "1": math.nan}

    def save_and_load(comm: Communicator) -> tuple[int, Any] | None:
        # only rank 0 knows the folder
        folder = tmp_path if comm.rank == 0 else tmp_path / "missing"
        checkpoints = Checkpoints(folder, comm)
        assert checkpoints.load_latest() is None
        checkpoints.save(3, state)
        return checkpoints.load_latest()

    for loaded in run_ranks(size, save_and_load):
        assert loaded is not None
        assert loaded[0] == 3
        assert_identical(loaded[1], state)


def test_load_in_many_messages(tmp_path: Path) -> None:
    def save_and_load(comm: Communicator) -> tuple[int, Any] | None:
        checkpoints = Checkpoints(tmp_path, comm, message_bytes=16)
        checkpoints.save(5, a_state(5))
        return checkpoints.load_latest()

    for loaded in run_ranks(2, save_and_load):
        assert len(list(tmp_path.glob("*/tensors*"))) > 1
        assert loaded is not None
        assert_identical(loaded[1], a_state(5))


def test_load_latest_of_a_state_without_tensors(tmp_path: Path) -> None:
    def load(comm: Communicator) -> tuple[int, Any] | None:
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints.save(1, {"a": 1})
        return checkpoints.load_latest()

    assert run_ranks(2, load) == [(1, {"a": 1})] * 2


def test_load_latest_error_of_rank_0_reaches_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def load(comm: Communicator) -> str:
        checkpoints = Checkpoints(tmp_path, comm)
        if comm.rank == 0:
            checkpoints.saved_steps = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises((ZeroDivisionError, CheckpointError)) as caught:
            checkpoints.load_latest()
        return f"{caught.type.__name__}: {caught.value}"

    assert run_ranks(3, load) == [
        "ZeroDivisionError: division by zero",
        *["CheckpointError: rank 0 could not load: division by zero"] * 2,
    ]


def test_load_model_state() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source(torch.randn(4, 3))
    load_model_state(target, dict(source.state_dict()))
    assert_identical(dict(target.state_dict()), dict(source.state_dict()))


def test_load_model_state_of_another_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = {name: torch.zeros(1) for name in (f"layer{i}.weight" for i in range(7))}
    state["0.weight"] = torch.zeros(3, 2)
    state["0.bias"] = torch.zeros(4)
    with pytest.raises(CheckpointError) as caught:
        load_model_state(model, state)
    message = str(caught.value)
    assert "The checkpoint is for another model: missing: 1.weight, 1.bias; " in message
    assert "layer3.weight, layer4.weight and 2 more; " in message
    assert "of another shape: 0.bias [4] instead of [3]. " in message
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_load_optimizer_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stored = _round_trip(tmp_path, optimizer.state_dict())
    restored = torch.optim.AdamW(model.parameters())
    load_optimizer_state(restored, stored)
    assert_identical(restored.state_dict(), optimizer.state_dict())

    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(CheckpointError, match="groups have 2 parameters instead of 1, 1"):
        load_optimizer_state(torch.optim.AdamW(groups), stored)


def test_checkpoint_tensor_names_are_paths() -> None:
    _, found = pack(a_state(1))
    assert list(found) == ["model/weight", "model/bias", "optimizer/state/0/step"]
