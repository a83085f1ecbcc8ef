"""Checkpoints of tensors whose parts lie on workers: nobody ever has a whole one."""

import ctypes
import json
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError, DisagreementError, UsageError
from allstep.nn import AutoencoderStage, DividedTensor, Grid, Layout, StageTraining, Window
from allstep.train import Checkpoints, read_checkpoint
from allstep.train.storage import write_manifest
from tests.helpers.processes import RemoteError, run_processes
from tests.helpers.ranks import run_ranks
from tests.nn.grids import part, values
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


def saved(folder: Path, size: int) -> None:
    """A checkpoint of all tensors, each divided over so many workers."""

    def save(comm: Communicator) -> None:
        whole = {name: divided(x, comm, cut(x.shape, size)) for name, x in WHOLE.items()}
        state = {"step": 3, "of all": torch.ones(2), "nested": [whole, (None, 0.5)]}
        Checkpoints(folder, comm, message_bytes=MESSAGE_BYTES).save(3, state)

    run_ranks(size, save)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_divided_tensors_are_whole_again(tmp_path, size):
    saved(tmp_path, size)
    files = sorted((tmp_path / "step-00000003").glob("*.safetensors"))
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
    del manifest["sha256"], manifest["files"]["tensors-4.safetensors"]
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match="a piece of the tensor nested/0/float is missing"):
        read_checkpoint(folder)
    manifest["files"]["../x.safetensors"] = {}
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json lists \.\./x\.safetensors"):
        read_checkpoint(folder)


# A net that needs 1.5 times the memory that a worker has

NUM_MAPS = 128
WEIGHT_BYTES = 4 * 32 * 32 * NUM_MAPS * 512  # 268 MB
NEEDED_BYTES = 4 * WEIGHT_BYTES  # with momentum, and gradients from encoder and decoder
ROOM_BYTES = NEEDED_BYTES * 2 // 3


class Dying(DividedTensor):
    """Its worker is killed when some of its pieces have been stored."""

    def piece(self, rank: int, window: Window) -> Tensor | None:
        own = self.windows[self.comm.rank]
        assert own is not None
        if window.start[0] > own.start[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().piece(rank, window)


class Net:
    """A stage and its momentum."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        grid = Grid(comm)
        self.stage = AutoencoderStage(
            grid, grid.split((39, 39)), 8, 8, 1, (NUM_MAPS, 1, 1),
            pool_size=2, pool_stride=2, norm_size=3, seed=0,
        )  # fmt: skip
        self.training = StageTraining(torch.nn.Sequential(), self.stage, lr=1e-3)
        self.costs: list[float] = []

    def step(self) -> None:
        x = part(values(1, 8, 39, 39).float(), self.stage.in_layout.windows[self._comm.rank])
        self.costs.append(float(self._comm.all_reduce(self.training.step(x))))

    def state_dict(self) -> dict[str, Any]:
        return {"costs": self.costs, "training": self.training.state()}

    def local_state(self, state: Any) -> dict[str, Any]:
        tensors = {name: self.stage.local_part(x) for name, x in state["training"].items()}
        return {**state, "training": tensors}

    def load_state_dict(self, state: Any) -> None:
        self.costs = state["costs"]
        self.training.load_state(state["training"])


def _return_freed_memory() -> None:
    """At once, and from one heap: else it depends on threads' order how much glibc keeps."""
    libc = ctypes.CDLL(None)
    m_arena_max, m_mmap_threshold = -8, -3
    assert libc.mallopt(m_arena_max, 1) == 1
    assert libc.mallopt(m_mmap_threshold, 1 << 20) == 1


def train(comm: Communicator, folder: str, num_steps: int, dies: int | None) -> list[float] | str:
    """Goes on to some step with a checkpoint of each; the costs, or why it can't."""
    _return_freed_memory()
    limit = status_bytes("VmData") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        net = Net(comm)
        checkpoints = Checkpoints(folder, comm, message_bytes=4 << 20)
        checkpoints.restore(net, missing_ok=True)
        while len(net.costs) < num_steps:
            net.step()
            state = net.state_dict()
            if comm.rank == dies:
                momentum = state["training"]["filters.momentum"]
                state["training"]["filters.momentum"] = Dying(**vars(momentum))
            checkpoints.save(len(net.costs), state)
    except RuntimeError as error:
        if comm.size > 1:
            raise
        return str(error)
    return net.costs


def trained(size: int, folder: Path, num_steps: int, dies: int | None = None) -> list[float]:
    return run_processes(size, train, str(folder), num_steps, dies, timeout_s=300.0)[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The costs of four steps on four workers."""
    return trained(4, tmp_path_factory.mktemp("straight"), 4)


@pytest.mark.slow
@pytest.mark.process
def test_a_net_larger_than_a_worker_is_refused_by_one(tmp_path):
    assert "Cannot allocate memory" in trained(1, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("dies", [0, 2])
def test_a_net_larger_than_a_worker_goes_on_on_other_workers_after_a_kill_while_saving(
    tmp_path, straight, dies
):
    assert trained(4, tmp_path, 2) == straight[:2]
    with pytest.raises(RemoteError, match="it died"):
        trained(4, tmp_path, 3, dies)
    assert not (tmp_path / "step-00000003").exists()
    assert trained(2, tmp_path, 3) == pytest.approx(straight[:3], rel=1e-5)
    assert abs(straight[2] - straight[1]) > 1e-4 * straight[2]  # the step can be told
    assert trained(4, tmp_path, 4) == pytest.approx(straight, rel=1e-5)
