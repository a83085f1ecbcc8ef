"""Decides which parameters share a bucket, from what is known of the backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allstep.comm import Communicator
from allstep.exchange.policy import ExchangePolicy
from allstep.exchange.reducer import Reducer
from allstep.exchange.tuning import ReadyGradient, split_in_buckets, tuned_bucket_bytes

_TUNED_AFTER = 3  # exchanges; the first are slower than the rest


class Bucketing:
    """Chooses buckets by a guess, then by the first backward pass's order, then of the best size.

    Args:
        comm: the workers.
        reducer: sums the buckets.
        policy: says how large buckets are; "auto" measures.

    Attributes:
        is_recorded: whether the buckets follow a recorded backward pass.
        comes_twice: whether a gradient was added to after it was ready in the recorded pass, as
            with reentrant checkpointing.
    """

    def __init__(self, comm: Communicator, reducer: Reducer, policy: ExchangePolicy) -> None:
        self._comm, self._reducer = comm, reducer
        own = policy.bucket_bytes
        self._bucket_bytes = own if isinstance(own, int) else reducer.usual_bucket_bytes
        self._is_tuned = own != "auto"
        self._overlap = policy.overlap
        self.is_recorded = self.comes_twice = False

    @property
    def may_overlap(self) -> bool:
        """Whether a bucket may be sent as soon as its gradients are ready."""
        return self.is_recorded and self._overlap and not self.comes_twice

    def note_second_gradient(self) -> None:
        """Records that a gradient was added to after it was ready, in the recorded pass."""
        if not self.is_recorded:
            self.comes_twice = True

    def guess(self, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
        """Buckets for a model whose backward pass is unknown yet: last layers first."""
        self.is_recorded = False
        return self._split([ready_gradient(n, parameters[n]) for n in reversed(list(parameters))])

    def is_due(self, num_exchanges: int) -> bool:
        """Whether the buckets should be revised before the next backward pass."""
        return not self.is_recorded or (not self._is_tuned and num_exchanges >= _TUNED_AFTER)

    def revise(self, gradients: Sequence[ReadyGradient], backward_s: float) -> list[list[str]]:
        """The next buckets, the same on every worker. Collective.

        Args:
            gradients: in the order of the last backward pass, or of the present buckets if these
                follow a backward pass already; then no exchange may be in flight.
            backward_s: seconds of that pass.
        """
        if self.is_recorded:
            measured = tuned_bucket_bytes(self._comm, self._reducer, gradients, backward_s)
            self._bucket_bytes, self._is_tuned = measured, True
            return self._split(gradients)
        self.is_recorded = True
        twice = torch.tensor(self.comes_twice, dtype=torch.int32, device=self._comm.device)
        self.comes_twice = bool(self._comm.all_reduce(twice, "max"))
        by_name = {gradient.name: gradient for gradient in gradients}
        names = self._comm.broadcast_object(list(by_name), root=0)
        return self._split([by_name[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """The state that the next buckets depend on."""
        return {
            "is_recorded": self.is_recorded,
            "comes_twice": self.comes_twice,
            "is_tuned": self._is_tuned,
            "bucket_bytes": self._bucket_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint; other entries are ignored."""
        self.is_recorded, self.comes_twice = state["is_recorded"], state["comes_twice"]
        self._bucket_bytes, self._is_tuned = state["bucket_bytes"], state["is_tuned"]

    def _split(self, gradients: Sequence[ReadyGradient]) -> list[list[str]]:
        buckets = split_in_buckets(gradients, self._bucket_bytes)
        return [[gradient.name for gradient in bucket] for bucket in buckets]


def ready_gradient(name: str, p: nn.Parameter, ready_s: float = 0.0) -> ReadyGradient:
    """The description of a parameter's gradient for choosing buckets."""
    return ReadyGradient(name, p.nbytes, (p.dtype, p.device), ready_s)
