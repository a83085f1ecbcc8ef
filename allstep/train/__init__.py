"""From a global batch to a trained model: steps, the loop, evaluation, checkpoints."""

from allstep.train.batch import Batch, steps
from allstep.train.checkpoint import Checkpoints, check_same
from allstep.train.evaluator import Evaluator
from allstep.train.loop import Loop, Training, fit
from allstep.train.metrics import MetricsLog
from allstep.train.options import TrainOptions
from allstep.train.progress import Progress
from allstep.train.report import RunReport
from allstep.train.run import Run
from allstep.train.step import Update
from allstep.train.stop import Interrupts, StopAgreement
from allstep.train.task import Metrics, Stage, Task

__all__ = [
    "Batch",
    "Checkpoints",
    "Evaluator",
    "Interrupts",
    "Loop",
    "Metrics",
    "MetricsLog",
    "Progress",
    "Run",
    "RunReport",
    "Stage",
    "StopAgreement",
    "Task",
    "TrainOptions",
    "Training",
    "Update",
    "check_same",
    "fit",
    "steps",
]
