"""Runs a user's script as a worker, and leaves a record of its first steps."""

import functools
import random
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allstep.doctor.user_script import Attach, frames_of_script, frames_of_user, run_as_main
from allstep.doctor.verify.ablation import Ablation, Factor
from allstep.doctor.verify.record import Failure, write_worker
from allstep.doctor.verify.recorder import Recorder
from allstep.doctor.verify.watchdog import Watchdog
from allstep.errors import CommunicationError, DisagreementError
from allstep.exchange import Exchange

__all__ = ["RecordRequest", "record_path", "record_script"]

_MEETING_S = 60.0
_STUCK_S = 5.0
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
    """

    script: Path
    arguments: list[str]
    folder: Path
    num_steps: int
    timeout_s: float
    without: list[Factor]


class _EnoughSteps(BaseException):
    """Leaves the script."""


def record_path(folder: Path, rank: int) -> Path:
    """Where a worker's record goes."""
    return folder / f"rank-{rank}.json"


def record_script(task: RecordRequest, rank: int, size: int) -> bool:
    """Runs the script until it has made enough steps, or ends; returns whether all went well.

    All random states begin alike, so that scripts that don't seed can be compared; and workers
    that shuffle the whole of the data, each for itself, are caught with the same samples.
    """
    path = record_path(task.folder, rank)

    def leave() -> None:
        if not path.exists():
            write_worker(path, recorder.record)
            watchdog.expect_end()
            _meet(task.folder, size, _MEETING_S)
        raise _EnoughSteps

    def give_up(place: traceback.StackSummary) -> None:
        text = "".join(frames_of_user(place, task.script).format())
        recorder.record.failure = Failure("timeout", text, True, time.time())
        write_worker(path, recorder.record)
        _meet(task.folder, size, _STUCK_S)  # others may be stuck elsewhere

    recorder = Recorder(rank, task.num_steps, leave)
    watchdog = Watchdog(lambda: recorder.num_events, task.timeout_s, give_up)
    ablation = Ablation(task.without, recorder.record)
    _seed(0)
    watchdog.start()
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled models as they are written
            run_as_main(
                task.script, task.arguments, lambda attach: _recorded(attach, recorder, ablation)
            )
    except _EnoughSteps:
        return True
    except BaseException as error:
        recorder.record.failure = _failure(error, task.script)
    finally:
        watchdog.stop()
        ablation.close()
        recorder.close()
    if not path.exists():
        write_worker(path, recorder.record)
    return recorder.record.failure is None


def _recorded(attach: Attach, recorder: Recorder, ablation: Ablation) -> Attach:
    """`allstep.attach`, which tells the recorder."""

    @functools.wraps(attach)
    def recorded(model: Any, comm: Any, policy: Any = None, **options: Any) -> Exchange:
        exchange: Exchange = attach(model, comm, ablation.policy(policy), **options)
        ablation.apply(exchange)
        recorder.watch(exchange)
        return exchange

    return recorded


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _meet(folder: Path, size: int, timeout_s: float) -> None:
    """Waits until all workers have written their records, and need this one no more."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if all(record_path(folder, rank).exists() for rank in range(size)):
            return
        time.sleep(_POLL_S)


def _failure(error: BaseException, script: Path) -> Failure | None:
    """What ended the script; None if it ended by itself."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        return Failure("exit", str(error.code), True, time.time())
    is_own = isinstance(error, DisagreementError) or not isinstance(error, CommunicationError)
    return Failure("error", _traceback(error, script), is_own, time.time())


def _traceback(error: BaseException, script: Path) -> str:
    """The part of the traceback that is the script's."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = frames_of_script(told.stack, script)
    return "".join(told.format())
