"""The step that workers take together after many that each has taken alone."""

from dataclasses import dataclass

from torch import Tensor

from allstep.errors import check_positive, check_share


@dataclass(frozen=True)
class Nesterov:
    """Nesterov's momentum on what a round of local steps has changed: DiLoCo's outer optimizer.

    d = anchor - mean      the outer gradient
    momentum_buffer = momentum * momentum_buffer + d
    anchor = anchor - lr * (d + momentum * momentum_buffer)

    with the anchor the parameters at the start of the round and the mean over the workers of
    those at its end. lr = 1 without momentum is the plain average.

    Args:
        lr: > 0.
        momentum: >= 0 and < 1.

    Raises:
        UsageError: if an argument is out of range.

    Source: Douillard et al., "DiLoCo", 2023, arXiv:2311.08105, algorithm 1 and section 3.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_positive("lr", self.lr, "DiLoCo uses 0.7")
        check_share("momentum", self.momentum, "[0, 1)", "DiLoCo uses 0.9")

    def step_(self, anchor: Tensor, d: Tensor, momentum_buffer: Tensor) -> None:
        """Moves the anchor, in place.

        Args:
            anchor: where the round began; becomes where the next one begins.
            d: the outer gradient; overwritten.
            momentum_buffer: zero at first; updated.
        """
        momentum_buffer.mul_(self.momentum).add_(d)
        anchor.sub_(d.add_(momentum_buffer, alpha=self.momentum), alpha=self.lr)
