"""The gradient exchange: after each backward pass `p.grad` is the mean over the workers."""

from allstep.exchange.attach import attach
from allstep.exchange.exchange import Exchange
from allstep.exchange.plain import PlainExchange
from allstep.exchange.policy import ExchangePolicy, ExchangeStats
from allstep.exchange.running_statistics import RunningStatistics

__all__ = [
    "Exchange",
    "ExchangePolicy",
    "ExchangeStats",
    "PlainExchange",
    "RunningStatistics",
    "attach",
]
