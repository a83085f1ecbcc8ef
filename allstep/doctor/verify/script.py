"""Runs a user's script as a worker, and leaves a record of its first steps."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from allstep.doctor.script import Failure, ScriptRunner
from allstep.doctor.verify.ablation import Factor
from allstep.doctor.verify.record import write_worker
from allstep.doctor.verify.recorder import Recorder

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """What a worker has to do.

    Attributes:
        script, arguments: what to run.
        folder: where records go.
        num_steps: steps to record.
        timeout_s: longest time without a forward or a step.
        without: what to take out.
        axes: name -> length, of the mesh that the script has to make; empty for any, or none.
        shapes: of whole parameters, from the record of another run.
    """

    script: Path
    arguments: list[str]
    folder: Path
    num_steps: int
    timeout_s: float
    without: list[Factor]
    axes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)


def record_path(folder: Path, rank: int) -> Path:
    """Where a worker's record goes."""
    return folder / f"rank-{rank}.json"


def record_script(request: RecordRequest, rank: int, size: int) -> bool:
    """Runs the script until it has made enough steps, or ends; returns whether all went well.

    All random states begin alike, so that scripts that don't seed can be compared; and workers
    that shuffle the whole of the data, each for itself, are caught with the same samples.
    """

    def report(failure: Failure | None) -> None:
        recorder.record.failure = failure
        write_worker(record_path(request.folder, rank), recorder.record)

    def meet(timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        paths = [record_path(request.folder, other) for other in range(size)]
        while time.monotonic() < deadline_s and not all(path.exists() for path in paths):
            time.sleep(_POLL_S)

    runner = ScriptRunner(request.script, request.arguments, request.timeout_s, report, meet)
    recorder = Recorder(
        rank,
        request.num_steps,
        runner.stop,
        request.without,
        axes=request.axes,
        shapes=request.shapes,
    )
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with torch.compiler.set_stance("force_eager"):  # compiled models as they are written
        return runner.run(recorder) is None
