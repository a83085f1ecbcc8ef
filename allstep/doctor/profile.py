"""Profiles a step of a user's script, which is run for a few steps."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from allstep.doctor.profiler import Profiler
from allstep.doctor.script import Failure, ScriptRunner
from allstep.doctor.workload import element_bytes_of, make_workload
from allstep.errors import UsageError
from allstep.files import from_plain, read_json, write_json
from allstep.plan import TrainingSpec, Workload

_NUM_WARM, _NUM_TIMED = 3, 7
NUM_UPDATES = 1 + _NUM_WARM + _NUM_TIMED  # the first is where the first whole step begins


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """The profile of a script on a single worker.

    Attributes:
        micro: a step of one of its micro-batches.
        num_micro_batches: of a step.
        global_batch: samples of a step whatever the workers; None if each takes as many.
    """

    micro: Workload
    num_micro_batches: int
    global_batch: int | None

    def spec(self, global_batch: int | None = None) -> TrainingSpec:
        """The script's workload for the planner, with another global batch if one is given.

        >>> micro = Workload(num_params=1, forward_s=1.0, backward_s=2.0, num_samples=16)
        >>> profile = ScriptProfile(micro=micro, num_micro_batches=2, global_batch=None)
        >>> profile.spec().batch(3), profile.spec(64).batch(3)
        (96, 64)
        """
        fixed = self.global_batch if global_batch is None else global_batch
        if fixed is not None:
            return TrainingSpec(micro=self.micro, global_batch=fixed)
        own = TrainingSpec(
            micro=self.micro, global_batch=self.num_micro_batches * self.micro.num_samples
        )
        return TrainingSpec(micro=own.workload(1))


def profile_script(script: Path, arguments: Sequence[str], result: Path, timeout_s: float) -> None:
    """Runs a script in this process until its profile is complete. [Note: profiled script]

    Args:
        script: any that calls `allstep.attach`.
        arguments: the script's own.
        result: the file that `read_profile` reads.
        timeout_s: after so long without a forward or a step this process ends.
    """

    def report(failure: Failure | None) -> None:
        mistake = _mistake(profiler) if failure is None else failure.words(timeout_s)
        table = asdict(_profile(profiler)) if mistake is None else {"mistake": mistake}
        write_json(result, table)

    runner = ScriptRunner(script, arguments, timeout_s, report)
    profiler = Profiler(_NUM_WARM + _NUM_TIMED, runner.stop)
    runner.run(profiler)


def read_profile(result: Path, script: Path) -> ScriptProfile:
    """Reads the profile of `profile_script`.

    Raises:
        UsageError: if the script failed, or nothing can be said about it.
    """
    table = read_json(result)
    if "mistake" in table:
        raise UsageError(f"`script` (={script}) {table['mistake']}")
    profile: ScriptProfile = from_plain(ScriptProfile, table)
    return profile


def _profile(profiler: Profiler) -> ScriptProfile:
    """The profile of the steps with the most micro-batches; an epoch's last may have fewer."""
    timed = profiler.steps[_NUM_WARM:]
    num_micro_batches = statistics.mode(len(step.num_samples) for step in timed)
    usual = [step for step in timed if len(step.num_samples) == num_micro_batches]
    micro_batch = statistics.median_high(n for step in usual for n in step.num_samples)
    global_batch = profiler.global_batch
    if profiler.is_cut:
        global_batch = num_micro_batches * micro_batch
    elif global_batch is not None and (global_batch == micro_batch or global_batch % micro_batch):
        global_batch = None  # one micro-batch tells nothing of how it would be cut
    return ScriptProfile(
        micro=make_workload(
            [step.timed for step in usual], micro_batch, element_bytes_of(profiler.parameters)
        ),
        num_micro_batches=num_micro_batches,
        global_batch=global_batch,
    )


def _mistake(profiler: Profiler) -> str | None:
    """The reason why a script that ran has no profile."""
    if not profiler.is_attached:
        return (
            "never calls `allstep.attach`: attach the model, or describe it by `--params` and"
            " `--step-ms` instead."
        )
    if profiler.num_updates and not profiler.num_trained:
        return (
            f"made {profiler.num_updates} steps, but no backward pass of the attached model was"
            " seen: call the model itself, `model(x)`, with tensors among what it returns (in"
            " tuples, dicts or dataclasses, too), and go backward from there."
        )
    if len(profiler.steps) < _NUM_WARM + _NUM_TIMED:
        return (
            f"ended after {profiler.num_trained} steps of the attached model's optimizer; let it"
            f" make at least {NUM_UPDATES}."
        )
    return None
