"""From a global batch to a trained model: steps, the loop, evaluation, checkpoints."""

from allstep.train.batch import Batch, steps
from allstep.train.checkpoint import Checkpoints, check_same
from allstep.train.devices import map_tensors, num_cores
from allstep.train.evaluator import Evaluator
from allstep.train.failures import FAILED, PEER_LOST, run_worker
from allstep.train.loop import Loop, Training, fit
from allstep.train.metrics import MetricsLog
from allstep.train.options import TrainOptions
from allstep.train.precision import Precision
from allstep.train.progress import Progress
from allstep.train.report import RunReport
from allstep.train.run import Run
from allstep.train.step import Update
from allstep.train.stop import Interrupts, StopAgreement
from allstep.train.storage import read_checkpoint, write_checkpoint
from allstep.train.task import Metrics, Stage, Task

__all__ = [
    "FAILED",
    "PEER_LOST",
    "Batch",
    "Checkpoints",
    "Evaluator",
    "Interrupts",
    "Loop",
    "Metrics",
    "MetricsLog",
    "Precision",
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
    "map_tensors",
    "num_cores",
    "read_checkpoint",
    "run_worker",
    "steps",
    "write_checkpoint",
]
