"""Means of gradients that another engine hands over: what the hooks of DDP and FSDP2 share."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.algorithms import make_algorithm
from allstep.comm.work import CompletedWork, Work
from allstep.exchange.agreement import check_same_arguments
from allstep.exchange.layout import BucketLayout
from allstep.exchange.policy import ExchangePolicy
from allstep.exchange.residuals import give_back, residual_pieces
from allstep.exchange.runner import make_runner
from allstep.exchange.spans import job_span
from allstep.exchange.transport import Transport, channel_of
from allstep.exchange.wires import WireState

__all__ = ["GuestMeans", "StaleGradients"]


class GuestMeans:
    """Takes means over the workers of flat tensors, one after the other, in the background.

    What lossy formats have not sent belongs to parameters' names, since the engine may put the
    parameters in other buckets later.

    Args:
        comm: the workers.
        policy: wire format, reduction and algorithm.

    Raises:
        DisagreementError: if workers have different policies.
    """

    def __init__(self, comm: Communicator, policy: ExchangePolicy) -> None:
        if comm.size > 1:
            check_same_arguments(comm, policy.in_words)
        self._policy = policy
        self._wire = policy.wire_format
        self._scale = 1.0 if policy.reduction == "sum" else 1 / comm.size
        self._runner = make_runner(comm.device)
        channel = channel_of(comm)  # the engine's own collectives run at the same time
        algorithm = make_algorithm(policy.algorithm, channel, self._wire.dtype)
        self._transport = Transport(channel, algorithm)
        self._states: dict[BucketLayout, WireState] = {}
        self._unsent: dict[str, Tensor] = {}  # of parameters that aren't in a bucket at present
        self._close = finalize(self, self._runner.close)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return self._transport.sent_bytes

    def start(
        self,
        flat: Tensor,
        layout: BucketLayout,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> Work[None]:
        """Starts to make `flat` the mean, in place; every worker must start the same.

        Args:
            flat: [num_elements].
            layout: where parameters lie in it.
            on_end: called when it is done, with the error if there was one.
        """
        span = job_span("allstep::bucket reduce", flat.device, self._policy.staleness)

        def work() -> None:
            try:
                with span:
                    if self._scale != 1:
                        flat.mul_(self._scale)
                    self._wire.sum_(flat, layout, self._state(layout), self._transport)
            except BaseException as error:
                on_end(error)
                raise
            on_end(None)

        return self._runner.submit(work)

    def state_dict(self) -> dict[str, Any]:
        """What the next means depend on, when all that was started has ended."""
        self._runner.submit(lambda: None).wait()
        found = dict(self._unsent)
        for layout, state in self._states.items():
            found |= residual_pieces(layout, state)
        return {
            "policy": self._policy.state_dict(),
            "unsent": {name: piece.clone() for name, piece in found.items()},
            "algorithm": self._transport.algorithm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Collective.

        Raises:
            CheckpointError: if that was with another policy.
        """
        self._policy.check_state_dict(state.get("policy", {}))
        algorithm = self._transport.algorithm
        self._runner.submit(lambda: algorithm.load_state_dict(state["algorithm"])).wait()
        self._states.clear()
        self._unsent = dict(state["unsent"])

    def _state(self, layout: BucketLayout) -> WireState:
        if layout in self._states:
            return self._states[layout]
        for old in [old for old in self._states if set(old.names) & set(layout.names)]:
            self._unsent |= residual_pieces(old, self._states.pop(old))
        state = self._states[layout] = self._wire.new_state(layout)
        for name in give_back(layout, state, self._unsent):
            del self._unsent[name]
        return state


@dataclass
class StaleGradients:
    """Gradients of the last steps, under way. [Note: stale timeline]

    Attributes:
        staleness: steps between a gradient's start and its use.
    """

    staleness: int
    _steps: deque[dict[str, tuple[Work[None], Tensor]]] = field(
        default_factory=lambda: deque([{}]), init=False
    )

    def add(self, work: Work[None], gradients: Mapping[str, Tensor]) -> None:
        """Gradients of this step, that will be their mean when the work has ended."""
        self._steps[-1] |= {name: (work, gradient) for name, gradient in gradients.items()}

    def end_step(self) -> dict[str, Tensor] | None:
        """The means that this step may use, by name; None in the first steps."""
        self._steps.append({})
        return self._land() if len(self._steps) > self.staleness + 1 else None

    def flush(self) -> Iterator[dict[str, Tensor]]:
        """What is under way, the oldest first."""
        while len(self._steps) > 1:
            yield self._land()

    def state_dict(self) -> list[dict[str, Tensor]]:
        """The means under way, the oldest first; the same on every worker. Waits for them."""
        return [
            {name: gradient.clone() for name, gradient in _waited_for(step).items()}
            for step in list(self._steps)[:-1]
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on where `state_dict` was taken."""
        self._steps.clear()
        for means in state:
            self._steps.append(
                {name: (CompletedWork(None), mean.clone()) for name, mean in means.items()}
            )
        self._steps.append({})

    def _land(self) -> dict[str, Tensor]:
        return _waited_for(self._steps.popleft())


def _waited_for(step: Mapping[str, tuple[Work[None], Tensor]]) -> dict[str, Tensor]:
    for work in {id(work): work for work, _ in step.values()}.values():
        work.wait()
    return {name: gradient for name, (_, gradient) in step.items()}
