"""`allstep advise_worker`: what `advise --measure` starts, once for each worker; not for people."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from allstep.cli.run_folder import data_parallel, recipe_from_plain
from allstep.cli.workers import run_here
from allstep.comm import Communicator
from allstep.doctor import (
    Measurements,
    Training,
    measure,
    measure_policy,
    measure_workload,
    read_measurements,
    sleeping_training,
)
from allstep.plan import POLICIES, Prediction, TrainingSpec, Workload, predict, read_workload

__all__ = [
    "Answer",
    "Question",
    "answer",
    "ask_first",
    "read_answer",
    "run",
    "write_question",
]

_QUESTION, _ANSWER, _MEASUREMENTS = "question.json", "answer.json", "measurements.json"
_PATIENCE_S = 4 * 3600.0  # of workers that wait for the first steps of a script


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained.

    Attributes:
        recipe: as plain data; its compute is real.
        workload: a step of one micro-batch, which the workers sleep through; one of the two.
        global_batch: samples of a step whatever the workers.
    """

    recipe: dict[str, Any] | None = None
    workload: Workload | None = None
    global_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What some workers found.

    Attributes:
        job: with compute as measured on them.
        measurements: of the workers.
        predictions: of every policy, from these alone.
        measured_s: seconds of a step by policy name.
    """

    job: TrainingSpec
    measurements: Measurements
    predictions: Sequence[Prediction]
    measured_s: dict[str, float]


def run(arguments: list[str]) -> int:
    """Runs one worker; rank 0 leaves the answer in the folder."""
    folder, launcher_pid = Path(arguments[0]), int(arguments[1])
    if os.getppid() != launcher_pid:  # it was interrupted before it knew its children
        return 1
    return run_here(lambda comm: _work(comm, folder), launcher_pid)


def write_question(folder: Path, question: Question) -> list[str]:
    """Leaves a question in a folder; returns what makes Python a worker that answers it."""
    (folder / _QUESTION).write_text(_to_text(question), encoding="utf-8")
    return ["-m", "allstep", "advise_worker", str(folder), str(os.getpid())]


def read_answer(folder: Path) -> Answer:
    """What rank 0 has left."""
    table = json.loads((folder / _ANSWER).read_text(encoding="utf-8"))
    job = TrainingSpec(micro=read_workload(table["workload"]), global_batch=table["global_batch"])
    measurements = read_measurements(folder / _MEASUREMENTS)
    return Answer(
        job=job,
        measurements=measurements,
        predictions=_predict(job, measurements),
        measured_s=table["measured_s"],
    )


def _work(comm: Communicator, folder: Path) -> int:
    found = answer(comm, _from_text((folder / _QUESTION).read_text(encoding="utf-8")))
    if comm.rank == 0:
        found.measurements.write(folder / _MEASUREMENTS)
        plain = {
            "workload": asdict(found.job.micro),
            "global_batch": found.job.global_batch,
            "measured_s": found.measured_s,
        }
        (folder / _ANSWER).write_text(json.dumps(plain), encoding="utf-8")
    return 0


def ask_first(comm: Communicator, ask: Callable[[], Question]) -> Question:
    """The question of rank 0, on all workers. Collective.

    A script is run to know it: once, and alone.
    """
    usual_s = comm.timeout_s
    comm.set_timeout(_PATIENCE_S)
    text = comm.broadcast_object(_to_text(ask()) if comm.rank == 0 else None)
    comm.set_timeout(usual_s)
    return _from_text(text)


def _to_text(question: Question) -> str:
    return json.dumps(asdict(question))


def _from_text(text: str) -> Question:
    table = json.loads(text)
    workload = None if table["workload"] is None else read_workload(table["workload"])
    return Question(**{**table, "workload": workload})


def answer(comm: Communicator, question: Question) -> Answer:
    """Measures these workers, predicts every policy from that, and runs each. Collective."""
    make_training, num_samples = _training(comm, question)
    micro = measure_workload(comm, make_training(), num_samples=num_samples)
    job = TrainingSpec(micro=micro, global_batch=question.global_batch)
    measurements = measure(comm)
    predictions = _predict(job, measurements)
    num_micro_batches = job.num_micro_batches(comm.size)
    measured_s: dict[str, float] = {}
    for prediction in predictions:
        name = prediction.policy.name
        if comm.size == 1 and measured_s:  # nothing is exchanged by any of them
            measured_s[name] = next(iter(measured_s.values()))
            continue
        seconds = measure_policy(
            comm, make_training, prediction.policy, num_micro_batches=num_micro_batches
        )
        measured_s[name] = sorted(seconds)[len(seconds) // 2]
    return Answer(
        job=job, measurements=measurements, predictions=predictions, measured_s=measured_s
    )


def _training(comm: Communicator, question: Question) -> tuple[Callable[[], Training], int]:
    if question.recipe is not None:
        from allstep.cli.advise_recipe import recipe_training

        recipe = data_parallel(recipe_from_plain(question.recipe))
        return recipe_training(recipe, comm), recipe.micro_batch
    assert question.workload is not None
    return partial(sleeping_training, question.workload), question.workload.num_samples


def _predict(job: TrainingSpec, measurements: Measurements) -> list[Prediction]:
    cluster = measurements.cluster()
    return predict(job, cluster, POLICIES, [cluster.num_workers])
