"""Local SGD: workers train independently for some steps, then average their parameters."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from allstep.comm import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.errors import CheckpointError
from allstep.exchange.hooks import FunctionHook, ModuleHook, Removable
from allstep.exchange.policy import LocalSGD


class ParameterAveraging:
    """Averages the workers' parameters every few global batches, in place.

    p = 1/size * sum_r p_r      after the global batches a + H, a + 2 H, ...

    with H = `sync_every` and a = `local_after_step` of the policy.

    [Note: rounds] Batches are counted, not the optimizer's steps: a GradScaler may skip a step
    on a single worker, and workers that count differently would wait for each other. An
    attached exchange counts with `count_batch` at the end of each synchronising backward pass.
    The average is taken right after the optimizer's step; a worker that has skipped the step takes
    it at its next forward, before the model is used again. If `count_batch` is never called, each
    step of the optimizer counts as a batch, and before `local_after_step` parameters are averaged
    after each.

    The exchange handles batch norm's running statistics. Between averages workers have different
    models: call `flush` on all workers before one of them saves or evaluates its own.

    Args:
        model: the same on every worker.
        comm: the workers.
        optimizer: the optimizer of the model's parameters; no other may update them.
        policy: how often parameters are averaged, and how the mean is used.
        algorithm: number of bytes -> all-reduce algorithm, if not the policy's.

    Attributes:
        num_batches: number of batches counted so far.
        algorithm_for: number of bytes -> all-reduce algorithm.

    Example:
        >>> import torch, allstep
        >>> model, comm = torch.nn.Linear(2, 1), allstep.Communicator.single_process()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> averaging = ParameterAveraging(model, comm, optimizer, allstep.LocalSGD(sync_every=16))
        >>> model(torch.ones(3, 2)).mean().backward()
        >>> optimizer.step()  # after every 16th, parameters are the mean over the workers
        >>> averaging.flush()

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019; Lin et al.,
    "Don't use large mini-batches, use local SGD", ICLR 2020, on post-local SGD; Douillard et
    al., "DiLoCo", 2023, arXiv:2311.08105.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        optimizer: torch.optim.Optimizer,
        policy: LocalSGD,
        *,
        algorithm: Callable[[int], str] | None = None,
    ) -> None:
        self.num_batches = 0
        self._model, self._comm, self._optimizer = model, comm, optimizer
        self._policy, self._outer_optimizer = policy, policy.outer_optimizer
        own = policy.algorithm if isinstance(policy.algorithm, str) else default_algorithm(comm)
        self.algorithm_for = algorithm or (lambda num_bytes: own)
        self._is_driven = False  # whether somebody calls `count_batch`
        self._has_warned = False
        self._num_averaged = 0  # batches whose updates are in everyone's parameters
        self._in_round: set[str] = set()  # parameters that were trained in this round
        self._once_trained: set[str] = set()
        self._moved: set[str] = set()  # frozen ones, in this round: by zeros, with momentum
        self._anchors: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._hooks: list[Removable] = [
            optimizer.register_step_pre_hook(FunctionHook(self, self._before_step)),
            optimizer.register_step_post_hook(FunctionHook(self, self._after_step)),
            ModuleHook(
                model,
                model.register_forward_pre_hook,
                FunctionHook(self, self._before_forward),
            ),
        ]

    def is_local(self, step: int) -> bool:
        """Whether the gradients of a global batch are not exchanged.

        Args:
            step: the batch's number, from 0.
        """
        return step >= self._policy.local_after_step

    def count_batch(self, *, was_exchanged: bool) -> None:
        """Counts a global batch whose gradients are complete. Collective if a round has ended.

        Args:
            was_exchanged: whether `p.grad` is the mean over the workers, so that their
                parameters stay equal.
        """
        self._is_driven = True
        self.average_if_due()
        self._count()
        if was_exchanged:
            self._end_round()
            self._anchors.clear()

    @property
    def is_synchronized(self) -> bool:
        """Whether all workers have the same parameters."""
        return self._num_averaged == self.num_batches

    def flush(self) -> None:
        """Ends the round now, so that all workers have the same parameters. Collective."""
        if not self.is_synchronized:
            self._average()

    def warn_if_local(self) -> None:
        """Warns once if parameters are used during a round, in which each worker has its own."""
        if self._has_warned or self._comm.size == 1 or self.is_synchronized:
            return
        self._has_warned = True
        warnings.warn(
            "Parameters are evaluated, copied, saved or detached amid a round of local SGD, when"
            " each worker has its own; call `exchange.sync_buffers()` (`flush()` of a"
            " ParameterAveraging) on every worker first.",
            stacklevel=2,
        )

    def detach(self) -> None:
        """Removes the hooks from model and optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state of the rounds, the same on every worker after `flush`."""
        return {
            "num_batches": self.num_batches,
            "num_averaged": self._num_averaged,
            "anchors": {name: tensor.clone() for name, tensor in self._anchors.items()},
            "momenta": {name: tensor.clone() for name, tensor in self._momenta.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned.

        Raises:
            CheckpointError: if it was saved for another model.
        """
        parameters = self._parameters()
        for name, tensor in {**state["anchors"], **state["momenta"]}.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise CheckpointError(
                    f"The checkpoint averages a parameter `{name}` of shape {list(tensor.shape)},"
                    " which the model does not have; load it into the model that it was made with."
                )
        self.num_batches, self._num_averaged = state["num_batches"], state["num_averaged"]
        self._anchors = {n: t.to(parameters[n].device) for n, t in state["anchors"].items()}
        self._momenta = {n: t.to(parameters[n].device) for n, t in state["momenta"].items()}

    # -- hooks ---------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.average_if_due()
        if not self._model.training:
            self.warn_if_local()

    def _before_step(self, *_: Any) -> None:
        self._moved.update(name for name, p in self._frozen().items() if p.grad is not None)
        if self.is_local(self.num_batches - int(self._is_driven)):
            self._set_anchors()

    def _after_step(self, *_: Any) -> None:
        if not self._is_driven:
            self._count()
        self.average_if_due()

    # -- the average ---------------------------------------------------------------------------

    def _count(self) -> None:
        self.num_batches += 1
        self._in_round.update(self._parameters())
        self._once_trained |= self._in_round

    def _end_round(self) -> None:
        """Begins a new round: all workers have the same parameters."""
        self._num_averaged = self.num_batches
        self._in_round.clear()
        self._moved.clear()

    def average_if_due(self) -> None:
        """Averages parameters if the round's last batch was counted. Collective if it was."""
        num_local = self.num_batches - self._policy.local_after_step
        is_round_over = num_local <= 0 or num_local % self._policy.sync_every == 0
        if not self.is_synchronized and is_round_over:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        parameters = self._parameters() | self._moved_anywhere()
        means = self._means(parameters)
        if self._outer_optimizer is not None and self.is_local(self.num_batches - 1):
            self._set_anchors()  # of a worker that has skipped all steps of the round
            self._anchors = {n: a for n, a in self._anchors.items() if n in parameters}
            self._momenta = {n: m for n, m in self._momenta.items() if n in parameters}
            for name, anchor in self._anchors.items():
                start = anchor.to(parameters[name].dtype)  # what the parameter could hold of it
                self._outer_optimizer.step_(anchor, start - means[name], self._momenta[name])
                means[name] = anchor
        for name, p in parameters.items():
            p.copy_(means[name])
        if self._policy.average_optimizer_state:
            self._average_moments(parameters)
        self._end_round()

    def _average_moments(self, parameters: Mapping[str, Tensor]) -> None:
        """Averages the optimizer's tensors with a parameter's shape, if every worker has them."""
        moments = {
            f"{name} {key}": value
            for name, p in parameters.items()
            for key, value in self._optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.shape == p.shape
            if value.is_floating_point() or value.is_complex()
        }
        everyones = set.intersection(*map(set, self._comm.all_gather_object(list(moments))))
        shared = {name: moment for name, moment in moments.items() if name in everyones}
        for name, mean in self._means(shared).items():
            shared[name].copy_(mean)

    def _means(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means of tensors over the workers, in at least float32, sent as a single tensor."""
        means = {name: _at_least_float32(tensor) for name, tensor in tensors.items()}
        kinds = dict.fromkeys((mean.dtype, mean.device) for mean in means.values())
        for kind in kinds:
            names = [name for name, mean in means.items() if (mean.dtype, mean.device) == kind]
            flat = torch.cat([means[name].view(-1) for name in names])
            self._comm.all_reduce(flat, "mean", algorithm=self.algorithm_for(flat.nbytes))
            pieces = flat.split_with_sizes([means[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                means[name] = piece.view_as(means[name])
        return means

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Parameters trained in this round; other frozen ones are equal on all workers."""
        return {
            name: p
            for name, p in self._model.named_parameters()
            if (p.requires_grad or name in self._in_round) and not is_lazy(p)
        }

    def _frozen(self) -> dict[str, nn.Parameter]:
        """Parameters that were trained in earlier rounds, but not in this one."""
        names = self._once_trained - self._in_round
        if not names:  # as nearly always
            return {}
        parameters = self._model.named_parameters()
        return {name: p for name, p in parameters if name in names and not p.requires_grad}

    def _moved_anywhere(self) -> dict[str, nn.Parameter]:
        """Frozen parameters that an optimizer has changed, as torch's do if `p.grad` is left."""
        frozen = self._frozen()
        if not frozen:
            return {}
        moved = set[str]().union(*self._comm.all_gather_object(sorted(self._moved)))
        return {name: p for name, p in frozen.items() if name in moved}

    @torch.no_grad()
    def _set_anchors(self) -> None:
        """Saves the parameters at a round's beginning."""
        if self._outer_optimizer is None:
            return
        for name, p in self._parameters().items():
            if name not in self._anchors:
                self._anchors[name] = _at_least_float32(p).clone()
                self._momenta.setdefault(name, torch.zeros_like(self._anchors[name]))


def _at_least_float32(tensor: Tensor) -> Tensor:
    """The values as a contiguous tensor of at least float32; possibly the tensor itself."""
    tensor = tensor.detach()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()
