"""What the doctor measures of GPUs: on CPUs as devices, with a driver that is played, or stuck."""

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from allstep.cli import measure_gpus
from allstep.cli.measure_gpus import measure, measure_product, read_counters, what_arrives
from allstep.cli.probe_gpus import probe_gpus

CPUS = [torch.device("cpu"), torch.device("cpu")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpus, "_SIDE", 64)
    monkeypatch.setattr(measure_gpus, "_COPY_ELEMENTS", 1000)


def said_by_measure() -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    measure(CPUS, lambda **what: said.append(what))
    return said


def test_each_device_and_each_copy_is_announced_and_sound() -> None:
    said = said_by_measure()
    assert [what["doing"] for what in said if "doing" in what] == [
        "a matrix product on GPU 0",
        "a matrix product on GPU 1",
        "a copy from GPU 0 to GPU 1",
        "a copy from GPU 1 to GPU 0",
    ]
    gpus = [what["gpus"] for what in said if "gpus" in what]
    assert [(gpu["kind"], gpu["num_wrong"]) for gpu in gpus] == [("cpu", 0)] * 2
    assert not [what for what in said if "wrong_copies" in what]
    assert json.dumps(said)


def test_a_product_is_exact_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers, in any order and in numbers of 24 bits."""
    monkeypatch.setattr(measure_gpus, "_SIDE", 2048)
    left, right = measure_gpus._factors()
    expected = (left[:8].double() @ right.double()).float()
    assert torch.equal((left @ right)[:8], expected)
    assert expected.abs().max() < 2**24


def test_wrong_elements_are_counted() -> None:
    left, right = measure_gpus._factors()
    expected = left @ right
    expected[3, 4] += 1
    _, num_wrong = measure_product(left, right, expected)
    assert num_wrong == measure_gpus._REPEATS


@pytest.mark.parametrize(("factor", "arrives"), [(1, ""), (0, "zeros"), (2, "wrong numbers")])
def test_what_arrives_of_a_copy(factor: int, arrives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda self, *where: real(self, *where) * factor)
    assert what_arrives(*CPUS) == arrives


class PlayedError(Exception):
    """What NVML raises for what a GPU doesn't know."""


def played_nvml(reasons: int, errors: int, rows: tuple[int, int, int, int] | None) -> Any:
    """NVIDIA's library, with one GPU."""

    def remapped_rows(gpu: str) -> tuple[int, int, int, int]:
        if rows is None:
            raise PlayedError
        return rows

    def handle(uuid: str) -> str:
        if uuid != "GPU-1":
            raise PlayedError
        return uuid

    nvml = types.ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=PlayedError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: reasons,
        nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: errors,
        nvmlDeviceGetRemappedRows=remapped_rows,
    )
    return nvml


@pytest.mark.parametrize(
    ("reasons", "errors", "rows", "slowed_by", "has_bad_rows"),
    [
        (0x1 | 0x4, 0, (3, 0, 0, 0), [], False),  # idle, at its power's cap; rows replaced well
        (0x40 | 0x8, 0, None, ["hardware", "heat (hardware)"], False),
        (0x80, 7, (0, 1, 1, 0), ["power brake"], True),
        (0x20, 0, (0, 1, 0, 1), ["heat (software)"], True),
    ],
)
def test_what_the_driver_counts(
    reasons: int,
    errors: int,
    rows: tuple[int, int, int, int] | None,
    slowed_by: list[str],
    has_bad_rows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", played_nvml(reasons, errors, rows))
    assert read_counters("GPU-1") == {
        "slowed_by": slowed_by,
        "num_memory_errors": errors,
        "has_bad_rows": has_bad_rows,
    }
    unknown = read_counters("GPU-2")
    assert unknown == {"slowed_by": [], "num_memory_errors": 0, "has_bad_rows": False}


def test_the_real_library_has_what_is_asked_of_it() -> None:
    real = pytest.importorskip("pynvml")
    assert all(hasattr(real, name) for name in vars(played_nvml(0, 0, None)) if name[0] != "_")


def lines(*said: dict[str, Any]) -> Iterator[str]:
    yield from ("echo 'a warning'", *(f"echo '{json.dumps(what)}'" for what in said))


FIRST = {"doing": "a matrix product on GPU 0", "limit_s": 60}
STUCK = {"doing": "a copy from GPU 0 to GPU 1", "limit_s": 0.2}


def test_a_copy_that_never_ends_is_named() -> None:
    script = "; ".join([*lines(FIRST, {"gpus": {"time_s": 1}}, STUCK), "exec sleep 1000"])
    found = probe_gpus(["sh", "-c", script])
    assert found["stuck"] == "a copy from GPU 0 to GPU 1"
    assert found["gpus"] == [{"time_s": 1}]


def test_a_measurement_that_fails_is_told_with_its_last_words() -> None:
    script = "; ".join([*lines(FIRST), "echo 'CUDA error: unknown' >&2", "exit 1"])
    found = probe_gpus(["sh", "-c", script])
    assert found["error"] == "a matrix product on GPU 0: CUDA error: unknown"
    assert not found["stuck"]


@pytest.mark.process
def test_a_host_without_gpus_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    found = probe_gpus()
    assert found["missing"].startswith("the GPUs: torch")
    assert (found["gpus"], found["stuck"], found["error"]) == ([], "", "")


@pytest.mark.gpu
def test_gpus_of_this_host_are_sound() -> None:
    found = probe_gpus()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert all(gpu["num_wrong"] == 0 for gpu in found["gpus"])
    assert (found["wrong_copies"], found["stuck"], found["error"]) == ([], "", "")
