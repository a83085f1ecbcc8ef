"""Checkpoints of tensors whose parts lie on workers: nobody ever has a whole one."""

import ctypes
import json
import os
import resource
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError, DisagreementError, UsageError
from allstep.nn import DividedTensor, Layout, Window
from allstep.recipes.cots import Cots
from allstep.recipes.cots_training import GreedyTraining
from allstep.train import Checkpoints, read_checkpoint
from allstep.train.disk import LOCAL_DISK, Disk
from allstep.train.storage import write_manifest
from tests.helpers.processes import RemoteError, run_processes
from tests.helpers.ranks import run_ranks
from tests.nn.test_memory import status_bytes

WHOLE = {
    "float": torch.arange(7 * 6 * 5.0).view(7, 6, 5),
    "bfloat16": torch.arange(70.0).view(7, 10).bfloat16(),
    "complex128": torch.complex(torch.arange(14.0).double(), torch.ones(14).double()).view(7, 2),
    "one row": torch.arange(9.0).view(1, 9),
    "like a piece[0:2]": torch.arange(8),
    "empty": torch.empty(5, 0),
}
MESSAGE_BYTES = 48


def divided(x: Tensor, comm: Communicator, layout: Layout, **options: bool) -> DividedTensor:
    window = layout.windows[comm.rank]
    return DividedTensor(
        window.view(x, Window.whole(layout.shape), 0).clone(),
        x.shape,
        x.dtype,
        layout.windows,
        comm,
        **options,
    )


def cut(shape: Sequence[int], size: int) -> Layout:
    """Along the longest dim."""
    dim = max(range(len(shape)), key=lambda dim: shape[dim])
    return Layout.split(shape[: dim + 1], [1] * dim + [size])


class OtherDisk(Disk):
    """Of a host on which rank 0's folder is not."""

    def write(self, path: Path, data: bytes) -> None:
        raise FileNotFoundError(path)


def saved(folder: Path, size: int, *, is_shared: bool = True) -> None:
    """A checkpoint of all tensors, each divided over so many workers."""

    def save(comm: Communicator) -> None:
        whole = {name: divided(x, comm, cut(x.shape, size)) for name, x in WHOLE.items()}
        state = {"step": 3, "of all": torch.ones(2), "nested": [whole, (None, 0.5)]}
        disk = LOCAL_DISK if is_shared or comm.rank == 0 else OtherDisk()
        Checkpoints(folder, comm, message_bytes=MESSAGE_BYTES, disk=disk).save(3, state)

    run_ranks(size, save)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_divided_tensors_are_whole_again(tmp_path, size, is_shared):
    saved(tmp_path, size, is_shared=is_shared)
    files = sorted((tmp_path / "step-00000003").glob("*.safetensors"))
    names = {path.name for path in files}
    written = {rank for rank in range(size) if f"tensors-rank-{rank}.safetensors" in names}
    assert written == (set(range(1, size)) if is_shared else set())
    assert len(files) > 10
    assert max(path.stat().st_size for path in files) < 4 * MESSAGE_BYTES + 300  # names
    found = read_checkpoint(tmp_path / "step-00000003")
    assert found["step"] == 3 and torch.equal(found["of all"], torch.ones(2))
    tensors, rest = found["nested"]
    assert rest == (None, 0.5) and list(tensors) == list(WHOLE)
    for name, x in WHOLE.items():
        assert tensors[name].dtype == x.dtype and torch.equal(tensors[name], x), name


class Parts:
    """What loads its parts only."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def local_state(self, state: Any) -> Any:
        tensors = state["nested"][0]
        assert all(x.is_meta for x in tensors.values())
        return {name: self.part(x) for name, x in tensors.items()}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state

    def part(self, x: Tensor) -> Tensor:
        layout = cut(x.shape, self._comm.size)
        return layout.windows[self._comm.rank].view(x, Window.whole(layout.shape), 0)


@pytest.mark.parametrize(("size", "later_size"), [(1, 4), (2, 3), (3, 2), (4, 1), (3, 3)])
def test_divided_tensors_are_cut_anew(tmp_path, size, later_size):
    saved(tmp_path, size)

    def load(comm: Communicator) -> None:
        target = Parts(comm)
        checkpoints = Checkpoints(tmp_path, comm, message_bytes=MESSAGE_BYTES)
        assert checkpoints.restore(target) == 3
        for name, x in WHOLE.items():
            found, wanted = target.loaded[name], target.part(x)
            assert found.dtype == x.dtype and torch.equal(found, wanted), name
            assert later_size == 1 or found.untyped_storage().nbytes() < max(x.nbytes, 1), name
        everything = checkpoints.load_latest()
        assert everything is not None and "of all" in everything[1]

    run_ranks(later_size, load)


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[0],
        lambda x: x.clone(),
        lambda x: torch.ones(2, 2),
    ],
    ids=["transposed", "every second", "one dim less", "copy", "another"],
)
def test_what_is_selected_must_be_a_part(tmp_path, select):
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save(1, {"x": torch.ones(4, 3)})
    with pytest.raises(UsageError, match="`select` returned a tensor of shape"):
        checkpoints.load_latest(lambda state: select(state["x"]))
    assert checkpoints.load_latest(lambda state: state["x"][1:, :2])[1].shape == (3, 2)


def test_a_column_that_is_made_a_row_is_no_part(tmp_path):
    """Its strides are those of the column."""
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save(1, {"column": torch.ones(4, 1), "row": torch.ones(1, 4)})
    for change in (Tensor.t, lambda x: x.reshape(x.shape[::-1])):
        for name in ("column", "row"):
            with pytest.raises(UsageError, match="that is no part, by slices"):
                checkpoints.load_latest(lambda state, f=change, name=name: f(state[name]))
    for name, expected in {"column": (2, 1), "row": (0, 4)}.items():
        part = checkpoints.load_latest(lambda state, name=name: state[name][1:3])[1]
        assert torch.equal(part, torch.ones(expected))


def test_nothing_may_be_selected(tmp_path):
    checkpoints = Checkpoints(tmp_path, Communicator.single_process())
    checkpoints.save(1, {"x": torch.ones(4, 3)})
    assert checkpoints.load_latest(lambda state: None) == (1, None)


def test_divided_tensor_in_two_dims_with_a_worker_that_has_none(tmp_path):
    x = torch.arange(24.0).view(4, 6)
    windows = [Window((0, 0), (4, 2)), None, Window((0, 2), (1, 6)), Window((1, 2), (4, 6))]

    def save(comm: Communicator) -> None:
        window = windows[comm.rank]
        local = None if window is None else window.view(x, Window.whole(x.shape), 0).clone()
        leaf = DividedTensor(local, x.shape, x.dtype, windows, comm)
        Checkpoints(tmp_path, comm, message_bytes=16).save(1, {"x": leaf})

    run_ranks(4, save)
    assert torch.equal(read_checkpoint(tmp_path / "step-00000001")["x"], x)
    assert not (tmp_path / "step-00000001" / "tensors-rank-1.safetensors").exists()


def test_only_the_first_copy_is_stored_and_the_others_must_be_equal(tmp_path):
    x = torch.arange(12.0).view(6, 2)

    def save(comm: Communicator, other: float) -> None:
        mesh = comm.mesh(data=2, model=2)
        leaf = divided(
            x + other * comm.rank // 2 * 2,
            mesh["model"],
            cut(x.shape, 2),
            is_first_copy=mesh["data"].rank == 0,
        )
        Checkpoints(tmp_path, comm).save(1, {"x": leaf})

    run_ranks(4, lambda comm: save(comm, 0.0))
    assert torch.equal(read_checkpoint(tmp_path / "step-00000001")["x"], x)
    with pytest.raises(DisagreementError, match="`values of x of rank 0` is checksum"):
        run_ranks(4, lambda comm: save(comm, 1.0))


def test_workers_with_other_shapes_of_the_whole_are_named(tmp_path):
    def save(comm: Communicator) -> None:
        leaf = divided(torch.ones(4 + comm.rank, 2), comm, cut((4 + comm.rank, 2), 2))
        Checkpoints(tmp_path, comm).save(1, {"x": leaf})

    with pytest.raises(DisagreementError, match=r"`x` is \[4, 2\] float32 on rank 0"):
        run_ranks(2, save)


def test_a_folder_that_cannot_be_written_is_said_on_rank_0_and_keeps_nobody_waiting(tmp_path):
    (tmp_path / "file").touch()

    def save(comm: Communicator) -> str:
        leaf = divided(WHOLE["float"], comm, cut((7, 6, 5), 3))
        try:
            Checkpoints(tmp_path / "file" / "x", comm, message_bytes=16).save(1, {"x": leaf})
        except CheckpointError as error:
            return str(error)
        return "sent"

    first, *others = run_ranks(3, save)
    assert "could not be written" in first and others == ["sent", "sent"]


def test_damage_of_any_file_is_found(tmp_path):
    saved(tmp_path, 2)
    folder = tmp_path / "step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["files"]) > 10
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{name} does not match its checksum"):
            read_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            read_checkpoint(folder)
        (folder / name).write_bytes(data)
    read_checkpoint(folder)


def test_a_writer_that_left_a_piece_out_is_found(tmp_path):
    saved(tmp_path, 2)
    folder = tmp_path / "step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"], manifest["files"]["tensors-rank-1-4.safetensors"]
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match="a piece of the tensor nested/0/float is missing"):
        read_checkpoint(folder)
    manifest["files"]["../x.safetensors"] = {}
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json lists \.\./x\.safetensors"):
        read_checkpoint(folder)


# `cots` with a net that needs 1.5 times the memory that a worker has

TOTAL_STEPS = 6
FILTER_BYTES = (164_540_160, 212_576_400, 18_662_400)  # by stage, at 200 pixels
# With the second stage's momentum, and its gradients from encoder and decoder.
NEEDED_BYTES = sum(FILTER_BYTES) + 3 * FILTER_BYTES[1]
ROOM_BYTES = NEEDED_BYTES * 2 // 3


class Dying(DividedTensor):
    """Its worker is killed when all of its pieces but one have been stored."""

    def local_piece(self, window: Window) -> Tensor:
        own = self.windows[self.comm.rank]
        assert own is not None
        if window.stop[0] == own.stop[0]:  # the last piece
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_piece(window)


class Disturbed(Cots):
    """Ends after an update, which takes a signal in the one before; or dies while it saves one."""

    end: ClassVar[int]
    dies: ClassVar[bool]

    def _training(self, *arguments: Any) -> GreedyTraining:
        training = super()._training(*arguments)
        draw, state_dict = training._draw, training.state_dict

        def draw_and_raise(generator: torch.Generator) -> Tensor:
            if training.step == self.end - 2:  # workers agree to stop one update later
                signal.raise_signal(signal.SIGTERM)
            return draw(generator)

        def mortal_state() -> dict[str, Any]:
            state = state_dict()
            if self.dies and training.step == 3:
                momentum = state["training"]["filters.momentum"]
                state["training"]["filters.momentum"] = Dying(**vars(momentum))
            return state

        training._draw, training.state_dict = draw_and_raise, mortal_state
        return training


def _return_freed_memory() -> None:
    """At once, and from one heap: else it depends on threads' order how much glibc keeps."""
    libc = ctypes.CDLL(None)
    m_arena_max, m_mmap_threshold = -8, -3
    assert libc.mallopt(m_arena_max, 1) == 1
    assert libc.mallopt(m_mmap_threshold, 1 << 20) == 1


def train(
    comm: Communicator, folder: str, nets: int, end: int, dies: int | None, room_bytes: int
) -> str:
    """Goes on to some update with a checkpoint of each; why it can't, or nothing."""
    _return_freed_memory()
    limit = status_bytes("VmData") + room_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Disturbed.end, Disturbed.dies = end, comm.rank == dies
    recipe = Disturbed(
        pixels=200, data_parallel=nets, steps=TOTAL_STEPS // 3, batch=8, patches=40,
        log_every_steps=1, checkpoint_every_steps=1,
    )  # fmt: skip
    is_begun = any(Path(folder, "checkpoints").glob("step-*"))
    comm.barrier()
    try:
        code = recipe.run(comm, Path(folder), resume=is_begun)
    except RuntimeError as error:
        if comm.size > 1:
            raise
        return str(error)
    assert code == 128 + signal.SIGTERM
    return ""


def trained(
    mesh: tuple[int, int],
    folder: Path,
    end: int,
    dies: int | None = None,
    room_bytes: int = ROOM_BYTES,
) -> list[float] | str:
    """The costs of all updates until one, or why there are none; the mesh is nets x workers."""
    folder.mkdir(exist_ok=True)
    nets, workers = mesh
    options = (str(folder), nets, end, dies, room_bytes)
    why, *_ = run_processes(nets * workers, train, *options, timeout_s=300.0)
    if why:
        return why
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line["loss"] for line in lines}.values())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The costs of an undisturbed run."""
    return trained((2, 2), tmp_path_factory.mktemp("straight"), TOTAL_STEPS)


@pytest.mark.slow
@pytest.mark.process
def test_a_net_larger_than_a_worker_is_refused_by_one(tmp_path):
    """With 1.5 times the room, too."""
    found = trained((1, 1), tmp_path, TOTAL_STEPS, room_bytes=ROOM_BYTES * 3 // 2)
    assert "Cannot allocate memory" in found


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    ("mesh", "dies", "later"),
    [((1, 4), 0, [(1, 2), (1, 4)]), ((2, 2), 1, [(2, 2), (1, 2)])],
    ids=["1x4", "2x2"],
)
def test_a_net_larger_than_a_worker_goes_on_on_other_workers_after_a_kill_while_saving(
    tmp_path, straight, mesh, dies, later
):
    """In the second of three stages, with its momentum; then to the third's end."""
    with pytest.raises(RemoteError, match="it died"):
        trained(mesh, tmp_path, TOTAL_STEPS, dies)
    names = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert max(names) == "step-00000002"
    for next_mesh, end in zip(later, (4, TOTAL_STEPS), strict=True):
        assert trained(next_mesh, tmp_path, end) == pytest.approx(straight[:end], rel=1e-5)
    for one, other in pairwise(straight):  # the updates can be told
        assert abs(one - other) > 1e-4 * one
