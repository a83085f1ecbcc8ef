"""From a global batch to a trained model: steps, the loop, evaluation, checkpoints.

`__all__` is for users; what is imported under the same name again, for the rooms above.
"""

from allstep.train.auto_checkpoint import AutoCheckpoint
from allstep.train.batch import Batch
from allstep.train.best import BestMetric
from allstep.train.checkpoint import Checkpoints
from allstep.train.devices import map_tensors as map_tensors
from allstep.train.elastic import check_elastic as check_elastic
from allstep.train.elastic_loop import Elastic
from allstep.train.evaluator import Evaluator
from allstep.train.failures import FAILED as FAILED
from allstep.train.failures import PEER_LOST as PEER_LOST
from allstep.train.failures import REPORTED as REPORTED
from allstep.train.failures import run_worker as run_worker
from allstep.train.fit import fit
from allstep.train.fitting import check_same
from allstep.train.fitting import check_same_data as check_same_data
from allstep.train.layer_sharpness import LayerSharpness
from allstep.train.layer_sharpness import density as density
from allstep.train.layer_sharpness import rank_correlation as rank_correlation
from allstep.train.loop import Loop, Training
from allstep.train.metrics import Logger, MetricsLog
from allstep.train.metrics import read_metrics as read_metrics
from allstep.train.options import TrainOptions
from allstep.train.own_loop import steps
from allstep.train.precision import Precision as Precision
from allstep.train.progress import Progress
from allstep.train.report import RunReport
from allstep.train.run import MeasuredRun as MeasuredRun
from allstep.train.run import Run
from allstep.train.run_lock import launcher_has_ended as launcher_has_ended
from allstep.train.run_lock import launcher_lock as launcher_lock
from allstep.train.run_lock import taken_by as taken_by
from allstep.train.run_lock import trainer_of as trainer_of
from allstep.train.shards import check_sharded as check_sharded
from allstep.train.sharpness import Sharpness, sharpness
from allstep.train.sharpness import check_sharpness_arguments as check_sharpness_arguments
from allstep.train.step import Update
from allstep.train.stop import REPEAT_S as REPEAT_S
from allstep.train.stop import Interrupts, StopAgreement
from allstep.train.storage import read_checkpoint as read_checkpoint
from allstep.train.storage import write_checkpoint as write_checkpoint
from allstep.train.storage import writing as writing
from allstep.train.task import Metrics, Stage, Task

__all__ = [
    "AutoCheckpoint",
    "Batch",
    "BestMetric",
    "Checkpoints",
    "Elastic",
    "Evaluator",
    "Interrupts",
    "LayerSharpness",
    "Logger",
    "Loop",
    "Metrics",
    "MetricsLog",
    "Progress",
    "Run",
    "RunReport",
    "Sharpness",
    "Stage",
    "StopAgreement",
    "Task",
    "TrainOptions",
    "Training",
    "Update",
    "check_same",
    "fit",
    "sharpness",
    "steps",
]
