"""What a step of a user's own script takes: the script is run for a few steps and watched."""

import json
import statistics
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep.doctor.script_watch import ScriptWatch
from allstep.doctor.user_script import frames_of_user, run_as_main
from allstep.doctor.verify.watchdog import Watchdog
from allstep.doctor.workload import element_bytes_of, make_workload
from allstep.errors import UsageError
from allstep.plan import TrainingSpec, Workload, read_workload

__all__ = ["NUM_UPDATES", "ScriptProfile", "profile_script", "read_profile"]

_NUM_WARM, _NUM_TIMED = 3, 7
NUM_UPDATES = 1 + _NUM_WARM + _NUM_TIMED  # the first is where the first whole step begins


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """What a script does as a lone worker.

    Attributes:
        micro: a step of one of its micro-batches.
        num_micro_batches: of a step.
        global_batch: samples of a step whatever the workers; None if each takes as many.
    """

    micro: Workload
    num_micro_batches: int
    global_batch: int | None

    def job(self, global_batch: int | None = None) -> TrainingSpec:
        """The script for the planner, with another global batch if one is given.

        >>> micro = Workload(num_params=1, forward_s=1.0, backward_s=2.0, num_samples=16)
        >>> profile = ScriptProfile(micro=micro, num_micro_batches=2, global_batch=None)
        >>> profile.job().batch(3), profile.job(64).batch(3)
        (96, 64)
        """
        fixed = self.global_batch if global_batch is None else global_batch
        if fixed is not None:
            return TrainingSpec(micro=self.micro, global_batch=fixed)
        single_worker_batch = self.num_micro_batches * self.micro.num_samples
        return TrainingSpec(
            micro=TrainingSpec(micro=self.micro, global_batch=single_worker_batch).workload(1)
        )


class _EnoughSteps(BaseException):
    """Leaves the script."""


def profile_script(script: Path, arguments: Sequence[str], result: Path, timeout_s: float) -> None:
    """Runs a script in this process until enough is known of it. See [Note: watched script].

    Args:
        script: any that calls `allstep.attach`; what it raises is passed on.
        arguments: the script's own.
        result: the file that `read_profile` reads.
        timeout_s: after so long without a forward or a step this process ends.
    """

    def leave() -> None:
        if not result.exists():
            _write(result, watch)
            watchdog.expect_end()
        raise _EnoughSteps

    def give_up(place: traceback.StackSummary) -> None:
        text = "".join(frames_of_user(place, script).format()).rstrip()
        _write_mistake(
            result,
            f"made no forward and no step for {timeout_s:g} s. It was at\n{text}\n"
            "Give it more time with `--timeout-s`, if that is what it needs.",
        )

    watch = ScriptWatch(_NUM_WARM + _NUM_TIMED, leave)
    watchdog = Watchdog(lambda: watch.num_events, timeout_s, give_up)
    watchdog.start()
    try:
        run_as_main(script, arguments, watch.watch)
        _write(result, watch)
    except _EnoughSteps:
        pass
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        _write(result, watch)
    finally:
        watchdog.stop()
        watch.close()


def read_profile(result: Path, script: Path) -> ScriptProfile:
    """What `profile_script` has left.

    Raises:
        UsageError: if nothing can be said about the script.
    """
    table = json.loads(result.read_text(encoding="utf-8"))
    if "mistake" in table:
        raise UsageError(f"`script` (={script}) {table['mistake']}")
    return ScriptProfile(**{**table, "micro": read_workload(table["micro"])})


def _write(result: Path, watch: ScriptWatch) -> None:
    mistake = _mistake(watch)
    if mistake is None:
        _write_table(result, asdict(_profile(watch)))
    else:
        _write_mistake(result, mistake)


def _profile(watch: ScriptWatch) -> ScriptProfile:
    """Of steps with as many micro-batches as most: an epoch's last may have fewer."""
    timed = watch.steps[_NUM_WARM:]
    num_micro_batches = statistics.mode(len(step.num_samples) for step in timed)
    usual = [step for step in timed if len(step.num_samples) == num_micro_batches]
    micro_batch = statistics.median_high(n for step in usual for n in step.num_samples)
    global_batch = watch.global_batch
    if watch.is_cut:
        global_batch = num_micro_batches * micro_batch
    elif global_batch is not None and (global_batch == micro_batch or global_batch % micro_batch):
        global_batch = None  # one micro-batch tells nothing of how it would be cut
    return ScriptProfile(
        micro=make_workload(
            [step.timed for step in usual], micro_batch, element_bytes_of(watch.parameters)
        ),
        num_micro_batches=num_micro_batches,
        global_batch=global_batch,
    )


def _mistake(watch: ScriptWatch) -> str | None:
    """Why there is nothing to say about the script."""
    if not watch.is_attached:
        return (
            "never calls `allstep.attach`: attach the model, or describe it by `--params` and"
            " `--step-ms` instead."
        )
    if watch.num_updates and not watch.num_trained:
        return (
            f"made {watch.num_updates} steps, but no backward pass of the attached model was seen:"
            " call the model itself, `model(x)`, with tensors among what it returns (in tuples,"
            " dicts or dataclasses, too), and go backward from there."
        )
    if len(watch.steps) < _NUM_WARM + _NUM_TIMED:
        return (
            f"ended after {watch.num_trained} steps of the attached model's optimizer; let it"
            f" make at least {NUM_UPDATES}."
        )
    return None


def _write_mistake(result: Path, text: str) -> None:
    _write_table(result, {"mistake": text})


def _write_table(result: Path, table: Mapping[str, Any]) -> None:
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps(table), encoding="utf-8")
    draft.replace(result)
