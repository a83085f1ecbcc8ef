"""Whether a script trains the same model on any number of workers."""

from allstep.doctor.script import Failure
from allstep.doctor.verify.ablation import Factor
from allstep.doctor.verify.causes import Cause
from allstep.doctor.verify.compare import (
    Divergence,
    largest_difference,
    limit_of,
    nonfinite_step,
    total_norm,
)
from allstep.doctor.verify.diagnose import Diagnosis, diagnose
from allstep.doctor.verify.record import RunRecord, StepRecord, WorkerRecord, read_worker
from allstep.doctor.verify.recorder import Recorder
from allstep.doctor.verify.script import RecordRequest, record_path, record_script

__all__ = [
    "Cause",
    "Diagnosis",
    "Failure",
    "Divergence",
    "Recorder",
    "RunRecord",
    "StepRecord",
    "Factor",
    "RecordRequest",
    "WorkerRecord",
    "diagnose",
    "nonfinite_step",
    "largest_difference",
    "limit_of",
    "read_worker",
    "record_path",
    "record_script",
    "total_norm",
]
