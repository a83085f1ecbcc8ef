"""A part of bench_gpu.py in processes of its own.

    python benchmarks/gpu_worker.py FILE.json PART DEVICE REPEATS SIZE ROW ...      # as a rank

Writes each row as it is measured, and ends at the first that fails: a GPU may be of no more use to
the process, and ranks be apart. Who has started it starts it again, with the rows that are left.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_models import WORKLOADS
from gpu_parts import (
    FORMATS,
    measure_batch_norm,
    measure_exact,
    measure_format,
    measure_optimizers,
)
from gpu_step import measure_step
from gpu_timing import Setting, first_lines

import allstep
from allstep import Communicator
from allstep.comm import initialise

TIMEOUT_S = 30.0  # of a collective
ROWS: Mapping[str, Sequence[str]] = {
    "step": tuple(WORKLOADS),
    "shared": tuple(WORKLOADS),
    "optim": ("bert_large",),
    "exact": ("fashion", "resnet50"),
    "formats": FORMATS,
    "batch_norm": ("batch_norm",),
}


def measure(part: str, row: str, comm: Communicator, setting: Setting) -> dict[str, Any]:
    """A row of a part."""
    if part in ("step", "shared"):
        return measure_step(row, comm, setting)
    if part == "optim":
        return measure_optimizers(setting)
    if part == "exact":
        return measure_exact(row, comm, setting)
    if part == "formats":
        return measure_format(row, setting)
    return measure_batch_norm(comm, setting)


@contextmanager
def communicator(setting: Setting) -> Iterator[Communicator]:
    """All ranks on one GPU, over NCCL: to each of them the others seem to be on other hosts."""
    os.environ["NCCL_HOSTID"] = f"host of rank {os.environ['RANK']}"
    with (
        mock.patch.object(initialise, "check_own_devices"),
        allstep.init(device=setting.torch_device, timeout_s=TIMEOUT_S) as comm,
    ):
        yield comm


def main() -> None:
    file, part, device, repeats, size, *rows = sys.argv[1:]
    setting = Setting(device, int(repeats), size == "tiny")
    setting.take_effect()
    with communicator(setting) as comm:
        found: dict[str, Any] = {}
        for row in rows:
            try:
                found[row] = measure(part, row, comm, setting)
            except Exception as error:
                found[row] = first_failure(Path(file), row, error)
            if comm.rank == 0 or "error" in found[row]:
                write(Path(file), found)
            if "error" in found[row]:
                os._exit(0)  # without waiting for other ranks, or for the device
            _free_memory(setting)
        comm.barrier()


def first_failure(file: Path, row: str, error: Exception) -> dict[str, Any]:
    """That of another rank, if it was earlier: this one has then waited for it in vain."""
    earlier = json.loads(file.read_text()).get(row) if file.exists() else None
    return earlier or first_lines(error)


def write(file: Path, found: dict[str, Any]) -> None:
    """At once, as the process may be killed at any moment."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(file)


def _free_memory(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
