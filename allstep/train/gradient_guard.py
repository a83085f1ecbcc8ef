"""Watches that nothing but `batch.backward` changes anything in the loop over a batch."""

from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.errors import UsageError
from allstep.exchange import Exchange
from allstep.torch_classes import local_part


class GradientGuard:
    """Makes sure that gradients change by `batch.backward` only; parameters and rates not at all.

    That is while gradients are being summed. A worker has some of the micro-batches, so that any
    other change would depend on the number of workers.

    Args:
        exchanges: whose gradients and parameters are looked at.
    """

    def __init__(self, exchanges: tuple[Exchange, ...]) -> None:
        self._exchanges = exchanges
        self._seen: list[tuple[str, nn.Parameter, Tensor | None, tuple[int, int]]] = []
        self._rates: list[tuple[Optimizer, list[object]]] = []
        self._earlier: list[str] = []  # experts' parameters that had a gradient before the batch

    def note_earlier(self) -> None:
        """Before any backward pass of the batch, also those of experts for others' samples."""
        divided = (item for x in self._exchanges for item in x.divided.items())
        self._earlier = [name for name, p in divided if _has_gradient(p)]

    def begin(self) -> None:
        """The loop over the batch's micro-batches begins."""
        optimizers = (optimizer for x in self._exchanges for optimizer in x.optimizers)
        self._rates = [(optimizer, _rates_of(optimizer)) for optimizer in optimizers]
        self.note()

    def end(self, step: int) -> None:
        """It has ended.

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
        """They are right as they are now."""
        found = (item for x in self._exchanges for item in x.with_gradients.items())
        self._seen = [(name, p, p.grad, _versions(p)) for name, p in found]

    def refuse_earlier(self, step: int) -> None:
        """What `p.grad` held before must not be divided by the weights of this batch.

        Raises:
            UsageError: if it held anything.
        """
        # Experts may have one of this batch already, of other workers' samples.
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
        """From now on they may be changed."""
        self._seen = []

    def check(self, step: int) -> None:
        """Checks that nobody has changed them since `note`.

        Raises:
            UsageError: names what may have done it, and the cure.
        """
        for name, p, gradient, versions in self._seen:
            if p.grad is not gradient or _versions(p) != versions:
                where = f"in the loop over global batch {step}'s micro-batches"
                if p._version != versions[0]:
                    raise UsageError(_parameter_message(name, where))
                raise UsageError(_gradient_message(name, where, is_gone=p.grad is None))


def _rates_of(optimizer: Optimizer) -> list[object]:
    """A tensor by its version, for to look at its value would mean to wait for its device."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [(id(x), x._version) if isinstance(x, Tensor) else x for x in rates]


def _has_gradient(p: nn.Parameter) -> bool:
    """Whether there is one that is not zero here; the host waits for it."""
    return p.grad is not None and bool(local_part(p.grad).any())


def _versions(p: nn.Parameter) -> tuple[int, int]:
    """How often the parameter and its gradient were changed in place."""
    return p._version, -1 if p.grad is None else p.grad._version


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
