"""Measures this host's GPUs and prints the readings. [Note: GPUs in a process of their own]

python -m allstep.cli.measure_gpus
"""

import json
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from allstep.device import (
    default_device,
    device_id,
    is_accelerator,
    nccl_version,
    num_devices,
    synchronize,
)

_SIDE = 2048
_LARGEST = 8  # sums of 2048 products of such whole numbers are exact in float32, in any order
_REPEATS = 20
_COPY_ELEMENTS = 1 << 22
_PRODUCT_S, _COPY_S = 60.0, 20.0  # after which a GPU is taken to be stuck
_REASONS = {  # bits of NVML, why clocks are low; not that a GPU is idle or at its power's cap
    0x08: "hardware",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

Say = Callable[..., None]


def measure(devices: Sequence[torch.device], say: Say) -> None:
    """Measures a matrix product on each GPU, and a copy between each pair.

    Args:
        devices: of this host.
        say: takes `doing` and `limit_s` before something that may not end, and what was found.
    """
    left, right = _factors()
    expected = left @ right
    for index, device in enumerate(devices):
        say(doing=f"a matrix product on GPU {index}", limit_s=_PRODUCT_S)
        factors = left.to(device), right.to(device)
        time_s, num_wrong = measure_product(*factors, expected.to(device))
        say(gpus={"time_s": time_s, "num_wrong": num_wrong, **_own_words(device)})
    for one, other in permutations(range(len(devices)), 2):
        say(doing=f"a copy from GPU {one} to GPU {other}", limit_s=_COPY_S)
        arrived = what_arrives(devices[one], devices[other])
        if arrived:
            say(wrong_copies=[one, other, arrived])


def _factors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-_LARGEST, _LARGEST + 1, (2, _SIDE, _SIDE), generator=generator)
    left, right = numbers.float()
    return left, right


def measure_product(left: Tensor, right: Tensor, expected: Tensor) -> tuple[float, int]:
    """The shortest time of a matrix product in seconds, and its number of wrong elements.

    Args:
        left, right: whole numbers, on one device; [side, side].
        expected: their product.
    """
    times_s = []
    num_wrong = torch.zeros((), dtype=torch.int64, device=left.device)
    for _ in range(_REPEATS):
        synchronize(left.device)
        start_s = time.perf_counter()
        product = left @ right
        synchronize(left.device)
        times_s.append(time.perf_counter() - start_s)
        num_wrong += (product != expected).sum()
    return min(times_s), int(num_wrong)


def what_arrives(source: torch.device, target: torch.device) -> str:
    """Copies numbers from a device to another; returns an error message, empty if they arrive."""
    sent = torch.arange(1, _COPY_ELEMENTS + 1, dtype=torch.int32, device=source)
    synchronize(source)
    copy = sent.to(target)
    synchronize(target)
    arrived = copy.cpu()
    if torch.equal(arrived, sent.cpu()):
        return ""
    return "wrong numbers" if arrived.any() else "zeros"


def _own_words(device: torch.device) -> dict[str, Any]:
    """A GPU's type, and its driver's counters."""
    if not is_accelerator(device):
        return {"kind": device.type} | read_counters("")
    kind = torch.get_device_module(device).get_device_properties(device).name
    return {"kind": kind} | read_counters(f"GPU-{device_id(device)}")


def read_counters(uuid: str) -> dict[str, Any]:
    """The counters of NVIDIA's driver for a GPU; empty where they can't be read.

    Args:
        uuid: of the GPU, as the driver has it.

    Returns:
        slowed_by: why its clocks are low, in words; num_memory_errors: since the last reset that
        could not be corrected; has_bad_rows: whether its memory waits for a reset or a repair.
    """
    found: dict[str, Any] = {"slowed_by": [], "num_memory_errors": 0, "has_bad_rows": False}
    nvml = _nvml()
    if nvml is None:
        return found
    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return found
    bits = _asked(nvml, 0, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    *_, pending, failed = _asked(nvml, (0, 0, 0, 0), nvml.nvmlDeviceGetRemappedRows, gpu)
    return {
        "slowed_by": [words for bit, words in _REASONS.items() if bits & bit],
        "num_memory_errors": _asked(nvml, 0, nvml.nvmlDeviceGetTotalEccErrors, gpu, *kinds),
        "has_bad_rows": bool(pending or failed),
    }


def _asked(nvml: Any, otherwise: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; `otherwise` for questions that the GPU does not support."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return otherwise


def _nvml() -> Any:
    """NVIDIA's library, initialised; None where it is not installed or finds no driver."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def main() -> None:
    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    say(doing="the start of CUDA")
    nvml = _nvml()
    if nvml is not None:
        say(driver=nvml.nvmlSystemGetDriverVersion())
    elif torch.version.cuda:
        say(missing="the driver's counters of heat and memory errors: pip install 'allstep[gpus]'")
    say(nccl=nccl_version())
    kind, count = default_device(), num_devices()
    if not count:
        say(missing=f"the GPUs: torch {torch.__version__} is built without them or finds none")
    measure([torch.device(kind.type, index) for index in range(count)], say)
    say(doing="end")


if __name__ == "__main__":
    main()
