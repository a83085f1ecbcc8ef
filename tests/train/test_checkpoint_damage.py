"""Whatever stands where a checkpoint should be: the older one is used, with a warning, at once."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.train.checkpoint import Checkpoints
from allstep.train.storage import read_checkpoint, verify, write_checkpoint, write_manifest
from tests.helpers.compare import assert_identical
from tests.helpers.ranks import run_ranks

MANIFEST, STATE, TENSORS = "manifest.json", "state.msgpack", "tensors.safetensors"
Damage = Callable[[Path], object]


def with_manifest(**changes: Any) -> Damage:
    """A manifest whose checksum is right and whose contents are not."""
    return lambda folder: write_manifest(folder, without_seal(folder) | changes)


def without(key: str) -> Damage:
    return lambda folder: write_manifest(
        folder, {k: v for k, v in without_seal(folder).items() if k != key}
    )


def without_seal(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    return manifest


def with_contents(name: str, data: bytes) -> Damage:
    """A file whose checksum is right and whose contents are not."""

    def damage(folder: Path) -> None:
        manifest = without_seal(folder)
        (folder / name).write_bytes(data)
        digest = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write_manifest(folder, manifest | {"files": manifest["files"] | {name: digest}})

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def tensors_file(header: Any, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def instead_of_the_folder(make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        make(folder)

    return damage


DEEP = 100_000
DAMAGES: dict[str, Damage] = {
    "deep JSON": lambda f: (f / MANIFEST).write_text("[" * DEEP + "]" * DEEP),
    "deep JSON object": lambda f: (f / MANIFEST).write_text('{"a":' * DEEP + "1" + "}" * DEEP),
    "JSON list": lambda f: (f / MANIFEST).write_text("[1]"),
    "huge number": lambda f: (f / MANIFEST).write_text("9" * 5000),
    "no UTF-8": lambda f: (f / MANIFEST).write_bytes(b"\xff{"),
    "endless manifest": lambda f: os.truncate(f / MANIFEST, 1 << 40),
    "files is a list": with_manifest(files=[TENSORS, STATE]),
    "files is a text": with_manifest(files=f"{TENSORS} {STATE}"),
    "files is null": with_manifest(files=None),
    "a file is a number": with_manifest(files={TENSORS: 1, STATE: 2}),
    "a size is a text": with_manifest(files={TENSORS: {"size_bytes": "boo"}, STATE: {}}),
    "step boo": with_manifest(step="boo"),
    "step nan": with_manifest(step=float("nan")),
    "step inf": with_manifest(step=float("inf")),
    "step true": with_manifest(step=True),
    "step null": with_manifest(step=None),
    "step -1": with_manifest(step=-1),
    "step with a fraction": with_manifest(step=20.0),
    "huge step": with_manifest(step=10**400),
    "another step": with_manifest(step=2),
    "no step": without("step"),
    "no format": without("format"),
    "no files": without("files"),
    **{
        f"{name} is {what}": replaced(name, make)
        for name in (MANIFEST, STATE, TENSORS)
        for what, make in {
            "a pipe": os.mkfifo,
            "a folder": Path.mkdir,
            "a link to itself": link_to_itself,
            "a link to nothing": lambda path: path.symlink_to("nothing"),
            "endless": lambda path: path.symlink_to("/dev/zero"),
        }.items()
    },
    "a file": instead_of_the_folder(lambda f: f.write_text("boo")),
    "a pipe": instead_of_the_folder(os.mkfifo),
    "a link to itself": instead_of_the_folder(link_to_itself),
    "a link to nothing": instead_of_the_folder(lambda f: f.symlink_to("nothing")),
    "empty state": with_contents(STATE, b""),
    "deep state": with_contents(STATE, b"\x91" * DEEP + b"\x01"),
    "state with an endless list": with_contents(STATE, b"\xdd\xff\xff\xff\xff"),
    "state with a list for a key": with_contents(STATE, b"\x81\x90\x01"),
    "state of two values": with_contents(STATE, b"\x01\x01"),
    "state of an unknown type": with_contents(STATE, msgpack.packb(msgpack.ExtType(99, b"a"))),
    "state with a tensor of no dtype": with_contents(
        STATE, msgpack.packb(msgpack.ExtType(10, msgpack.packb("x|boo")))
    ),
    "empty tensors": with_contents(TENSORS, b""),
    "huge header": with_contents(TENSORS, b"\xff" * 8),
    "deep header": with_contents(TENSORS, tensors_file(b"[" * 5000 + b"]" * 5000)),
    "huge shape": with_contents(
        TENSORS,
        tensors_file({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, b"1234"),
    ),
    "another tensor": with_contents(
        TENSORS,
        tensors_file({"y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    ),
}


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, Communicator.single_process(), keep=2)
    for step in steps:
        checkpoints.save(step, {"x": torch.full((2,), float(step))})
    return checkpoints


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_older_checkpoint_is_used_and_the_damaged_one_goes(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, 10, 20).path(20)
    DAMAGES[damage](folder)
    with caplog.at_level(logging.WARNING):
        checkpoints = saved(tmp_path)
        loaded = checkpoints.load_latest()
    assert loaded is not None
    assert loaded[0] == 10
    (record,) = caplog.records
    assert record.getMessage().startswith("step-00000020: ")
    assert record.getMessage().endswith("; using step-00000010")
    assert len(record.getMessage()) < 1000
    checkpoints.save(20, {"x": torch.ones(2)})
    checkpoints.save(30, {"x": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("name", ["step-00000099", "step-" + "9" * 200])
def test_a_checkpoint_under_another_step_is_not_used(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved(tmp_path, 10).path(10), tmp_path / name)
    with caplog.at_level(logging.WARNING):
        loaded = saved(tmp_path).load_latest()
    assert loaded is not None
    assert loaded[0] == 10
    assert caplog.messages == [f"{name}: holds step 10; using step-00000010"]


@pytest.mark.parametrize("name", ["step-000000010", "step-١٢٣٤٥٦٧٨", "step-00000011.bak"])
def test_a_folder_that_is_hardly_named_like_a_checkpoint_is_none(name: str, tmp_path: Path) -> None:
    shutil.copytree(saved(tmp_path, 10).path(10), tmp_path / name)
    assert saved(tmp_path).saved_steps() == [10]
    assert saved(tmp_path, 20, 30).saved_steps() == [30, 20]
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("state", [1, {}, {"model": 3}, [{"model": {}}], None])
def test_a_state_of_another_form_is_refused_by_name(state: Any, tmp_path: Path) -> None:
    class Training:
        def state_dict(self) -> dict[str, Any]:
            return {"model": {"step": 1}}

        def load_state_dict(self, state: Any) -> None:
            assert state["model"]["step"] == 1

    def restore(comm: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints.save(5, state)
        with pytest.raises(CheckpointError, match=r"step-00000005 does not fit .*Error"):
            checkpoints.restore(Training())

    run_ranks(2, restore)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.float8_e8m0fnu])
def test_a_dtype_that_safetensors_lacks_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.arange(1.0, 7.0).view(2, 3).to(dtype)
    name = str(dtype).removeprefix("torch.")
    state = {
        "x": x,
        "scalar": x[0, 1],
        "transposed": x.t(),
        "empty": x[:0],
        f"x|{name}": torch.ones(2),
        "x|": torch.zeros(1),
    }
    write_checkpoint(tmp_path / "c", state)
    found = read_checkpoint(tmp_path / "c")
    for key, value in state.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert torch.equal(
            found[key].contiguous().view(-1).view(torch.uint8),
            value.contiguous().view(-1).view(torch.uint8),
        )


def test_a_conjugate_complex128_is_stored_with_its_values(tmp_path: Path) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    write_checkpoint(tmp_path / "c", {"x": x.conj(), "imag": x.conj().imag})
    assert_identical(read_checkpoint(tmp_path / "c")["x"], x.conj().resolve_conj())
    assert_identical(read_checkpoint(tmp_path / "c")["imag"], -x.imag)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    x = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UsageError, match=r"qint8 on cpu at `m`.*dequantize"):
        write_checkpoint(tmp_path / "c", {"m": x})
    assert verify(saved(tmp_path, 1).path(1))["step"] == 1
