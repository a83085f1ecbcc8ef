"""Detects changes in the loop over a batch that `batch.backward` has not made."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.torch_classes import local_part


class _State(NamedTuple):
    """The parameters' gradients, with the version counters of gradients and parameters."""

    gradients: list[Tensor | None]
    parameter_versions: list[int]
    gradient_versions: list[int]


class GradientGuard:
    """Checks that only `batch.backward` changes gradients, and nothing parameters or rates.

    It checks while gradients are summed: a worker has only some of the micro-batches, so that any
    other change would make the result depend on the number of workers.

    Args:
        exchanges: the exchanges whose gradients and parameters are checked.
    """

    def __init__(self, exchanges: tuple[Exchange, ...]) -> None:
        self._exchanges = exchanges
        self._watched: list[tuple[str, nn.Parameter]] = []
        self._seen = _state_of(self._watched)
        self._rates: list[tuple[Optimizer, list[object]]] = []
        # Names of experts' parameters that had a gradient before the batch.
        self._earlier: list[str] = []

    def note_earlier(self) -> None:
        """Called before any backward pass of the batch, including experts' for other workers."""
        divided = (item for x in self._exchanges for item in x.divided.items())
        self._earlier = [name for name, p in divided if _has_gradient(p)]

    def begin(self) -> None:
        """Called when the loop over the batch's micro-batches begins."""
        optimizers = (optimizer for x in self._exchanges for optimizer in x.optimizers)
        self._rates = [(optimizer, _rates_of(optimizer)) for optimizer in optimizers]
        self.note()

    def end(self, step: int) -> None:
        """Called when the loop over the batch's micro-batches has ended.

        Raises:
            UsageError: if a learning rate has changed meanwhile; names the optimizer and the cure.
        """
        self.forget()
        for optimizer, rates in self._rates:
            if _rates_of(optimizer) != rates:
                raise UsageError(
                    f"The learning rate of the {type(optimizer).__name__} was changed in the loop"
                    f" over global batch {step}'s micro-batches, as by a scheduler's `step()`: it"
                    " would depend on the number of workers. Change it when that loop has ended,"
                    " or before it."
                )

    def note(self) -> None:
        """Accepts the present gradients and parameters."""
        self._watched = [item for x in self._exchanges for item in x.with_gradients.items()]
        self._seen = _state_of(self._watched)

    def refuse_earlier(self, step: int) -> None:
        """Refuses gradients from before the batch, which its weights would divide, too.

        Raises:
            UsageError: if `p.grad` held any.
        """
        # Experts may already have a gradient of this batch, from other workers' samples.
        others = (
            name
            for x in self._exchanges
            for name, p in x.with_gradients.items()
            if name not in x.divided and _has_gradient(p)
        )
        for name in chain(self._earlier, others):
            raise UsageError(
                f"The gradient of `{name}` was not zero before global batch {step}, whose"
                " losses have a `weight`: call `optimizer.zero_grad()` after each step."
            )

    def forget(self) -> None:
        """Allows changes of the gradients from now on."""
        self._watched = []
        self._seen = _state_of(self._watched)

    def check(self, step: int) -> None:
        """Checks that nothing has changed since `note`.

        Raises:
            UsageError: names what may have changed it, and the cure.
        """
        seen, now = self._seen, _state_of(self._watched)
        are_same = map(is_, now.gradients, seen.gradients)
        if all(are_same) and now[1:] == seen[1:]:  # comparing whole lists is fast
            return
        where = f"in the loop over global batch {step}'s micro-batches"
        for k, (name, _) in enumerate(self._watched):
            if now.parameter_versions[k] != seen.parameter_versions[k]:
                raise UsageError(_parameter_message(name, where))
            gradient = now.gradients[k]
            is_other = gradient is not seen.gradients[k]
            if is_other or now.gradient_versions[k] != seen.gradient_versions[k]:
                raise UsageError(_gradient_message(name, where, is_gone=gradient is None))


def _state_of(watched: Sequence[tuple[str, nn.Parameter]]) -> _State:
    gradients = [p.grad for _, p in watched]
    return _State(
        gradients,
        [p._version for _, p in watched],
        [-1 if gradient is None else gradient._version for gradient in gradients],
    )


def _rates_of(optimizer: Optimizer) -> list[object]:
    """The learning rates; for a tensor its version, as reading its value waits for the device."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [(id(x), x._version) if isinstance(x, Tensor) else x for x in rates]


def _has_gradient(p: nn.Parameter) -> bool:
    """Whether `p.grad` is there and not zero on this worker; the host waits for the device."""
    return p.grad is not None and bool(local_part(p.grad).any())


def _parameter_message(name: str, where: str) -> str:
    return (
        f"Parameter `{name}` was changed {where}, by hand, by `load_state_dict` or by its module"
        " itself, as with Embedding's `max_norm`: the change would depend on the number of"
        " workers. Change it when that loop has ended, or before it."
    )


def _gradient_message(name: str, where: str, *, is_gone: bool) -> str:
    how = (
        "dropped, as by `zero_grad()`"
        if is_gone
        else "changed, as by `loss.backward()`, by `zero_grad(set_to_none=False)` or by clipping"
    )
    return (
        f"The gradient of `{name}` was {how}, {where}: the sum would depend on the number of"
        " workers. In that loop call `batch.backward(loss)` and nothing else that changes"
        " gradients; zero, clip and step when it has ended."
    )
