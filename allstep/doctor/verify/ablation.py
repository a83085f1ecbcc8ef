"""Removes factors from a training: if runs agree without a factor, it is the cause."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from allstep.comm import StageModules
from allstep.doctor.verify.constants import ConstantRandomNumbers
from allstep.doctor.verify.float64 import Float64, make_float64
from allstep.doctor.verify.record import WorkerRecord
from allstep.exchange import Exchange, ExchangePolicy, FunctionHook, Synchronous

Factor = Literal[
    "batch norm",
    "random state",
    "random data",
    "random loader",
    "exchange policy",
    "order of sums",
    "float32",
]

_ITERATE = DataLoader.__iter__


class Ablation:
    """Removes some factors from a training.

    Args:
        factors: "batch norm" makes it use its running statistics; "random state" replaces
            random numbers by a constant from the first training forward on; "random data" does
            so too, and takes the gradients out of the first step, whose data were drawn before;
            "random loader" begins where a DataLoader is iterated, whose processes draw ahead;
            "exchange policy" sends means as they are; "order of sums" makes sums exact, in loops
            of `steps`; "float32" computes in float64.
        record: of this worker, which tells when the first step is over.
    """

    def __init__(self, factors: Sequence[Factor], record: WorkerRecord) -> None:
        self._factors = frozenset(factors)
        self._record = record
        self._constant: ConstantRandomNumbers | None = None
        self._float64: Float64 | None = None

    @property
    def is_float64(self) -> bool:
        """Whether everything is computed in float64."""
        return "float32" in self._factors

    def policy(self, policy: ExchangePolicy | None) -> ExchangePolicy | None:
        """The exchange policy to attach with."""
        reduction = "mean" if policy is None else policy.reduction
        if "order of sums" in self._factors:
            return Synchronous(reduction=reduction, compression="exact")
        if policy is None or "exchange policy" not in self._factors:
            return policy
        return Synchronous(reduction=reduction)

    def prepare(self, model: nn.Module) -> None:
        """Changes a model that is about to be attached."""
        if self.is_float64:
            make_float64(model)
            if self._float64 is None:
                self._float64 = Float64()
                self._float64.__enter__()  # type: ignore[no-untyped-call]

    def apply(self, exchange: Exchange) -> None:
        """Changes a model that was just attached."""
        if "batch norm" in self._factors:
            for module in exchange.model.modules():
                if isinstance(module, _BatchNorm):
                    _freeze_statistics(module)
        if "random loader" in self._factors:
            self._replace_iteration()
        if "random state" in self._factors or "random data" in self._factors:
            hook = FunctionHook(self, self._before_forward)
            for module in called_modules(exchange.model).values():
                module.register_forward_pre_hook(hook)
        if "random data" in self._factors:
            for p in exchange.model.parameters():
                if p.requires_grad and not is_lazy(p):
                    p.register_hook(self._without_first_step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Restores random numbers and float32."""
        if self._constant is not None:
            self._constant.__exit__(None, None, None)
            self._constant = None
        if self._float64 is not None:
            self._float64.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._float64 = None
        DataLoader.__iter__ = _ITERATE  # type: ignore[method-assign]

    def _replace_iteration(self) -> None:
        def iterate(loader: DataLoader[Any]) -> Any:
            self._make_constant()
            return _ITERATE(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._make_constant()

    def _without_first_step(self, gradient: Tensor) -> Tensor:
        return gradient if self._record.steps else torch.zeros_like(gradient)

    def _make_constant(self) -> None:
        if self._constant is None:
            self._constant = ConstantRandomNumbers()  # type: ignore[no-untyped-call]
            self._constant.__enter__()


def called_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that a training calls by name: the model, "", or this worker's stages.

    >>> list(called_modules(nn.Linear(2, 1)))
    ['']
    """
    stages = (module for module in model.modules() if isinstance(module, StageModules))
    return {number: stage for of in stages for number, stage in of.items()} or {"": model}


def _freeze_statistics(module: _BatchNorm) -> None:
    """Makes batch norms evaluate in each forward pass, before other hooks read the mode."""
    was_training: list[bool] = []

    def before(module: nn.Module, _: Any) -> None:
        was_training.append(module.training)
        module.training = False

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        module.training = was_training.pop()

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after)
