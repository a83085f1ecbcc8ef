"""Times the first steps of a user's script, by hooks on the model that it attaches.

[Note: profiled script] A step goes from one `optimizer.step()` of the model's parameters to the
next, whatever happens between: data, several micro-batches, clipping. A micro-batch is what goes
through the model for one backward pass, or for several if they come from the same outputs. The
last of these begins where it reaches the outputs; all before it, since the micro-batch or the step
before, counts as forward, and what follows the step's last one is the update.

Every parameter's gradient travels, so those that the last pass didn't make count, too: ready as it
begins if an earlier pass of the step made them, and as it ends if none did.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from allstep.comm import Communicator, Mesh
from allstep.device import default_device
from allstep.doctor.script import Attach
from allstep.doctor.timing import now_s, runnable_s
from allstep.doctor.workload import TimedStep, num_elements_of
from allstep.exchange import BackwardPass, Exchange, FunctionHook


@dataclass(frozen=True)
class ProfiledStep:
    """A step of a single worker, as measured.

    Attributes:
        num_samples: of each of its micro-batches.
        timed: the mean of them, in the proportions of the last, and the update.
    """

    num_samples: tuple[int, ...]
    timed: TimedStep


@dataclass
class _Forward:
    """A forward pass, and its samples until a backward pass starts from its outputs."""

    num_samples: int


@dataclass
class _Backward:
    """A backward pass: its start, its end, and the samples that no earlier one had."""

    begin_s: float
    end_s: float = 0.0
    num_samples: int = 0


class Profiler:
    """An observer that times the steps of the first attached model.

    Args:
        num_steps: enough of them; the one before the first isn't seen from its beginning.
        on_end: called after each step as soon as enough is known, or that nothing will be.

    Attributes:
        steps: whole ones.
        parameters: of the model, those that are trained.
        global_batch: what the script has told `attach`.
        is_cut: whether `allstep.steps` cuts a global batch in micro-batches.
        num_events: forwards and updates so far, from which one can see that the script lives.
        num_updates: calls of `step` of the model's optimizer.
        num_trained: of these, those after a backward pass.
    """

    def __init__(self, num_steps: int, on_end: Callable[[], None]) -> None:
        self.steps: list[ProfiledStep] = []
        self.parameters: dict[Tensor, None] = {}  # in order
        self.global_batch: int | None = None
        self.is_cut = False
        self.num_events = self.num_updates = self.num_trained = 0
        self._num_steps, self._on_end = num_steps, on_end
        self._exchange: Exchange | None = None
        self._optimizer: Optimizer | None = None
        self._start_s = self._core_start_s = 0.0
        self._passes: list[_Backward] = []  # of this step
        self._pass = _Backward(0.0)  # the last
        self._ready_s: dict[Tensor, float] = {}  # after it began, in order
        self._backward = BackwardPass(self._begin_pass, self._end_pass)
        self._is_watched = False  # whether the pass came through the outputs
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def attach(self, attach: Attach, model: nn.Module, *args: Any, **options: Any) -> Exchange:
        """Attaches a model; the first one is profiled."""
        exchange = attach(model, *args, **options)
        if self._exchange is None:
            self._exchange, self.global_batch = exchange, options.get("global_batch")
            hook = FunctionHook(self, self._after_forward)
            exchange.model.register_forward_hook(hook, with_kwargs=True)
            self._hook_parameters()
        return exchange

    def see_mesh(self, mesh: Mesh[Communicator]) -> None:
        """Ignores meshes."""

    def close(self) -> None:
        """Removes the hooks."""
        self._handle.remove()

    @property
    def is_attached(self) -> bool:
        """Whether the script has attached a model."""
        return self._exchange is not None

    # -- hooks ---------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        """Hooks the parameters; lazy ones exist after the first forward pass."""
        assert self._exchange is not None
        for p in self._exchange.model.parameters():
            if is_lazy(p) or p in self.parameters:
                continue
            if p.requires_grad and p.numel():
                self.parameters[p] = None
                p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _after_forward(self, model: nn.Module, args: Any, options: Any, output: Any) -> None:
        self.num_events += 1
        if not torch.is_grad_enabled():
            return
        self._hook_parameters()
        assert self._exchange is not None
        self.is_cut |= self._exchange.batch.step is not None
        forward = _Forward(_num_samples((args, options)))
        hook = functools.partial(self._on_output_gradient, forward)
        for x in _tensors(output):
            if x.grad_fn is not None:
                x.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, forward: _Forward, _: Tensor) -> None:
        self._backward.request()
        if not self._is_watched:
            self._is_watched = True
            self._pass = _Backward(now_s(default_device()))
            self._passes.append(self._pass)
            self._ready_s = dict.fromkeys(self._ready_s, 0.0)
        self._pass.num_samples = max(self._pass.num_samples, forward.num_samples)
        forward.num_samples = 0

    def _on_gradient(self, p: Tensor) -> None:
        self._backward.enter()
        if self._is_watched:
            self._ready_s.pop(p, None)
            self._ready_s[p] = perf_counter() - self._pass.begin_s

    def _begin_pass(self) -> None:
        self._is_watched = False

    def _end_pass(self) -> None:
        self._pass.end_s = now_s(default_device())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        owned = (p for group in optimizer.param_groups for p in group["params"])
        if self._optimizer not in (None, optimizer) or not any(p in self.parameters for p in owned):
            return
        self._optimizer = optimizer
        self.num_events += 1
        self.num_updates += 1
        self.num_trained += bool(self._passes)
        if self._start_s and self._passes:
            self.steps.append(self._finish_step())
        is_hopeless = not self.num_trained and self.num_updates > self._num_steps
        if len(self.steps) >= self._num_steps or is_hopeless:
            self._on_end()
        self._passes, self._ready_s = [], {}
        self._core_start_s, self._start_s = runnable_s(), now_s(default_device())

    def _finish_step(self) -> ProfiledStep:
        end_s, core_s = now_s(default_device()), runnable_s() - self._core_start_s
        last = self._pass
        last.end_s = last.end_s or end_s  # an update within the backward pass
        firsts = [i for i, each in enumerate(self._passes) if each.num_samples] or [0]
        before_s = self._passes[firsts[-1] - 1].end_s if firsts[-1] else self._start_s
        mean_s = (last.end_s - self._start_s) / len(firsts)
        scale = mean_s / (last.end_s - before_s)
        backward_s = scale * (last.end_s - last.begin_s)
        timed = TimedStep(
            forward_s=scale * (last.begin_s - before_s),
            backward_s=backward_s,
            optimizer_s=end_s - last.end_s,
            gradients=[(num_elements_of(p), scale * s) for p, s in self._ready_s.items()]
            + [(num_elements_of(p), backward_s) for p in self.parameters if p not in self._ready_s],
        )
        timed.core_s = core_s * timed.seconds / (end_s - self._start_s)
        return ProfiledStep(tuple(self._passes[i].num_samples for i in firsts), timed)


def _num_samples(inputs: Any) -> int:
    """The length of the first tensor; 1 where there is none."""
    return max(1, next((x.size(0) for x in _tensors(inputs) if x.dim()), 1))


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, mappings, dataclasses and torch's registered containers."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])
