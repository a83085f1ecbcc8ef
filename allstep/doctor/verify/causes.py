"""The causes that `verify` can name, each with its evidence and its cure."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cause", "CauseName"]

CauseName = Literal[
    "learning rate scaled",
    "loss summed",
    "random state",
    "unequal shards",
    "batch norm",
    "scheduler",
    "data not sharded",
    "global batch",
    "exchange policy",
    "optimizer options",
    "workers apart",
    "samples repeated",
]

_CURES: dict[CauseName, str] = {
    "learning rate scaled": "set the learning rate from the global batch, not from the workers",
    "loss summed": "take the mean over a worker's samples: `attach` takes the mean over workers"
    ' (`reduction="sum"` wants losses that are divided by the global batch)',
    "random state": "draw random numbers from (seed, step, sample), never from the rank;"
    " `allstep.steps` and `allstep.data.loader` do",
    "unequal shards": "weigh each worker's mean loss by its samples, or drop the last batch;"
    " `batch.backward` of `allstep.steps` weighs",
    "batch norm": "take statistics over groups of fixed size: fixed micro-batches with"
    " `allstep.steps`, or `allstep.nn`'s batch norms",
    "scheduler": "step the scheduler once for each step of the optimizer",
    "data not sharded": "give each worker its own part: `allstep.data.loader` with the workers'"
    " communicator, or a DistributedSampler",
    "global batch": "give each worker global batch / workers samples",
    "exchange policy": "this is what was asked for; compare accuracy, not numbers",
    "optimizer options": "give the optimizer the same options on any number of workers",
    "workers apart": "make every update from `p.grad` and from what is the same on all workers",
    "samples repeated": "drop the last batch, or use a sampler that doesn't fill up its parts;"
    " `allstep.data.loader` gives each sample once",
}


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        name: which.
        evidence: what was seen.
    """

    name: CauseName
    evidence: str

    @property
    def cure(self) -> str:
        """What to do about it."""
        return _CURES[self.name]
