"""From a global batch to a trained model: steps, the loop, evaluation, checkpoints."""

from allstep.train.agreement import StopAgreement as StopAgreement
from allstep.train.batch import Batch as Batch
from allstep.train.batch import steps as steps
from allstep.train.checkpoint import Checkpoints as Checkpoints
from allstep.train.evaluator import Evaluator as Evaluator
from allstep.train.interrupts import Interrupts as Interrupts
from allstep.train.loop import fit as fit
from allstep.train.metrics import MetricsLog as MetricsLog
from allstep.train.options import TrainOptions as TrainOptions
from allstep.train.progress import Progress as Progress
from allstep.train.report import RunReport as RunReport
from allstep.train.task import Metrics as Metrics
from allstep.train.task import Stage as Stage
from allstep.train.task import Task as Task
