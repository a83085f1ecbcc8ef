"""Watches that nothing but `batch.backward` changes gradients in the loop over a batch."""

from torch import Tensor, nn

from allstep.errors import UsageError
from allstep.exchange import Exchange


class GradientGuard:
    """Makes sure that gradients change by `batch.backward` only, while they are being summed.

    Args:
        exchanges: whose gradients are looked at.
    """

    def __init__(self, exchanges: tuple[Exchange, ...]) -> None:
        self._exchanges = exchanges
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._seen: list[Tensor | None] = []
        self._versions: list[int] = []

    def note(self) -> None:
        """They are right as they are now."""
        trained = [exchange.trained for exchange in self._exchanges]
        self._names = [name for parameters in trained for name in parameters]
        self._parameters = [p for parameters in trained for p in parameters.values()]
        self._seen = [p.grad for p in self._parameters]
        self._versions = [-1 if g is None else g._version for g in self._seen]

    def refuse_earlier(self, step: int) -> None:
        """What `p.grad` held before must not be divided by the weights of this batch.

        Raises:
            UsageError: if it held anything.
        """
        for p, name in zip(self._parameters, self._names, strict=False):
            if p.grad is not None and p.grad.any():
                raise UsageError(
                    f"The gradient of `{name}` was not zero before global batch {step}, whose"
                    " losses have a `weight`: call `optimizer.zero_grad()` after each step."
                )

    def forget(self) -> None:
        """From now on they may be changed."""
        self._parameters, self._seen = [], []

    def check(self, step: int) -> None:
        """Checks that nobody has changed them since `note`.

        Raises:
            UsageError: names what may have done it, and the cure.
        """
        for p, seen, version, name in zip(
            self._parameters, self._seen, self._versions, self._names, strict=False
        ):
            gradient = p.grad
            if gradient is seen and (gradient is None or gradient._version == version):
                continue
            how = (
                "dropped, as by `zero_grad()`"
                if gradient is None
                else "changed, as by `loss.backward()`, by `zero_grad(set_to_none=False)` or by"
                " clipping"
            )
            raise UsageError(
                f"The gradient of `{name}` was {how}, in the loop over global batch {step}'s"
                " micro-batches: the sum would depend on the number of workers. In that loop call"
                " `batch.backward(loss)` and nothing else that changes gradients; zero, clip and"
                " step when it has ended."
            )
