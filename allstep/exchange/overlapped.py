"""The exchange in buckets, beside the backward pass, and as many steps late as allowed."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import AllstepError, CheckpointError, UsageError
from allstep.exchange.airborne import Airborne
from allstep.exchange.bucketing import Bucketing, ready_gradient
from allstep.exchange.exchange import Exchange
from allstep.exchange.fixed_point import FixedPointFlight
from allstep.exchange.flight import BucketPlan
from allstep.exchange.hooks import AccumulationHook, Removable, WeakHook
from allstep.exchange.parameters import Signature
from allstep.exchange.policy import ExchangePolicy, ExchangeStats
from allstep.exchange.sender import Sender

__all__ = ["OverlappedExchange"]


class OverlappedExchange(Exchange):
    """Sends gradients in buckets while the backward pass still makes others.

    A bucket is sent once all its gradients are ready and the bucket before it has been sent, so
    that the order is the same on every worker. The first backward pass records in which order
    gradients become ready; rank 0's order makes the buckets of all later ones.

    [Note: stale timeline] With staleness k the exchange that step t starts ends in step t + k:

        step t:  p.grad = mean of the gradients of step t - k        for t >= k
                 p.grad = None                                       for t < k

    A step without `p.grad` makes no update, so that no decay, moment or step count moves; T
    steps make T - k updates, and `flush` the k others. A gradient is applied with the learning
    rate of the step that made it, so that T gradients meet the schedule's T values once each.
    A GradScaler's scale may change meanwhile: the mean is multiplied by the present scale over
    the one that it was made under, and an infinite one lets the scaler skip that one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        policy: ExchangePolicy,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._scaler = scaler
        self._sender = Sender(comm, policy)
        self._flight = self._sender.new_flight()
        self._airborne = Airborne(self._sender, comm)
        self._bucketing = Bucketing(comm, self._sender, policy)
        self._arrivals: dict[str, float] = {}  # name -> when its gradient was ready in this pass
        self._missing: list[int] = []  # gradients that each bucket waits for
        self._pass_number = 0
        self._failure: str | None = None
        self._last_scale = self._residual_factor = 1.0
        self._pass_start_s = 0.0
        super().__init__(model, comm, policy)

    # -- what the user sees --------------------------------------------------------------------

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters that travel together, in the order in which they are sent."""
        return self._sender.plan.buckets

    def algorithm_for(self, num_bytes: int) -> str:
        """The name of what sums so many bytes."""
        return self._sender.transport.algorithm.used_for(num_bytes).name

    def stats(self) -> ExchangeStats:
        sender = self._sender
        return ExchangeStats(
            self._num_exchanges,
            sender.transport.sent_bytes,
            sender.busy_s,
            self._airborne.exposed_s,
        )

    def synchronize(self) -> None:
        self._forget_aborted_pass()
        super().synchronize()

    def flush(self) -> Iterator[int]:
        while self._airborne:
            self._clear_gradients()
            step, _ = self._land()
            self._airborne.settle()
            yield step

    def state_dict(self) -> dict[str, Any]:
        common = super().state_dict()
        self._airborne.settle()
        self._wait_for_all()
        return {
            **common,
            **self._sender.state_dict(),
            **self._bucketing.state_dict(),
            "scale": self._last_scale,
            "in_flight": [flight.state_dict() for flight in self._airborne],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        was_active = self._is_active
        if not state.get("buckets") or not (was_active or state["states"]):
            return  # a lone worker had none, or needs none
        names = sorted(name for bucket in state["buckets"] for name in bucket)
        if names != sorted(self._parameters.trained):
            raise CheckpointError(
                "The checkpoint's exchange is of other parameters than the model's; resume with"
                " the model as it was."
            )
        if not was_active:
            self._activate()  # what was not sent yet joins a lone worker's first gradients
        self._bucketing.load_state_dict(state)
        self._last_scale = state["scale"]
        self._set_plan(state["buckets"])
        self._sender.load_state_dict(state)
        self._airborne.clear()
        for saved in state["in_flight"]:
            flight = self._sender.new_flight()
            flight.load_state_dict(saved)
            self._airborne.add(flight)

    def detach(self) -> None:
        super().detach()
        with suppress(AllstepError):  # of what nobody will look at any more
            self._wait_for_all()
        self._sender.close()

    # -- the backward pass ---------------------------------------------------------------------

    def _take(self, name: str, p: nn.Parameter) -> None:
        """A gradient is ready: puts it in its bucket, and sends the buckets that are full."""
        gradient = p.grad
        if gradient is None or gradient.layout != torch.strided:
            return  # refused at the end of the pass, on every worker
        if self._stays_local:
            return
        if self._num_suspended:
            if self._sender.is_exact:
                self._place(name, p)
            return
        if self._pass_number != self._backward_pass.number:
            self._begin_pass()
        self._check_arrival(name, gradient)
        if self._failure is not None:
            return
        if not self._place(name, p):
            return
        if name not in self._arrivals:
            self._arrivals[name] = perf_counter()
            self._missing[self._sender.plan.bucket_of[name]] -= 1
        elif not self._bucketing.is_recorded:
            self._bucketing.comes_twice = True
        if self._bucketing.may_overlap:
            while self._missing and self._missing[len(self._flight.jobs)] == 0:
                self._send_next()

    def _place(self, name: str, p: nn.Parameter) -> bool:
        """Notes a gradient; what is wrong with it is told to all at the end."""
        try:
            self._flight.place(name, p)
        except UsageError as error:
            self._failure = str(error)
        return self._failure is None

    def _fill(self, index: int) -> None:
        """Puts a bucket's gradients in the flight; what is wrong is told to all at the end."""
        try:
            trained, scale = self._parameters.trained, self.gradient_scale
            self._flight.fill(index, trained, self._touched, scale)
        except UsageError as error:
            self._failure = str(error)

    def _begin_pass(self) -> None:
        self._pass_number = self._backward_pass.number
        self._pass_start_s = perf_counter()
        self._forget_aborted_pass()
        self._missing = [len(layout.names) for layout in self._sender.plan.layouts]

    def _forget_aborted_pass(self) -> None:
        """One that ended with an exception; what it has sent cannot be taken back."""
        if self._flight.jobs:
            self._stop_all(
                "An earlier backward pass ended with an exception after some of its gradients had"
                " been sent; restart from a checkpoint."
            )
        self._arrivals.clear()

    def _check_arrival(self, name: str, gradient: Tensor) -> None:
        shape, dtype = self._sender.plan.form_of[name]
        if gradient.dtype != dtype or gradient.shape != shape:
            self._failure = (
                f"Parameter `{name}` was {list(shape)} {dtype} at `attach` and is now"
                f" {list(gradient.shape)} {gradient.dtype}; detach and attach again after a change."
            )
        if self._sender.plan.bucket_of[name] < len(self._flight.jobs):
            self._failure = (
                f"Parameter `{name}` got a second gradient in one backward pass, after the first"
                " had been sent (reentrant checkpointing, or a module used in several of them);"
                " attach with `Synchronous(overlap=False)` or use `use_reentrant=False`."
            )

    def _send_next(self) -> None:
        """Sends the next bucket in the plan's order."""
        flight, index = self._flight, len(self._flight.jobs)
        names = flight.plan.layouts[index].names
        if self._failure is None:
            self._fill(index)
        is_last = index == len(flight.plan.layouts) - 1
        if index == 0:
            self._airborne.settle()
            flight.step, flight.scale = self._num_exchanges, self._present_scale()
            self._residual_factor = flight.scale / self._last_scale
            self._last_scale = flight.scale
            flight.action, flight.described = self._describe(), self._signature
            flight.write_check(self.comm.rank)
        if is_last:
            flight.touched = frozenset(self._touched)
            flight.failure = self._failure
            flight.write_flags()
            self._missing = []
        untouched = [name for name in names if name not in self._touched]
        self._sender.send(flight, index, untouched, self._residual_factor)

    # -- the end of a backward pass --------------------------------------------------------------

    def _reduce(self) -> Collection[str]:
        flight = self._flight
        if not flight.plan.layouts:
            return ()
        delivered: Collection[str] = ()
        trained = self._parameters.trained
        self._touched.difference_update([n for n, p in trained.items() if p.grad is None])
        while len(flight.jobs) < len(flight.plan.layouts):
            self._send_next()
        self._airborne.add(flight)
        if len(self._airborne) > self.policy.staleness:
            if self.policy.staleness:
                self._clear_gradients()
            _, delivered = self._land()
            self.has_landed = True
        else:
            self._clear_gradients()
            self.has_landed = False
        self._revise_plan()
        self._next_flight()
        return delivered

    def _land(self) -> tuple[int, Collection[str]]:
        """Leaves the oldest flight's sums in `p.grad`; returns the step that sent it, and names."""
        flight = self._airborne.land()
        if self._scaler is not None and self.policy.staleness:
            factor = self._scaler.get_scale() / flight.scale
            if factor != 1:
                flight.rescale(factor)
        trained, landed = self._parameters.trained, flight.landed_names()
        for name in landed:
            if name in trained and self._failure is None:
                flight.deliver(name, trained[name])
        self._airborne.retire(flight)
        return flight.step, landed

    def _describe(self) -> str:
        """What this worker believes it exchanges; compared with the others'."""
        if self.global_step is not None:
            return f"exchange gradients {self._num_exchanges}, of global batch {self.global_step}"
        return f"exchange gradients {self._num_exchanges}, after {self._num_no_sync} `no_sync`"

    def _present_scale(self) -> float:
        matters = self.policy.staleness or self._sender.has_residuals
        return self._scaler.get_scale() if self._scaler and matters else 1.0

    def _wait_for_all(self) -> None:
        self._airborne.wait()
        for job in self._flight.jobs:
            job.wait()

    def _clear_gradients(self) -> None:
        for p in self._parameters.trained.values():
            p.grad = None

    def _agree(self, action: str, agreed: int = 0, described: Signature = ()) -> None:
        self._airborne.settle()
        if self._sender.plan.layouts:
            self._sender.check(self._flight, action, described)
        else:
            super()._agree(action, agreed, described)

    def _stop_all(self, message: str) -> NoReturn:
        if self._flight.jobs:
            self._failure = message
            self._reduce()
        super()._stop_all(message)

    # -- the plan ------------------------------------------------------------------------------

    @property
    def _is_active(self) -> bool:
        always = self.policy.staleness > 0 or self._sender.is_exact
        return super()._is_active or always or self._sender.has_residuals

    @property
    def _carries_over(self) -> bool:
        return super()._carries_over and not self._sender.is_exact

    def _hook_parameters(self) -> None:
        super()._hook_parameters()
        self._set_plan(self._bucketing.guess(self._parameters.trained))

    def _hook(self, name: str, p: nn.Parameter) -> list[Removable]:
        handles = super()._hook(name, p)
        if self._sender.is_exact:
            set_aside = WeakHook(self, lambda exchange, new: exchange._set_aside(name, p, new))
            handles.append(AccumulationHook(p, set_aside))
        return handles

    def _set_aside(self, name: str, p: nn.Parameter, new: Tensor | None) -> None:
        """A gradient is about to be added to `p.grad`; None is one that autograd knows is zero."""
        flight = self._flight
        is_dense = new is not None and new.layout == torch.strided
        if is_dense and isinstance(flight, FixedPointFlight) and not self._stays_local:
            flight.set_aside(name, p, self.gradient_scale)

    def _revise_plan(self) -> None:
        """Other buckets, if the backward pass that ended makes better ones."""
        if not self._bucketing.is_due(self._num_exchanges):
            return
        backward_s = perf_counter() - self._pass_start_s - self._airborne.last_wait_s
        if self._bucketing.is_recorded:
            self._wait_for_all()  # exchanges will be timed
        in_order = () if self._bucketing.is_recorded else self._arrivals
        trained, start_s = self._parameters.trained, self._pass_start_s
        gradients = [
            ready_gradient(name, trained[name], self._arrivals.get(name, start_s) - start_s)
            for name in dict.fromkeys([*in_order, *self._sender.plan.names])
        ]
        self._set_plan(self._bucketing.revise(gradients, backward_s))

    def _set_plan(self, buckets: list[list[str]]) -> None:
        self._wait_for_all()
        self._sender.set_plan(BucketPlan.of(buckets, self._parameters.trained, self.comm.size))
        self._airborne.forget_memory()
        self._next_flight()

    def _next_flight(self) -> None:
        """The flight for the next exchange; takes the memory of one that has landed."""
        self._arrivals.clear()
        self._flight = self._airborne.next_flight()
