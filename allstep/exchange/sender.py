"""Sends buckets: a wire format, a group of workers, and a thread or stream to do it in."""

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from os import getpid
from time import perf_counter
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from allstep.comm import Communicator
from allstep.comm.algorithms import Auto, Dummy, Native, SharedMemory, make_algorithm
from allstep.comm.work import BackendWork, JoinedWork, Work
from allstep.exchange.fixed_point import FixedPointFlight, Left
from allstep.exchange.flight import BucketPlan, Flight
from allstep.exchange.layout import BucketLayout
from allstep.exchange.parameters import Signature
from allstep.exchange.policy import ExchangePolicy
from allstep.exchange.residuals import (
    gather_states,
    give_back,
    load_states,
    remember,
    residual_pieces,
    restore,
)
from allstep.exchange.runner import Runner, make_runner
from allstep.exchange.spans import begin_span, job_span
from allstep.exchange.transport import Transport, channel_of
from allstep.exchange.verdict import Verdict, looks_late
from allstep.exchange.wires import Exact, FullPrecision, WireState

__all__ = ["NUM_AT_ONCE", "Sender"]

NUM_AT_ONCE = 4  # buckets, where the backward pass is faster than the wire


class Sender:
    """Makes flights and sends their buckets, in the order of the calls.

    Its collectives have a group of their own: beside them, in the main thread, workers may
    call other collectives of `comm` at other times. See `channel_of`.

    Args:
        comm: the workers.
        policy: wire format and algorithm.
    """

    def __init__(self, comm: Communicator, policy: ExchangePolicy) -> None:
        self.wire = policy.wire_format
        self.runner: Runner = make_runner(comm.device)
        self._main_comm = comm
        self.comm = channel_of(comm)
        self._as_they_are = type(self.wire) is FullPrecision
        num_at_once = NUM_AT_ONCE if self._may_post else 1
        algorithm = make_algorithm(policy.algorithm, self.comm, self.wire.dtype, num_at_once)
        self.transport = Transport(self.comm, algorithm)
        self._tell_choices()
        self._native: Native | None = None
        self.compares = comm.size > 1 and not isinstance(algorithm, Dummy)  # it adds nothing up
        self.looks_late = looks_late(comm.device)
        self._posted_s = self._last_end_s = 0.0
        self._pending: set[object] = set()  # a mark for each call that the backend works on
        self._staleness = policy.staleness
        if self.comm is not comm:
            self.comm.set_timeout(min(policy.first_timeout_s, comm.timeout_s))
        self.plan = BucketPlan((), comm.size)
        self._states: list[WireState] = []
        self._left: MutableMapping[nn.Parameter, Left] = WeakTensorKeyDictionary()
        self.close = finalize(
            self, _close, getpid(), self.runner, self.transport, self.comm, comm, self._pending
        )

    @property
    def has_residuals(self) -> bool:
        """Whether something of earlier gradients waits to be sent."""
        return any(state.residual is not None for state in self._states)

    @property
    def usual_bucket_bytes(self) -> int:
        """Large where sums are taken in place in memory, since workers meet for each; else small,
        so that the network has work early.
        """
        algorithm = self.transport.algorithm
        in_memory = isinstance(algorithm, SharedMemory) and algorithm.fallback is None
        return 32 << 20 if in_memory and self._as_they_are else 8 << 20

    @property
    def is_exact(self) -> bool:
        """Whether every backward pass must be added up by the exchange itself."""
        return isinstance(self.wire, Exact)

    @property
    def _may_post(self) -> bool:
        """Whether buckets may be left to the backend, which works on several at once."""
        return self._as_they_are and self.comm.device.type == "cpu" and self.comm.size > 1

    def set_plan(self, plan: BucketPlan) -> None:
        """Takes other buckets; what was not sent yet of a parameter goes along."""
        residuals = {name: piece.clone() for name, piece in self._residuals().items()}
        self.plan = plan
        self._native = self._only_native()
        self._states = [self.wire.new_state(layout) for layout in plan.layouts]
        for layout, state in zip(plan.layouts, self._states, strict=True):
            give_back(layout, state, residuals)

    def _residuals(self) -> dict[str, Tensor]:
        """name -> what was not sent yet; a view."""
        return {
            name: piece
            for layout, state in zip(self.plan.layouts, self._states, strict=True)
            for name, piece in residual_pieces(layout, state).items()
        }

    def _only_native(self) -> Native | None:
        """The backend's own sums if all buckets are left to it.

        Some by it and some by this sender's thread would meet in another order on each worker.
        """
        if not self._may_post:
            return None
        algorithm = self.transport.algorithm
        sizes = [layout.num_elements * layout.flat_dtype.itemsize for layout in self.plan.layouts]
        used = {algorithm.used_for(size) for size in sizes}
        only = used.pop() if len(used) == 1 else None
        return only if type(only) is Native else None

    def start(self, flat: Tensor, layout: BucketLayout, state: WireState) -> Work[None]:
        """Exchanges a bucket that belongs to no flight, as those of a flight are exchanged."""
        if self._native is not None:
            return self._native.post(flat)
        return self.runner.submit(lambda: self.wire.sum_(flat, layout, state, self.transport))

    def new_flight(self) -> Flight:
        """An empty flight for the plan. Collective."""
        if isinstance(self.wire, Exact):
            return FixedPointFlight.of(self.plan, self.wire, self.comm.rank, self._left)
        return Flight.new(self.plan, self.transport.algorithm if self._as_they_are else None)

    def send(
        self,
        flight: Flight,
        index: int,
        untouched: Sequence[str] = (),
        residual_factor: float = 1.0,
    ) -> None:
        """Starts the exchange of a bucket.

        Args:
            flight: whose.
            index: of the bucket; they must be sent in order.
            untouched: parameters without a gradient here; see `restore`.
            residual_factor: by which gradients are larger than when the residual was left: a
                GradScaler's scale has changed.
        """
        flat, layout = flight.flats[index], flight.plan.layouts[index]
        state, transport = self._states[index], self.transport
        if self._native is not None:
            flight.jobs.append(self._post(self._native, flight, index))
            return
        flags = flight.flags_of(index, untouched)
        span = job_span(_span_name(index), flat.device, self._staleness)

        def work() -> None:
            if residual_factor != 1 and state.residual is not None:
                state.residual.mul_(residual_factor)
            with span:
                if isinstance(flight, FixedPointFlight):
                    transport.all_reduce(flat)
                else:
                    flight.remembered += remember(layout, state, flags)
                    self.wire.sum_(flat, layout, state, transport)
                    if index == len(flight.flats) - 1:
                        restore(flight.remembered)
            if index == 0:
                self._compare(flight, self.comm)  # before the others: who disagrees sends none

        flight.jobs.append(self.runner.submit(work))

    def _post(self, native: Native, flight: Flight, index: int) -> Work[None]:
        """Hands a bucket to the backend itself, which works on several at once."""
        flat, mark = flight.flats[index], object()
        self._pending.add(mark)

        @torch.no_grad()
        def finish() -> None:
            self._pending.discard(mark)
            end_s = perf_counter()
            self._posted_s += end_s - max(start_s, self._last_end_s)
            self._last_end_s = end_s
            if index == 0:
                self._compare(flight, self._main_comm)  # this sender's own is still busy

        work = native.post(flat)
        start_s = perf_counter()
        if not self._staleness and isinstance(work, BackendWork):
            begin_span(_span_name(index), work.future)
        return JoinedWork([work], finish)

    def _compare(self, flight: Flight, comm: Communicator) -> None:
        """Looks at the workers' comparison, if it is time. [Note: late verdict]"""
        if self.compares and not self.looks_late:
            Verdict.of(flight, marks=False).settle(comm)

    @property
    def busy_s(self) -> float:
        """Seconds in collectives, encoding and decoding so far."""
        return self.runner.busy_s + self._posted_s

    def lift_first_timeout(self) -> None:
        """All have met for the first time: from now on the communicator's own timeout holds."""
        if self.comm.timeout_s < self._main_comm.timeout_s:
            self.comm.set_timeout(self._main_comm.timeout_s)

    def check(self, flight: Flight, action: str, described: Signature) -> None:
        """Sends what looks like the first bucket of an exchange, but is only its check.

        So workers that come for something else find out, instead of waiting elsewhere.

        Args:
            flight: the next; its first bucket is kept.
            action, described: as of `Flight`.

        Raises:
            DisagreementError: on every worker, if they came for different things.
        """
        flat, states = flight.flats[0], self._states
        kept, self._states = flat.clone(), deepcopy(states)
        flight.action, flight.described = action, described
        flat.zero_()
        flight.write_check(self.comm.rank)
        self.send(flight, 0)
        try:
            flight.jobs[0].wait()
            if self.looks_late and self.compares:
                self._settle_now(flight)
        finally:
            self._states = states
        flight.jobs.clear()
        flat.copy_(kept)
        self.lift_first_timeout()

    def _settle_now(self, flight: Flight) -> None:
        """Raises if workers disagree, after all that those with an exchange send till they look."""
        verdict = Verdict.of(flight, marks=False)
        if not verdict.is_good:
            indices = list(range(len(flight.flats)))
            for index in indices[1:] + self._staleness * indices:
                flight.flats[index].zero_()
                self.send(flight, index)
        verdict.settle(self._main_comm)

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange depends on; residuals on rank 0 alone. Collective."""
        return {
            "algorithm": self.transport.algorithm.state_dict(),
            "buckets": self.plan.buckets,
            "states": gather_states(self.comm, self._states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with that plan. Collective."""
        self.transport.algorithm.load_state_dict(state["algorithm"])
        self._native = self._only_native()
        self._tell_choices()
        if state["states"] is not None:
            load_states(self.comm, self._states, state["states"])

    def _tell_choices(self) -> None:
        algorithm = self.transport.algorithm
        if isinstance(algorithm, Auto) and algorithm.choices and self.comm.rank == 0:
            logging.getLogger("allstep").info(f"all-reduce by size: {algorithm.in_words}")


def _span_name(index: int) -> str:
    return f"allstep::bucket {index} reduce"


def _close(
    pid: int,
    runner: Runner,
    transport: Transport,
    channel: Communicator,
    comm: Communicator,
    pending: set[object],
) -> None:
    """Gives all back. A group waits for its pending calls when it is closed, and holds the
    interpreter's lock meanwhile: where workers disagreed, that would be for a whole timeout.
    A process that was forked from this one leaves it alone when it exits.
    """
    if getpid() != pid:
        return
    runner.close()
    transport.algorithm.close()
    if channel is comm:
        return
    if pending:
        channel.abort()
    else:
        channel.close()
