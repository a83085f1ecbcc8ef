"""What `import allstep` offers, one name a line: `__init__.py` and type checkers read it."""

from allstep import comm as comm
from allstep import data as data
from allstep import doctor as doctor
from allstep import errors as errors
from allstep import exchange as exchange
from allstep import nn as nn
from allstep import optim as optim
from allstep import plan as plan
from allstep import recipes as recipes
from allstep import train as train
from allstep.comm import Communicator as Communicator
from allstep.comm import Work as Work
from allstep.comm import init as init
from allstep.errors import AllstepError as AllstepError
from allstep.errors import DataError as DataError
from allstep.errors import UsageError as UsageError
from allstep.exchange import Exchange as Exchange
from allstep.exchange import ExchangePolicy as ExchangePolicy
from allstep.exchange import LocalSGD as LocalSGD
from allstep.exchange import Nesterov as Nesterov
from allstep.exchange import Stale as Stale
from allstep.exchange import Synchronous as Synchronous
from allstep.exchange import attach as attach
from allstep.exchange import ddp_hook as ddp_hook
from allstep.exchange import fsdp_hook as fsdp_hook
from allstep.train import AutoCheckpoint as AutoCheckpoint
from allstep.train import Elastic as Elastic
from allstep.train import Evaluator as Evaluator
from allstep.train import Metrics as Metrics
from allstep.train import Stage as Stage
from allstep.train import Task as Task
from allstep.train import TrainOptions as TrainOptions
from allstep.train import fit as fit
from allstep.train import steps as steps

__version__: str
