"""Scale a PyTorch training from one process to a cluster: one model, any number of workers.

Nothing is imported before it is used, so that `import allstep` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from allstep.data import scatter as scatter
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
    from allstep.train import Evaluator as Evaluator
    from allstep.train import Metrics as Metrics
    from allstep.train import Stage as Stage
    from allstep.train import Task as Task
    from allstep.train import TrainOptions as TrainOptions
    from allstep.train import fit as fit
    from allstep.train import steps as steps

__version__ = "0.1.0"

_ROOM_OF = {
    "Communicator": "comm",
    "Work": "comm",
    "init": "comm",
    "scatter": "data",
    "AllstepError": "errors",
    "DataError": "errors",
    "UsageError": "errors",
    "Exchange": "exchange",
    "ExchangePolicy": "exchange",
    "LocalSGD": "exchange",
    "Nesterov": "exchange",
    "Stale": "exchange",
    "Synchronous": "exchange",
    "attach": "exchange",
    "ddp_hook": "exchange",
    "fsdp_hook": "exchange",
    "Evaluator": "train",
    "Metrics": "train",
    "Stage": "train",
    "Task": "train",
    "TrainOptions": "train",
    "fit": "train",
    "steps": "train",
}
_ROOMS = ("comm", "data", "doctor", "errors", "exchange", "nn", "optim", "plan", "recipes", "train")

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(import_module(f"allstep.{_ROOM_OF[name]}"), name)
    if name in _ROOMS:
        return import_module(f"allstep.{name}")
    raise AttributeError(f"module 'allstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
