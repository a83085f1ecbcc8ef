"""The gradient exchange: after each backward pass `p.grad` is the mean over the workers.

`__all__` is for users; what is imported under the same name again, for the rooms above.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.exchange.attach import attach
from allstep.exchange.backward import BackwardPass as BackwardPass
from allstep.exchange.batch_norm import RunningStatistics
from allstep.exchange.buckets import BucketPlan as BucketPlan
from allstep.exchange.buckets import BucketSet as BucketSet
from allstep.exchange.exchange import Exchange
from allstep.exchange.hooks import AccumulationHook as AccumulationHook
from allstep.exchange.hooks import FunctionHook as FunctionHook
from allstep.exchange.hooks import Removable as Removable
from allstep.exchange.layout import BucketLayout as BucketLayout
from allstep.exchange.local_sgd import ParameterAveraging
from allstep.exchange.outer_optimizer import Nesterov
from allstep.exchange.parameter_server import ParameterServer
from allstep.exchange.plain import PlainExchange
from allstep.exchange.policy import (
    ExchangePolicy,
    ExchangeStats,
    LocalSGD,
    Stale,
    Synchronous,
    make_policy,
)
from allstep.exchange.reducer import channel_of as channel_of
from allstep.exchange.wires import Transport as Transport

if TYPE_CHECKING:
    from allstep.exchange.ddp_comm_hook import ddp_hook as ddp_hook
    from allstep.exchange.fsdp_comm_hook import fsdp_hook as fsdp_hook

__all__ = [
    "Exchange",
    "ExchangePolicy",
    "ExchangeStats",
    "LocalSGD",
    "Nesterov",
    "ParameterAveraging",
    "ParameterServer",
    "PlainExchange",
    "RunningStatistics",
    "Stale",
    "Synchronous",
    "attach",
    "ddp_hook",
    "fsdp_hook",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    """The hooks for torch's engines, whose import takes seconds, when they are asked for."""
    if name in ("ddp_hook", "fsdp_hook"):
        module = name.replace("hook", "comm_hook")
        return getattr(import_module(f"allstep.exchange.{module}"), name)
    raise AttributeError(f"module 'allstep.exchange' has no attribute {name!r}")
