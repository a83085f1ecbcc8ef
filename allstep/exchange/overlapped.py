"""The exchange in buckets, overlapped with the backward pass, and late by `staleness` steps."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.device import has_streams
from allstep.errors import AllstepError, CheckpointError, UsageError
from allstep.exchange.agreement import agree
from allstep.exchange.backward import BackwardPass
from allstep.exchange.bucketing import Bucketing, ready_gradient
from allstep.exchange.buckets import BucketPlan, BucketSet
from allstep.exchange.comparison import BucketComparison
from allstep.exchange.exact_sums import ExactSums, OffGrid
from allstep.exchange.exchange import Exchange
from allstep.exchange.hooks import AccumulationHook, Removable, WeakHook, has_one_hook
from allstep.exchange.in_flight import InFlight
from allstep.exchange.parameters import Signature
from allstep.exchange.policy import ExchangePolicy, ExchangeStats
from allstep.exchange.reducer import Reducer
from allstep.exchange.wires import Exact

_NO_CONTEXT = nullcontext()


class OverlappedExchange(Exchange):
    """Sends gradients in buckets while the backward pass computes others.

    A bucket is sent once all its gradients are ready and the bucket before it has been sent, so
    that the order is the same on every worker. The first backward pass records in which order
    gradients become ready; rank 0's order makes the buckets of all later ones.

    With staleness sums are used some steps after they were started; see [Note: stale timeline]. A
    gradient is applied with the learning rate of the step that computed it, so that T gradients use
    the schedule's T values once each. A GradScaler's scale may change meanwhile: the sum is
    multiplied by the present scale over that of its step, and an infinite sum makes the scaler skip
    only that update.

    Args:
        model: the same on every worker.
        comm: the workers.
        policy: how to exchange.
        scaler: the GradScaler that losses are scaled with.
        is_read_late: whether the host reads the workers' comparison a step late, as it should on
            CUDA, where it is the default. [Note: late reading]
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        policy: ExchangePolicy,
        scaler: torch.amp.GradScaler | None = None,
        *,
        is_read_late: bool | None = None,
    ) -> None:
        self._scaler = scaler
        self._is_read_late = has_streams(comm.device) if is_read_late is None else is_read_late
        super().__init__(model, comm, policy)

    def _begin(self) -> None:
        comm, policy = self.comm, self.policy
        self._reducer = Reducer(comm, policy)
        is_exact = isinstance(self._reducer.wire, Exact)
        self._exact_sums = ExactSums(comm.device) if is_exact else None
        self._plan = BucketPlan((), comm.size)
        self._buckets = self._new_buckets(self._plan)  # that the next gradients go to
        self._idle: list[BucketSet] = []  # used ones, whose memory the next may take
        self._comparison = BucketComparison(
            comm, self._reducer, policy.staleness, self.stragglers, is_read_late=self._is_read_late
        )
        self._in_flight = InFlight[BucketSet](
            policy.staleness, lambda buckets, work: self._comparison.wait_for(buckets.tail, work)
        )
        self._bucketing = Bucketing(comm, self._reducer, policy)
        self._arrivals: dict[str, float] = {}  # name -> when its gradient was ready in this pass
        self._missing: list[int] = []  # gradients that each bucket waits for; [] if none does
        # What `p.grad` held before a pass whose gradients are rounded behind it.
        self._set_aside: dict[str, tuple[nn.Parameter, Tensor | None]] = {}
        self._rounding_pass = BackwardPass(self._begin_rounding, self._end_rounding)
        self._last_amp_scale = self._residual_factor = 1.0
        self._has_residuals = False
        self._pass_start_s = 0.0
        super()._begin()

    # -- what the user sees --------------------------------------------------------------------

    @property
    def buckets(self) -> list[list[str]]:
        """The names of each bucket's parameters, in the order in which buckets are sent."""
        return self._plan.buckets

    def unsent(self) -> dict[str, Tensor]:
        """name -> the flat residual of this worker's gradients that a lossy format has not sent."""
        self._wait_for_all()
        return self._reducer.unsent()

    def stats(self) -> ExchangeStats:
        reducer = self._reducer
        return ExchangeStats(
            self.num_exchanges,
            reducer.sent_bytes,
            reducer.busy_s,
            self._in_flight.exposed_s,
            self._num_completed,
        )

    def synchronize(self) -> None:
        self._forget_aborted_pass()
        super().synchronize()

    def flush(self) -> Iterator[int]:
        while self._in_flight:
            self._clear_gradients()
            buckets = self._in_flight.pop()
            self._deliver(buckets)
            self._comparison.raise_if_bad()
            yield buckets.step

    def state_dict(self) -> dict[str, Any]:
        common = super().state_dict()
        self._comparison.raise_if_bad()
        self._wait_for_all()
        in_flight = list(self._in_flight)
        for buckets in in_flight:
            self._complete(buckets)
        return {
            **common,
            **self._reducer.gather_state(self._plan.layouts),
            **self._bucketing.state_dict(),
            "buckets": self._plan.buckets,
            "scale": self._last_amp_scale,
            "in_flight": [
                buckets.state_dict(self.trained, self._divisor(buckets)) for buckets in in_flight
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        was_active = self._is_active
        if not state.get("buckets") or not (was_active or state["residuals"]):
            return  # a lone worker had none, or needs none
        names = {name for bucket in state["buckets"] for name in bucket}
        others = names ^ self.trained.keys()
        if others and not state["residuals"] and self._divided.may_have(others):
            return  # divided over other workers; sums depend on nothing else
        if others:
            cure = "the model as it was"
            if self._divided.may_have(others):
                cure = "as many workers, and as many copies of experts, or another `compression`"
            raise CheckpointError(
                "The checkpoint's exchange is of other parameters than the model's; resume with"
                f" {cure}."
            )
        if not was_active:
            self._activate()  # what was not sent yet joins a lone worker's first gradients
        self._bucketing.load_state_dict(state)
        self._last_amp_scale = state["scale"]
        self._set_plan(state["buckets"])
        self._reducer.load_gathered_state(self._plan.layouts, state)
        self._in_flight.clear()
        for saved in state["in_flight"]:
            buckets = self._new_buckets(self._plan)
            buckets.load_state_dict(saved)
            buckets.parameters = self.trained
            self._in_flight.push(buckets, ())

    def detach(self) -> None:
        super().detach()
        with suppress(AllstepError):  # of what nobody will look at any more
            self._wait_for_all()
        self._reducer.close()

    # -- the backward pass ---------------------------------------------------------------------

    def _on_gradient(self, name: str, p: nn.Parameter) -> None:
        """Called when a gradient is ready: counts it, and sends the buckets that are full.

        It is called for each parameter, so it does as little as possible.
        """
        super()._on_gradient(name, p)
        if name in self._set_aside and name in self._plan.large:
            self._end_rounding((name,))
        if self._num_suspended:
            if self._buckets.scaled:
                self._refuse_scaled()
            if name in self._plan.large:  # else it takes memory twice until the last micro-batch
                self._buckets.place_large(name, p, scale=1)
        elif name in self._arrivals:
            self._take_again(name)
        else:
            self._arrivals[name] = perf_counter()
            missing, plan = self._missing, self._plan
            if missing:
                if name in plan.large:
                    self._buckets.place_large(name, p, self.batch.scale)
                bucket = plan.bucket_of[name]
                missing[bucket] -= 1
                if not missing[bucket]:
                    self._send_full()

    def _take_again(self, name: str) -> None:
        """Handles a second gradient of a parameter in one pass; fails if the first was sent."""
        buckets = self._buckets
        if self._plan.bucket_of[name] >= len(buckets.works) and name not in buckets.scaled:
            self._bucketing.note_second_gradient()
            return
        self._fail(
            f"Parameter `{name}` got a second gradient in one backward pass, after the first had"
            " been put in its bucket (reentrant checkpointing, or a module used in several of"
            f" them); attach with `{type(self.policy).__name__}(overlap=False)` or use"
            " `use_reentrant=False`."
        )

    def _begin_backward(self) -> None:
        self._pass_start_s = perf_counter()
        self._forget_aborted_pass()
        if self._bucketing.may_overlap and self._failure is None and not self._stays_local:
            self._missing = [len(layout.names) for layout in self._plan.layouts]

    def _fail(self, message: str) -> None:
        super()._fail(message)
        self._missing = []

    def _forget_aborted_pass(self) -> None:
        """Resets after a pass that ended with an exception, whose messages can't be undone."""
        if self._buckets.works:
            self._stop_all(
                "An earlier backward pass ended with an exception after some of its gradients had"
                " been sent; restart from a checkpoint."
            )
        self._refuse_scaled()
        self._arrivals.clear()
        self._missing = []

    def _refuse_scaled(self) -> None:
        """Refuses to add to gradients that a pass with an exception has scaled already."""
        scaled, trained = self._buckets.scaled, self.trained
        if any(trained[name].grad is self._buckets.views[name] for name in scaled & trained.keys()):
            self._fail(
                "An earlier backward pass ended with an exception after some of its gradients had"
                " been scaled for the exchange; call `optimizer.zero_grad()` before the next one."
            )
        scaled.clear()

    def _send_full(self) -> None:
        """Sends the next buckets that are full, in the plan's order."""
        with torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT:  # for second derivatives
            while self._missing and not self._missing[len(self._buckets.works)]:
                self._send_next()

    def _send_next(self) -> None:
        """Sends the next bucket in the plan's order."""
        buckets, index, compare = self._buckets, len(self._buckets.works), None
        if index == 0:
            self._comparison.raise_if_bad()
            self._has_residuals = self._reducer.has_residuals
            buckets.step, buckets.amp_scale = self.num_exchanges, self._present_amp_scale()
            self._residual_factor = buckets.amp_scale / self._last_amp_scale
            self._last_amp_scale = buckets.amp_scale
            state = self._next_state(buckets.flats[0].device)
            described = (self._describe(), self._signature, self._digest)
            compare = self._comparison.write(buckets.tail, *described, state)
            buckets.tail.write_note(self.comm.rank, self.batch.weighing, self.stragglers.own_times)
        if self._failure is None:
            self._fill(index)
        if index == len(self._plan.layouts) - 1:
            if self._exact_sums is not None:
                self._exact_sums.settle(buckets.off_grid)
            buckets.write_flags(self._touched, self._failure)
            self._missing = []
        work = self._reducer.start(
            buckets.buckets[index],
            residual_factor=self._residual_factor,
            flags=buckets.flags_without(index, self._touched) if self._has_residuals else None,
            then=compare,
        )
        buckets.works.append(work)

    def _fill(self, index: int) -> None:
        """Copies a bucket's gradients to it; errors are reported to all workers at the end."""
        try:  # what `_telling_all` does, without a generator in each bucket
            if self._set_aside:
                self._end_rounding(self._plan.layouts[index].names)
            trained, scale = self.trained, self.batch.scale
            self._buckets.fill(index, trained, self._touched, scale)
        except UsageError as error:
            self._fail(str(error))

    # -- exact sums ------------------------------------------------------------------------------

    @property
    def _off_grid(self) -> OffGrid:
        return self._buckets.off_grid

    def _on_output_gradient(self, gradient: Tensor) -> None:
        if self._rounder is not None:
            self._rounding_pass.request()
        super()._on_output_gradient(gradient)

    def _begin_rounding(self) -> None:
        """Before the gradients of a pass: large ones are rounded when they come, others behind it.

        Between two kernels of a model little of what rounds is in the processor's caches: one by
        one small ones take eight times as long. Others' hooks see in `p.grad` how it adds up.
        """
        self._end_rounding()  # that of a pass that has failed
        for name, p in self.trained.items():
            if has_one_hook(p):
                self._set_aside[name] = p, p.grad
                p.grad = None

    def _end_rounding(self, names: Iterable[str] | None = None) -> None:
        """Rounds the pass's gradients of some parameters; of all remaining ones if None."""
        for name in list(self._set_aside) if names is None else names:
            if found := self._set_aside.pop(name, None):
                p, before = found
                new, p.grad = p.grad, before
                if new is not None and self._exact_sums is not None:
                    buckets = self._buckets
                    self._exact_sums.add(buckets.off_grid, name, p, new, buckets.views.get(name))

    def _round(self, name: str, p: nn.Parameter, new: Tensor | None) -> Tensor | None:
        """The gradient to add to `p.grad` now; None to add it unchanged."""
        if self._exact_sums is not None and self._exact_sums.take_call(name):
            self._end_rounding([name])
            return None
        if new is None or name in self._set_aside or new.layout != torch.strided:
            return None
        rounder = self._rounder
        if rounder is None:
            return None
        buckets = self._buckets
        view = buckets.views[name] if name in self._plan.large else None
        return rounder.round(buckets.off_grid, name, p, new, view=view)

    def _end_global_batch(self) -> None:
        self._end_rounding()
        super()._end_global_batch()

    def _sum_copies(self, buckets: BucketSet) -> None:
        """Sums gradients of divided modules over their copies. Collective if there are copies."""
        if self._exact_sums is not None and self.is_divided:
            self._exact_sums.settle(buckets.off_grid)
        self._divided.sum_copies(buckets.off_grid)

    def _finish_sums(
        self, buckets: BucketSet, summed: Mapping[str, nn.Parameter], divisor: Tensor | None
    ) -> None:
        """Finishes sums that have arrived, by adding divided parameters' gradients off the grid."""
        if self._rounder is not None:
            completed = buckets.completed or ()
            rounder, number = self._rounder, self.num_exchanges
            rounder.follow(buckets.off_grid, completed, summed, self.divided, number)
        self._divide_sums(summed.values(), divisor)

    def _complete(self, buckets: BucketSet) -> None:
        """Adds gradients off the grid to sums that have arrived. Collective."""
        if self._exact_sums is None or self._failure is not None:
            return  # without a look at flags, for which the host would wait
        is_alone = self.comm.size == 1 or not self._reducer.adds_up
        buckets.complete(None if is_alone else self.comm)

    # -- the end of a backward pass --------------------------------------------------------------

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        buckets = self._buckets
        if not buckets.flats:
            if self.is_divided:
                told = agree(self.comm, self._describe(), told=self.batch.note())
                self._sum_copies(buckets)
                self._finish_sums(buckets, {}, self.batch.divisor_told(told))
            return {}
        while len(buckets.works) < len(buckets.flats):
            self._send_next()
        buckets.parameters = self.trained
        self._in_flight.push(buckets, buckets.works)
        if self.policy.staleness:
            self._clear_gradients()
        due = self._in_flight.pop_due()
        self.has_gradients = due is not None
        delivered = self._deliver(due) if due is not None else {}
        if not self._revise_plan():
            self._take_buckets()
        return delivered

    def _deliver(self, buckets: BucketSet) -> Mapping[str, nn.Parameter]:
        """Puts the sums in `p.grad`, for parameters of which any worker has a gradient."""
        # With a grid all look at the flags anyway, and go on by them.
        self._comparison.receive(buckets.tail, now=self._exact_sums is not None)
        self._complete(buckets)
        if self._scaler is not None and self.policy.staleness:
            factor = self._scaler.get_scale() / buckets.amp_scale
            if factor != 1:
                buckets.rescale(factor)
        parameters, names = buckets.parameters, buckets.summed_names()
        if self.policy.staleness:  # [Note: stale timeline]
            names = [n for n in names if n in parameters and parameters[n].requires_grad]
        summed = {name: parameters[name] for name in names}
        self._sum_copies(buckets)
        if self._failure is None:
            views = buckets.views
            for name, p in summed.items():
                if p.grad is not views[name]:  # most gradients lie there already
                    buckets.deliver(name, p)
            self._finish_sums(buckets, summed, self._divisor(buckets))
        if buckets.plan is self._plan:
            self._idle.append(buckets)
        return summed

    def _divisor(self, buckets: BucketSet) -> Tensor | None:
        """The divisor of sums that have arrived; None for gradients of means. [Note: weights]"""
        if buckets.divisor is not None:
            return buckets.divisor
        total = buckets.tail.total_weight(adds_up=self._reducer.adds_up)
        return self.batch.divisor(total, buckets.tail.weighing)

    def _describe(self) -> str:
        is_held = self._exact_sums is not None and self.batch.step is not None
        held = self._carry_over.in_words(self.trained) if is_held else ""
        return super()._describe() + held

    def _present_amp_scale(self) -> float:
        matters = self.policy.staleness or self._reducer.has_residuals
        return self._scaler.get_scale() if self._scaler and matters else 1.0

    def _wait_for_all(self) -> None:
        self._in_flight.wait()
        for work in self._buckets.works:
            work.wait()

    def _clear_gradients(self) -> None:
        for p in self.trained.values():
            p.grad = None

    # -- agreement -----------------------------------------------------------------------------

    def _agree(self, action: str, described: Signature = (), described_digest: int = 0) -> None:
        self._comparison.raise_if_bad()
        if buckets := self._buckets.buckets:
            tail = self._buckets.tail
            self._comparison.agree(buckets, tail, action, described, described_digest)
        else:
            super()._agree(action, described, described_digest)

    def _stop_all(self, message: str) -> NoReturn:
        if self._buckets.works:
            self._failure = message
            self._reduce()
        super()._stop_all(message)

    # -- the plan ------------------------------------------------------------------------------

    @property
    def _is_active(self) -> bool:
        return super()._is_active or self.policy.staleness > 0 or self._reducer.has_residuals

    def _holds_gradients(self) -> bool:
        return self.policy.staleness > 0 or self._rounder is not None

    def _hook_parameters(self) -> None:
        super()._hook_parameters()
        trained = set(self.trained.values())
        for buckets in self._in_flight:  # [Note: stale timeline]
            buckets.parameters = {n: p for n, p in buckets.parameters.items() if p in trained}
        self._set_plan(self._bucketing.guess(self.trained))

    def _hook(self, name: str, p: nn.Parameter) -> list[Removable]:
        handles = super()._hook(name, p)
        if self._exact_sums is not None:
            rounded = WeakHook(self, type(self)._round, name, p)
            handles.append(AccumulationHook(p, rounded))
        return handles

    def _revise_plan(self) -> bool:
        """Changes the buckets if the last backward pass suggests better ones; whether it does."""
        if not self._bucketing.is_due(self.num_exchanges):
            return False
        backward_s = perf_counter() - self._pass_start_s - self._in_flight.last_wait_s
        if self._bucketing.is_recorded:
            self._wait_for_all()  # exchanges will be timed
        in_order = () if self._bucketing.is_recorded else self._arrivals
        trained, start_s = self.trained, self._pass_start_s
        gradients = [
            ready_gradient(name, trained[name], self._arrivals.get(name, start_s) - start_s)
            for name in dict.fromkeys([*in_order, *self._plan.names])
        ]
        self._set_plan(self._bucketing.revise(gradients, backward_s))
        return True

    def _set_plan(self, buckets: list[list[str]]) -> None:
        self._wait_for_all()
        if self._exact_sums is not None:
            self._exact_sums.refuse_complex({**self.trained, **self.divided})
        self._plan = BucketPlan.of(buckets, self.trained, self.comm.size)
        self._reducer.set_layouts(self._plan.layouts)
        self._idle.clear()
        # A parameter may join in the middle of a global batch; what was sent keeps its own.
        off_grid = {} if self._buckets.works else self._buckets.off_grid
        self._take_buckets()
        self._buckets.off_grid |= off_grid

    def _take_buckets(self) -> None:
        """Buckets for the next exchange, in memory that is no longer used if there is any."""
        self._arrivals.clear()
        self._buckets = self._idle.pop() if self._idle else self._new_buckets(self._plan)
        self._buckets.recycle()

    def _new_buckets(self, plan: BucketPlan) -> BucketSet:
        """Makes new buckets. Collective."""
        return BucketSet.new(plan, self._reducer.new_block(plan.num_bytes))
