"""Sums buckets over the workers, beside the backward pass."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from os import getpid
from time import perf_counter
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.algorithms import Auto, Dummy, Native, SharedMemory, make_algorithm
from allstep.comm.shared_memory import Block
from allstep.comm.work import END_S, BackendWork, JoinedWork, Work
from allstep.device import is_accelerator
from allstep.exchange.layout import BucketLayout
from allstep.exchange.policy import ExchangePolicy
from allstep.exchange.runner import Runner, begin_span, job_span, make_runner
from allstep.exchange.wire_states import WireStates
from allstep.exchange.wires import FullPrecision, Transport, WireState

NUM_AT_ONCE = 4  # buckets, where the backward pass is faster than the wire

Then = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class Bucket:
    """Scaled gradients side by side, of which the sum over the workers is wanted.

    Attributes:
        layout: where the gradients lie.
        flat: the gradients, then the tail; [num_elements + num_tail].
        index: among the buckets of a step; None for one that stands by itself.
        is_last: whether a step ends with it.
    """

    layout: BucketLayout
    flat: Tensor
    index: int | None = None
    is_last: bool = True

    @cached_property
    def span_name(self) -> str:
        """The name in a profiler's trace."""
        return f"allstep::bucket {'' if self.index is None else f'{self.index} '}reduce"


class Reducer:
    """Sums buckets over the workers in the order of the calls: a wire format, and where it runs.

    Its collectives have a group of their own: beside them, in the main thread, workers may
    call other collectives of `comm` at other times. See `channel_of`.

    Args:
        comm: the workers.
        policy: wire format, algorithm, and whether steps wait for their sums.

    Attributes:
        wire: the format.
        transport: the group, and how sums are taken.
        adds_up: whether workers' numbers come together at all.
    """

    def __init__(self, comm: Communicator, policy: ExchangePolicy) -> None:
        self.wire = policy.wire_format
        overlaps = comm.size > 1 and (policy.overlap or policy.staleness > 0)
        self._runner: Runner = make_runner(comm.device, overlaps=overlaps)
        self._main_comm = comm
        self.comm = channel_of(comm)
        self._as_they_are = isinstance(self.wire, FullPrecision)
        num_at_once = NUM_AT_ONCE if self._may_post else 1
        algorithm = make_algorithm(policy.algorithm, self.comm, self.wire.dtype, num_at_once)
        self.transport = Transport(self.comm, algorithm)
        self.adds_up = comm.size > 1 and not isinstance(algorithm, Dummy)
        self._log_choices()
        self._staleness = policy.staleness
        self._native: Native | None = None
        self._posted_s = self._last_end_s = 0.0
        if self.comm is not comm:
            self.comm.set_timeout(min(policy.first_timeout_s, comm.timeout_s))
        self._states = WireStates(self.wire)
        self.close = finalize(self, _close, getpid(), self._runner, self.transport, comm)

    # -- what it is good for -------------------------------------------------------------------

    @property
    def usual_bucket_bytes(self) -> int:
        """Large where sums are taken in place in memory, since workers meet for each, and on an
        accelerator, where each is many launches; else small, so that the network has work early.
        """
        algorithm = self.transport.algorithm
        in_memory = isinstance(algorithm, SharedMemory) and algorithm.fallback is None
        is_large = is_accelerator(self.comm.device) or (in_memory and self._as_they_are)
        return 32 << 20 if is_large else 8 << 20

    @property
    def busy_s(self) -> float:
        """Seconds in collectives, encoding and decoding so far."""
        return self._runner.busy_s + self._posted_s

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return self.transport.sent_bytes

    @property
    def has_residuals(self) -> bool:
        """Whether something of earlier gradients waits to be sent."""
        return self._states.has_residuals

    @property
    def measured_algorithm_for(self) -> Callable[[int], str] | None:
        """What tells how so many bytes are summed, where that was measured."""
        algorithm = self.transport.algorithm
        if not isinstance(algorithm, Auto):
            return None
        return lambda num_bytes: algorithm.used_for(num_bytes).name

    @property
    def is_left_to_backend(self) -> bool:
        """Whether the backend itself sums all buckets that `set_layouts` has told of."""
        return self._native is not None

    @property
    def _may_post(self) -> bool:
        """Whether buckets may be left to the backend, which works on several at once."""
        return self._as_they_are and self.comm.size > 1 and not is_accelerator(self.comm.device)

    # -- buckets -------------------------------------------------------------------------------

    def set_layouts(self, layouts: Sequence[BucketLayout]) -> None:
        """Tells of all buckets to come; nothing may be under way.

        What was not sent yet of a parameter goes along to its new bucket.
        """
        self._native = self._only_native(layouts)
        self._states.set_layouts(layouts)

    def copied_state(self, layout: BucketLayout) -> WireState:
        """What the format remembers of a bucket, for a sum that it shall not remember."""
        return deepcopy(self._states.of(layout))

    def new_block(self, num_bytes: int) -> Block | None:
        """Memory in which buckets are summed where they lie, if there is any. Collective."""
        algorithm = self.transport.algorithm
        if self._as_they_are and isinstance(algorithm, SharedMemory) and num_bytes:
            return algorithm.new_block(num_bytes)
        return None

    def start(
        self,
        bucket: Bucket,
        *,
        state: WireState | None = None,
        residual_factor: float = 1.0,
        flags: Mapping[str, Tensor] | None = None,
        then: Then | None = None,
    ) -> Work[None]:
        """Starts to make `bucket.flat` the sum over the workers; all must start the same.

        Args:
            bucket: what to sum.
            state: what the format remembers; None for what it has kept of this bucket.
            residual_factor: by which gradients are larger than when the residual was left: a
                GradScaler's scale has changed.
            flags: name -> the flag that will tell whether any worker has a gradient, for
                parameters for which this worker has none; see
                `WireStates.restore`.
            then: called at the end with the error, if there was one; may raise.
        """
        if self._native is not None:
            return self._post(self._native, bucket, then)
        span = job_span(bucket.span_name, bucket.flat.device, self._staleness)

        def call() -> None:
            try:
                with span:
                    self._sum(bucket, state, residual_factor, flags or {})
            except BaseException as error:
                if then is not None:
                    then(error)
                raise
            if then is not None:
                then(None)

        return self._runner.submit(call)

    def _sum(
        self,
        bucket: Bucket,
        state: WireState | None,
        residual_factor: float,
        flags: Mapping[str, Tensor],
    ) -> None:
        """In the runner's thread or stream."""
        state = self._states.of(bucket.layout) if state is None else state
        if residual_factor != 1 and state.residual is not None:
            state.residual.mul_(residual_factor)
        self._states.remember(bucket.layout, state, flags)
        self.wire.sum_(bucket.flat, bucket.layout, state, self.transport)
        if bucket.is_last:
            self._states.restore()
            self._lift_first_timeout()

    def _post(self, native: Native, bucket: Bucket, then: Then | None) -> Work[None]:
        """Hands a bucket to the backend itself, which works on several at once."""

        @torch.no_grad()
        def finish() -> None:
            end_s = perf_counter()
            self._posted_s += end_s - max(start_s, self._last_end_s)
            self._last_end_s = end_s
            if bucket.is_last:
                self._lift_first_timeout()
            if then is not None:
                then(None)

        work = native.post(bucket.flat)
        start_s = perf_counter()
        if not self._staleness and isinstance(work, BackendWork):
            begin_span(bucket.span_name, work.future)
        return JoinedWork([work], finish)

    def _only_native(self, layouts: Sequence[BucketLayout]) -> Native | None:
        """The backend's own sums if all buckets are left to it.

        Some by it and some by this reducer's thread would meet in another order on each worker.
        """
        if not self._may_post:
            return None
        algorithm = self.transport.algorithm
        sizes = [layout.num_elements * layout.flat_dtype.itemsize for layout in layouts]
        used = {algorithm.used_for(size) for size in sizes}
        only = used.pop() if len(used) == 1 else None
        return only if type(only) is Native else None

    def _lift_first_timeout(self) -> None:
        """All have met for the first time: from now on the communicator's own timeout holds."""
        if self.comm.timeout_s < self._main_comm.timeout_s:
            self.comm.set_timeout(self._main_comm.timeout_s)

    # -- checkpoints ---------------------------------------------------------------------------

    def unsent(self) -> dict[str, Tensor]:
        """name -> what this worker has not sent of its gradients yet, flat. Waits for what is."""
        self._runner.submit(lambda: None).wait()
        return self._states.unsent()

    def state_dict(self) -> dict[str, Any]:
        """What the next sums depend on, of this worker."""
        return {"unsent": self.unsent(), "algorithm": self.transport.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, by the same rank. Collective."""
        algorithm = self.transport.algorithm
        self._runner.submit(lambda: algorithm.load_state_dict(state["algorithm"])).wait()
        self._states.load_unsent(state["unsent"])

    def gather_state(self, layouts: Sequence[BucketLayout]) -> dict[str, Any]:
        """What the next sums of these buckets depend on, of all workers on rank 0. Collective."""
        algorithm = self.transport.algorithm.state_dict()
        return {"algorithm": algorithm, **self._states.gather(self.comm, layouts)}

    def load_gathered_state(
        self, layouts: Sequence[BucketLayout], state: Mapping[str, Any]
    ) -> None:
        """Goes on where `gather_state` was called. Collective."""
        self.transport.algorithm.load_state_dict(state["algorithm"])
        self._log_choices()
        self._native = self._only_native(layouts)
        self._states.load(self.comm, layouts, state)

    def _log_choices(self) -> None:
        algorithm = self.transport.algorithm
        if isinstance(algorithm, Auto) and algorithm.choices and self.comm.rank == 0:
            logging.getLogger("allstep").info(f"all-reduce by size: {algorithm.in_words}")


def _close(pid: int, runner: Runner, transport: Transport, comm: Communicator) -> None:
    """Gives all back, once what is under way has ended; see [Note: end of a group].

    A process that was forked from this one leaves it alone when it exits.
    """
    if getpid() != pid:
        return
    channel = transport.comm
    has_ended = runner.close(min(END_S, channel.timeout_s))
    transport.algorithm.close()
    if channel is comm:
        return
    if has_ended:
        channel.close()
    else:
        channel.abort()
        runner.close(END_S)  # its thread must not come back while the interpreter ends


def channel_of(comm: Communicator) -> Communicator:
    """The same workers on connections of their own; `comm` itself for one worker, or on CUDA.

    There the stream's order keeps collectives apart, and one NCCL communicator is safer than two.
    Collective.
    """
    if comm.size == 1 or is_accelerator(comm.device):
        return comm
    channel = comm.split(0, key=comm.rank)
    assert channel is not None
    return channel
