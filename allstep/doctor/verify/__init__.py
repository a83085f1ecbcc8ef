"""Whether a script trains the same model on any number of workers."""

from allstep.doctor.verify.causes import Cause
from allstep.doctor.verify.compare import (
    Parting,
    divergence,
    largest_difference,
    limit_of,
    total_norm,
)
from allstep.doctor.verify.diagnose import Diagnosis, diagnose
from allstep.doctor.verify.record import Failure, Run, StepRecord, WorkerRecord, read_worker
from allstep.doctor.verify.recorder import Recorder
from allstep.doctor.verify.removal import Suspect
from allstep.doctor.verify.script import Task, record_path, record_script

__all__ = [
    "Cause",
    "Diagnosis",
    "Failure",
    "Parting",
    "Recorder",
    "Run",
    "StepRecord",
    "Suspect",
    "Task",
    "WorkerRecord",
    "diagnose",
    "divergence",
    "largest_difference",
    "limit_of",
    "read_worker",
    "record_path",
    "record_script",
    "total_norm",
]
