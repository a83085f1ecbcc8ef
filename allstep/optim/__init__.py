"""Large-batch optimizers, parameter groups and schedules; nothing here knows of workers.

Schedules are plain functions and come without torch; the rest is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.optim.compose import chain, gradual_warmup, hold, in_samples
from allstep.optim.published import PUBLISHED, MixedBatch, PublishedRecipe
from allstep.optim.scaling import Change, Rescaled, linear_scaling, rescale, sqrt_scaling
from allstep.optim.schedules import (
    Schedule,
    constant,
    cosine,
    poly,
    sgd_share,
    slow_start,
    step_decay,
)
from allstep.optim.settings import OptimizerName, ScheduleName, SecondStage, Settings

if TYPE_CHECKING:
    from allstep.optim.checks import NonfiniteGradientError as NonfiniteGradientError
    from allstep.optim.grouping import groups as groups
    from allstep.optim.lamb import LAMB as LAMB
    from allstep.optim.lars import LARS as LARS
    from allstep.optim.layer_wise import LayerWise as LayerWise
    from allstep.optim.rmsprop_warmup import RMSpropWarmup as RMSpropWarmup
    from allstep.optim.rules import Adam as Adam
    from allstep.optim.rules import RMSprop as RMSprop
    from allstep.optim.rules import Rule as Rule
    from allstep.optim.rules import SGDRule as SGDRule
    from allstep.optim.trust import TrustRatio as TrustRatio

_MODULE_OF = {
    "LARS": "lars",
    "LAMB": "lamb",
    "LayerWise": "layer_wise",
    "RMSpropWarmup": "rmsprop_warmup",
    "Adam": "rules",
    "RMSprop": "rules",
    "Rule": "rules",
    "SGDRule": "rules",
    "TrustRatio": "trust",
    "NonfiniteGradientError": "checks",
    "groups": "grouping",
}

__all__ = [
    *_MODULE_OF,
    "PUBLISHED",
    "Change",
    "MixedBatch",
    "PublishedRecipe",
    "OptimizerName",
    "Rescaled",
    "ScheduleName",
    "SecondStage",
    "Settings",
    "rescale",
    "Schedule",
    "constant",
    "cosine",
    "poly",
    "slow_start",
    "step_decay",
    "chain",
    "gradual_warmup",
    "hold",
    "in_samples",
    "sgd_share",
    "linear_scaling",
    "sqrt_scaling",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"allstep.optim.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'allstep.optim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
