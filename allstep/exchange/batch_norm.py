"""Batch norm's running statistics, the same on any number of workers."""

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from allstep.comm import Communicator
from allstep.comm.reproducible import ReproducibleSum, reproducible_all_reduce
from allstep.errors import UsageError
from allstep.exchange.batch_norm_module import TrackedModule, is_tracked
from allstep.exchange.parameters import ParameterSet

_MAX_TERMS = 16  # micro-batches whose statistics wait to be added


class RunningStatistics:
    """Batch norm's running statistics. [Note: linear running statistics]

    They take one exponential-average step per optimizer step, towards the sample-weighted
    mean of the statistics s_k of that step's micro-batches k, with m the module's momentum:

        R' = (1 - m) R + m sum_k w_k s_k        w_k = samples_k / samples of the global batch

    This is linear, so each worker r keeps a part, B_r, and the parts are summed only when
    they are needed (`Exchange.sync_buffers`): with share_k = size * w_k, and sums over the
    worker's own micro-batches,

        B_r' = (1 - m) B_r + m sum_k share_k s_k        R = sum_r B_r / size

    The buffers of the module hold B_r / V_r, where V_r is the result of the same rule for
    statistics that are all 1, and R = sum_r B_r / sum_r V_r. V_r is 1 for a worker with an average
    share, and sum_r V_r = size if every micro-batch calls the module. So the buffers are sensible
    running statistics at all times, a worker without a micro-batch doesn't change them, and if only
    some micro-batches call a module, the others don't count.

    If a micro-batch calls a module several times, the mean over the calls counts.
    Modules in eval mode are not changed. `num_batches_tracked` counts steps.

    With one equal micro-batch per worker and step, torch's own update already is this rule; then
    `step` and `micro_batch` may be omitted.

    With exact sums the statistics of each step are summed over the workers at its end, so that
    every worker has R at all times: the same bits on any number of workers.

    Args:
        parameters: the model.
        comm: the workers.
        is_exact: whether sums must not depend on the order; see [Note: reproducible sum].
    """

    def __init__(
        self, parameters: ParameterSet, comm: Communicator, *, is_exact: bool = False
    ) -> None:
        self._parameters = parameters
        self._comm = comm
        self._is_exact = is_exact
        self._step_sum: ReproducibleSum | None = None
        self._new_terms: list[Tensor] = []  # of micro-batches, that it is without
        self._tracked: tuple[TrackedModule, ...] = ()
        self._is_in_step = False
        self._total = 1.0  # of the step's weights
        self._is_active = False  # in a micro-batch
        self._has_warned = self._has_told = False
        self._written: dict[tuple[nn.Module, str], bool] = {}  # buffer -> whether in vain
        self._leaves_out_nonfinite = False
        self.refresh()

    @property
    def has_modules(self) -> bool:
        """Whether the model has modules with running statistics."""
        return bool(self._tracked)

    def leave_out_nonfinite(self) -> None:
        """From now on ignores the statistics of micro-batches that hold NaN or infinity.

        Such a micro-batch counts as if it had not called the module, for a training that continues
        after such a step. The check makes the host wait for a GPU.
        """
        self._leaves_out_nonfinite = True

    def refresh(self) -> None:
        """Adds modules that joined the model and drops those that were removed."""
        known = {tracked.module: tracked for tracked in self._tracked}
        modules = [module for module in self._parameters.modules if is_tracked(module)]
        self._tracked = tuple(
            known.pop(m) if m in known else TrackedModule(m, self._before_state_dict)
            for m in modules
        )
        for tracked in known.values():
            tracked.remove()
        if self._is_active:
            for tracked in self._tracked:
                if not tracked.is_active:
                    tracked.enter()

    def detach(self) -> None:
        """Removes all hooks."""
        for tracked in self._tracked:
            tracked.remove()
        self._tracked = ()

    @contextmanager
    def step(self, total: Callable[[], float] | None = None) -> Iterator[None]:
        """Encloses the micro-batches of one optimizer step; at its end the buffers are updated.

        Args:
            total: returns, at the end, the sum of all workers' weights; 1 if None.
        """
        for tracked in self._tracked:
            tracked.start_step()
        self._step_sum = None
        self._new_terms.clear()
        self._is_in_step = True
        before = self._look_at_others()
        try:
            yield
        finally:
            self._is_in_step = False
        self._tell_of_changed(before)
        self._total = 1.0
        if total is not None and self._tracked:
            self._total = total() or 1.0  # without any weight there is nothing to divide
        if self._leaves_out_nonfinite and not self._is_exact:
            self._leave_out_nonfinite()
        if self._is_exact and self._tracked:
            self._sum_micro_batches()
        self._take_in()

    def micro_batch(self, weight: float | Callable[[], float]) -> AbstractContextManager[None]:
        """Encloses the forward (and backward) of one micro-batch.

        Args:
            weight: samples of the micro-batch / samples of the global batch; or a function that
                returns the weight when it ends, as a part of `step`'s total.

        Raises:
            UsageError: outside of `step`.
        """
        if not self._is_in_step:
            raise UsageError("`micro_batch` belongs inside `with statistics.step():`.")
        return _MicroBatch(self, weight, 1.0 if self._is_exact else self._comm.size)

    def enter(self) -> None:
        """Begins a micro-batch."""
        self._is_active = True
        for tracked in self._tracked:
            tracked.enter()

    def leave(self, share: float | None) -> None:
        """Ends a micro-batch; without a share if it failed."""
        self._is_active = False
        moved = [t.module for t in self._tracked if t.is_active and t.module.momentum != 1]
        for tracked in self._tracked:
            tracked.leave(share)
        if moved and share is not None:
            raise UsageError(
                f"`momentum` of a {type(moved[0]).__name__} was changed in the loop over a global"
                " batch's micro-batches, which take one step of the running statistics together:"
                " change it before that loop."
            )
        if self._is_exact and share is not None and self._tracked:
            if self._leaves_out_nonfinite:
                self._leave_out_nonfinite()
            self._add_micro_batch(share)

    def sync(self) -> None:
        """Makes the buffers R on all workers, and other modules' buffers rank 0's. Collective."""
        if self._tracked:
            if self._comm.size > 1 and not self._is_exact:
                self._sum_parts()
            self._count_steps()
        others = {id(buffer): buffer.detach() for _, _, buffer in self._other_buffers()}
        if others:
            self._comm.broadcast(tuple(others.values()), root=0)
        self._forget_parts()

    def settle(self) -> None:
        """Does what `sync` does, for exact sums, where every worker already has R; not collective.

        Other modules' buffers are not changed.
        """
        self._count_steps(has_all=True)
        self._forget_parts()

    def _forget_parts(self) -> None:
        for tracked in self._tracked:
            tracked.forget_part()

    def state_dict(self) -> dict[str, Any]:
        """The state beside the buffers: (V_r, steps, uses) of each module."""
        return {"modules": [(t.weight, t.num_steps, t.num_uses) for t in self._tracked]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned, with the buffers of that moment."""
        for tracked, saved in zip(self._tracked, state["modules"], strict=True):
            tracked.weight, tracked.num_steps, tracked.num_uses = saved

    def mark_local(self) -> None:
        """Records that this worker's buffers were updated locally."""
        for tracked in () if self._is_exact else self._tracked:
            tracked.is_local |= tracked.module.training

    def warn_if_local(self, *, in_training: bool = False) -> None:
        """Warns once if statistics are used before the workers' parts were summed.

        Args:
            in_training: whether those of modules in training mode are used, too.
        """
        if self._has_warned or self._comm.size == 1:
            return
        if any(t.is_local and (in_training or not t.module.training) for t in self._tracked):
            self._has_warned = True
            warnings.warn(
                "Batch norm statistics that differ between workers are evaluated, frozen, saved,"
                " detached or copied (by an `AveragedModel`, too); call `exchange.sync_buffers()`"
                " on every worker first.",
                stacklevel=2,
            )

    def _before_state_dict(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        """Hook of each module, because parts of the model may be saved separately."""
        if not keep_vars:
            self.warn_if_local(in_training=True)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Does what a module's hook would have done if registered before this forward."""
        for tracked in self._tracked:
            if tracked.module is module:
                tracked.before_forward(tracked.module, args)

    def _other_buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Buffers of other modules, which may be updated locally by other rules."""
        tracked = {t.module for t in self._tracked}
        for module in self._parameters.modules:
            for name, buffer in module._buffers.items() if module not in tracked else ():
                if buffer is not None and not is_lazy(buffer):
                    yield module, name, buffer

    def _look_at_others(self) -> list[tuple[nn.Module, str, Tensor, int, Tensor | None]]:
        """Other modules' buffers with versions; with values if an earlier step has written them."""
        if self._comm.size == 1 or self._comm.rank > 0 or self._has_told:
            return []
        return [
            (m, name, x, x._version, None if self._written.get((m, name), True) else x.clone())
            for m, name, x in self._other_buffers()
            if name not in m._non_persistent_buffers_set  # caches
        ]

    def _tell_of_changed(
        self, before: list[tuple[nn.Module, str, Tensor, int, Tensor | None]]
    ) -> None:
        """Warns once if forward passes change buffers of other modules."""
        for module, name, old, version, value in before:
            new = module._buffers.get(name)
            if new is None or (new is old and new._version == version):
                continue
            is_same = value is not None and torch.equal(new, value)
            self._written[module, name] = is_same or self._written.get((module, name), False)
            if value is not None and not is_same:
                self._has_told = True
                logging.getLogger("allstep").warning(
                    "the buffer `%s` of a %s was changed in the loop over a global batch's"
                    " micro-batches: each worker changes its own, by its own micro-batches, so that"
                    " the model depends on the number of workers. Only batch norm's running"
                    " statistics are followed; change others when that loop has ended.",
                    name,
                    type(module).__name__,
                )
                return

    def _add_micro_batch(self, weight: float) -> None:
        """Adds a micro-batch to the step's sums, and its weight for modules that it called."""
        called = [float(bool(tracked.shares)) for tracked in self._tracked]
        parts = [
            statistic if has else torch.zeros_like(statistic)
            for tracked, has in zip(self._tracked, called, strict=True)
            for statistic in tracked.lent[:2]
        ]
        parts.append(torch.tensor(called, dtype=torch.float64).to(parts[0].device))
        flat = torch.cat(parts).mul_(weight)  # in float64, as the last of them is
        if self._step_sum is None:
            self._step_sum = ReproducibleSum(flat)
        if self._step_sum.shape != flat.shape:
            raise UsageError(
                "A batch norm module joined or left the model between two micro-batches of a global"
                " batch, whose exact sums are of other modules; do it between global batches."
            )
        self._new_terms.append(flat)
        if len(self._new_terms) == _MAX_TERMS:
            self._add_new_terms(self._step_sum)
        for tracked in self._tracked:
            tracked.shares = []  # its slot is free again

    def _add_new_terms(self, step_sum: ReproducibleSum) -> None:
        """Adds the statistics of several micro-batches, which costs as much as for one."""
        if self._new_terms:
            step_sum.add_each(torch.stack(self._new_terms))
            self._new_terms.clear()

    def _sum_micro_batches(self) -> None:
        """Sums each module's statistics of the step over all workers. Collective."""
        sizes = [len(buffer) for tracked in self._tracked for buffer in tracked.running]
        like = self._tracked[0].running[0]
        nothing = like.new_zeros(sum(sizes) + len(self._tracked), dtype=torch.float64)
        own = self._step_sum or ReproducibleSum(nothing)
        self._add_new_terms(own)
        (flat,) = reproducible_all_reduce(self._comm, [own])
        *statistics, called = torch.split(flat, [*sizes, len(self._tracked)])
        pairs = zip(statistics[::2], statistics[1::2], strict=True)
        for tracked, pair, share in zip(self._tracked, pairs, called.tolist(), strict=True):
            if share:
                tracked.shares = [share]
                for kept, statistic in zip(tracked.slots[0], pair, strict=False):
                    kept.copy_(statistic / share)

    def _take_in(self) -> None:
        """Makes one exponential-average step of the buffers and their weights."""
        groups = defaultdict[tuple[float, ...], list[TrackedModule]](list)
        for tracked in self._tracked:
            momentum = tracked.momentum()
            kept = (1 - momentum) * tracked.weight
            tracked.shares = [share / self._total for share in tracked.shares]
            tracked.weight = kept + momentum * sum(tracked.shares)
            tracked.num_steps += 1
            if tracked.shares and tracked.weight:
                tracked.num_uses += 1
                gain = momentum / tracked.weight
                shares = (gain * share for share in tracked.shares)
                groups[kept / tracked.weight, *shares].append(tracked)
        for (decay, *gains), members in groups.items():
            running = [buffer for tracked in members for buffer in tracked.running]
            torch._foreach_mul_(running, decay)
            for slot, gain in enumerate(gains):
                kept_in_slot = [x for tracked in members for x in tracked.slots[slot][:2]]
                torch._foreach_add_(running, kept_in_slot, alpha=gain)
            counters = [c for t in members if (c := t.num_batches_tracked) is not None]
            if counters:
                torch._foreach_add_(counters, 1)
        self.mark_local()

    def _leave_out_nonfinite(self) -> None:
        used = [(t, slot) for t in self._tracked for slot in t.slots[: len(t.shares)]]
        if not used:
            return
        numbers = [x for _, slot in used for x in slot[:2]]
        norms = [norm.to(self._comm.device) for norm in torch._foreach_norm(numbers, math.inf)]
        largest = torch.stack(norms).view(-1, 2).sum(1)
        for (tracked, slot), size in zip(used, largest.tolist(), strict=True):
            if not math.isfinite(size):
                tracked.drop(slot)

    def _sum_parts(self) -> None:
        """R = R_0 + sum_r V_r (R_r - R_0) / sum_r V_r, which keeps equal parts unchanged.

        The V_r are all 0 if momentum is 1 and the last step's statistics were ignored; then the
        parts come from an earlier step, and count equally.
        """
        running = tuple(buffer for tracked in self._tracked for buffer in tracked.running)
        base = tuple(buffer.clone() for buffer in running)
        self._comm.broadcast(base, root=0)
        weights = torch.tensor([t.weight for t in self._tracked], dtype=torch.float64)
        total = self._comm.all_reduce(weights.to(self._comm.device, copy=True)).tolist()
        shares = [
            t.weight / v if v else 1 / self._comm.size
            for t, v in zip(self._tracked, total, strict=True)
            for _ in "mv"
        ]
        parts = torch._foreach_sub(running, base)
        torch._foreach_mul_(parts, shares)
        self._comm.all_reduce(tuple(parts))
        torch._foreach_copy_(running, base)
        torch._foreach_add_(running, parts)

    def _count_steps(self, *, has_all: bool = False) -> None:
        """Counts the step in `num_batches_tracked` of the modules that any worker used.

        Args:
            has_all: whether this worker knows which modules all workers have used.
        """
        counted = [(t, c) for t in self._tracked if (c := t.num_batches_tracked) is not None]
        if not counted:
            return
        before = torch.stack([c - t.num_uses for t, c in counted])
        is_used = torch.tensor([int(t.num_uses > 0) for t, _ in counted], device=before.device)
        if self._comm.size > 1 and not has_all:
            self._comm.all_reduce((before, is_used), "max")
        for (tracked, counter), n, used in zip(counted, before, is_used, strict=True):
            counter.copy_(n + used * tracked.num_steps)


class _MicroBatch(AbstractContextManager[None]):
    """The context manager of `micro_batch`; a generator would be noticeably slower."""

    def __init__(
        self, statistics: RunningStatistics, weight: float | Callable[[], float], factor: float
    ) -> None:
        self._statistics = statistics
        self._weight, self._factor = weight, factor

    def __enter__(self) -> None:
        self._statistics.enter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._statistics.leave(None)
            return
        weight = self._weight() if callable(self._weight) else self._weight
        self._statistics.leave(self._factor * weight or None)  # without weight it has no say
