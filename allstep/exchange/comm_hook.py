"""The common base of the hooks of torch's DistributedDataParallel and of FSDP2.

Both get flat gradients and return what `p.grad` is to hold. They use `Reducer` and `InFlight`, as
`attach` does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from allstep.comm import Communicator
from allstep.errors import UsageError, check_type
from allstep.exchange.agreement import check_same_policy
from allstep.exchange.in_flight import InFlight
from allstep.exchange.policy import ExchangePolicy, LocalSGD, Synchronous
from allstep.exchange.reducer import Reducer
from allstep.exchange.wires import Exact

Gradients = dict[str, Tensor]


class CommHook:
    """Sums flat gradients over the workers, and holds those in flight by name.

    Args:
        policy: how to exchange.
    """

    def __init__(self, policy: ExchangePolicy) -> None:
        self._policy = policy
        self._reducer: Reducer | None = None  # with DDP from the first bucket on
        self._in_flight: dict[str, InFlight[Gradients]] = {}
        self._loaded: Mapping[str, Any] = {}  # a state that waits for the reducer

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return 0 if self._reducer is None else self._reducer.sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """The state that the next sums depend on, such as this worker's residuals."""
        if self._reducer is None:
            return dict(self._loaded)
        for steps in self._in_flight.values():
            steps.wait()
        copies = {n: [_copy(step) for step in steps] for n, steps in self._in_flight.items()}
        return {
            "policy": self._policy.state_dict(),
            **self._reducer.state_dict(),
            "in_flight": copies,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state_dict` of a worker of the same rank. Collective."""
        self._loaded = state
        if self._reducer is not None:
            self._load(self._reducer)

    def _load(self, reducer: Reducer) -> None:
        state = self._loaded
        self._policy.check_state_dict(state.get("policy", {}))
        reducer.load_state_dict(state)
        self._in_flight.clear()
        for name, steps in state["in_flight"].items():
            for step in steps:  # from a file they may come on the CPU
                self._steps_of(name).push(_copy(step, reducer.comm.device), ())

    def _meet(self, comm: Communicator) -> Reducer:
        """Makes the reducer for these workers."""
        if comm.size > 1:
            check_same_policy(comm, self._policy.in_words)
        self._reducer = reducer = Reducer(comm, self._policy)
        if self._loaded:
            self._load(reducer)
        return reducer

    def _steps_of(self, name: str) -> InFlight[Gradients]:
        return self._in_flight.setdefault(name, InFlight(self._policy.staleness))

    def _scale(self, comm: Communicator) -> float:
        """The factor of gradients before they are summed."""
        return 1.0 if self._policy.reduction == "sum" else 1 / comm.size


def check_policy(policy: ExchangePolicy | None) -> ExchangePolicy:
    """Checks that a hook can follow a policy; returns it."""
    policy = Synchronous() if policy is None else policy
    check_type("policy", policy, ExchangePolicy, '`allstep.Synchronous(compression="int8")`, say')
    if isinstance(policy, LocalSGD):
        raise UsageError(
            f"`policy` (={policy}) averages parameters, but a hook exchanges gradients: pass"
            " `Synchronous` or `Stale`, or use `allstep.attach` instead of the hook."
        )
    if isinstance(policy.wire_format, Exact):
        raise UsageError(
            '`compression` (="exact") rounds the gradient of each micro-batch, which a hook on sums'
            " does not see: use `allstep.attach` with `allstep.steps` instead of the hook."
        )
    return policy


def after_engine(function: Any) -> None:
    """Calls a function at the end of the backward pass, after the callbacks queued so far."""
    engine = Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def _copy(step: Gradients, device: torch.device | None = None) -> Gradients:
    return {name: gradient.to(device, copy=True) for name, gradient in step.items()}
