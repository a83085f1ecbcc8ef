"""From a global batch to a trained model: steps, the loop, evaluation, checkpoints."""

from allstep.train.agreement import StopAgreement
from allstep.train.batch import Batch, steps
from allstep.train.checkpoint import Checkpoints
from allstep.train.evaluator import Evaluator
from allstep.train.interrupts import Interrupts
from allstep.train.loop import fit
from allstep.train.metrics import MetricsLog
from allstep.train.options import TrainOptions
from allstep.train.progress import Progress
from allstep.train.report import RunReport
from allstep.train.task import Metrics, Stage, Task

__all__ = [
    "Batch",
    "Checkpoints",
    "Evaluator",
    "Interrupts",
    "Metrics",
    "MetricsLog",
    "Progress",
    "RunReport",
    "Stage",
    "StopAgreement",
    "Task",
    "TrainOptions",
    "fit",
    "steps",
]
