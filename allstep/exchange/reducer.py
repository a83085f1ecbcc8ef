"""Sums buckets over the workers, overlapped with the backward pass."""

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
    """Scaled gradients in one flat tensor, to be summed over the workers.

    Attributes:
        layout: the gradients' places.
        flat: the gradients, then the tail; [num_elements + num_tail].
        index: index among the buckets of a step; None for a separate one.
        is_last: whether it is the last bucket of a step.
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
    """Sums buckets over the workers, in a wire format, in the order of the calls.

    Its collectives use a group of their own: meanwhile workers may call other collectives of `comm`
    in the main thread, at different times. See `channel_of`.

    Args:
        comm: the workers.
        policy: wire format, algorithm, and whether steps wait for their sums.

    Attributes:
        wire: the wire format.
        transport: the process group, and the all-reduce algorithm.
        adds_up: whether workers' values are summed at all.
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
        """The default size of buckets.

        It is large if sums are taken in shared memory, because workers synchronize for each bucket,
        and on an accelerator, where each takes many kernel launches; otherwise it is small, so that
        the network starts early.
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
        """Whether residuals of earlier gradients wait to be sent."""
        return self._states.has_residuals

    @property
    def measured_algorithm_for(self) -> Callable[[int], str] | None:
        """Number of bytes -> all-reduce algorithm, if the algorithms were measured."""
        algorithm = self.transport.algorithm
        if not isinstance(algorithm, Auto):
            return None
        return lambda num_bytes: algorithm.used_for(num_bytes).name

    @property
    def is_left_to_backend(self) -> bool:
        """Whether the backend itself sums all buckets that `set_layouts` was given."""
        return self._native is not None

    @property
    def _may_post(self) -> bool:
        """Whether buckets may be passed to the backend, which works on several at once."""
        return self._as_they_are and self.comm.size > 1 and not is_accelerator(self.comm.device)

    # -- buckets -------------------------------------------------------------------------------

    def set_layouts(self, layouts: Sequence[BucketLayout]) -> None:
        """Sets the layouts of all following buckets; none may be in flight.

        The residual of a parameter moves to its new bucket.
        """
        self._native = self._only_native(layouts)
        self._states.set_layouts(layouts)

    def copied_state(self, layout: BucketLayout) -> WireState:
        """A copy of the format's state for a bucket, for a sum that must not change the state."""
        return deepcopy(self._states.of(layout))

    def new_block(self, num_bytes: int) -> Block | None:
        """Shared memory in which buckets are summed in place, if it is used. Collective."""
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
            bucket: the bucket to sum.
            state: the format's state; None for the one kept for this bucket.
            residual_factor: ratio of the present GradScaler's scale to the one under which the
                residual was made.
            flags: name -> flag, for parameters of which this worker has no gradient; after the sum
                it says whether any worker has one; see `WireStates.restore`.
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
        """Sums a bucket, in the runner's thread or stream."""
        state = self._states.of(bucket.layout) if state is None else state
        if residual_factor != 1 and state.residual is not None:
            state.residual.mul_(residual_factor)
        self._states.remember(bucket.layout, state, flags)
        self.wire.sum_(bucket.flat, bucket.layout, state, self.transport)
        if bucket.is_last:
            self._states.restore()
            self._lift_first_timeout()

    def _post(self, native: Native, bucket: Bucket, then: Then | None) -> Work[None]:
        """Passes a bucket to the backend itself, which works on several at once."""

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
        """The backend's own sums, if all buckets can be passed to it.

        Otherwise those of the backend and of this reducer's thread could run in different orders on
        different workers.
        """
        if not self._may_post:
            return None
        algorithm = self.transport.algorithm
        sizes = [layout.num_elements * layout.flat_dtype.itemsize for layout in layouts]
        used = {algorithm.used_for(size) for size in sizes}
        only = used.pop() if len(used) == 1 else None
        return only if type(only) is Native else None

    def _lift_first_timeout(self) -> None:
        """Sets the communicator's own timeout, once all workers have exchanged once."""
        if self.comm.timeout_s < self._main_comm.timeout_s:
            self.comm.set_timeout(self._main_comm.timeout_s)

    # -- checkpoints ---------------------------------------------------------------------------

    def unsent(self) -> dict[str, Tensor]:
        """name -> flat residual that this worker has not sent yet. Waits for sums in flight."""
        self._runner.submit(lambda: None).wait()
        return self._states.unsent()

    def state_dict(self) -> dict[str, Any]:
        """The state that the next sums on this worker depend on."""
        return {"unsent": self.unsent(), "algorithm": self.transport.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state_dict` of the same rank. Collective."""
        algorithm = self.transport.algorithm
        self._runner.submit(lambda: algorithm.load_state_dict(state["algorithm"])).wait()
        self._states.load_unsent(state["unsent"])

    def gather_state(self, layouts: Sequence[BucketLayout]) -> dict[str, Any]:
        """The state of all workers for the next sums of these buckets, on rank 0. Collective."""
        algorithm = self.transport.algorithm.state_dict()
        return {"algorithm": algorithm, **self._states.gather(self.comm, layouts)}

    def load_gathered_state(
        self, layouts: Sequence[BucketLayout], state: Mapping[str, Any]
    ) -> None:
        """Continues from what `gather_state` returned. Collective."""
        self.transport.algorithm.load_state_dict(state["algorithm"])
        self._log_choices()
        self._native = self._only_native(layouts)
        self._states.load(self.comm, layouts, state)

    def _log_choices(self) -> None:
        algorithm = self.transport.algorithm
        if isinstance(algorithm, Auto) and algorithm.choices and self.comm.rank == 0:
            logging.getLogger("allstep").info(f"all-reduce by size: {algorithm.in_words}")


def _close(pid: int, runner: Runner, transport: Transport, comm: Communicator) -> None:
    """Releases all resources, once sums in flight have ended; see [Note: end of a group].

    In a process that was forked from this one it does nothing.
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
    """A communicator of the same workers with separate connections. Collective.

    For one worker, and on CUDA, it is `comm` itself: there the stream's order keeps collectives
    apart, and one NCCL communicator is safer than two.
    """
    if comm.size == 1 or is_accelerator(comm.device):
        return comm
    channel = comm.split(0, key=comm.rank)
    assert channel is not None
    return channel
