"""Base updates: pure functions from a gradient and a state to a direction and the next state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from allstep.optim.checks import check_values

State = Mapping[str, Tensor]


class Rule(Protocol):
    """The interface of a base update for `LayerWise`; elementwise, so that it works on shards."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state's tensors, each of the parameter's shape, zero at first."""

    @property
    def decoupled(self) -> bool:
        """Whether weight decay joins the direction (as in AdamW) or the gradient (as in SGD)."""

    def direction(
        self, gradient: Tensor, state: State, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction that the parameter moves against, and the next state.

        Args:
            gradient: of the parameter's shape; not to be changed.
            state: the slots; not to be changed.
            step: a scalar that counts from 1.
        """


@dataclass(frozen=True, kw_only=True)
class SGDRule:
    """SGD with momentum.

    buffer = momentum * buffer + (1 - dampening) * gradient
    direction = buffer; with `nesterov`: gradient + momentum * buffer

    The buffer starts at zero, the dampened average as well (torch's SGD starts it at the first
    gradient, undampened).

    Source: Sutskever et al., 2013, "On the importance of initialization and momentum".
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    slots = ("momentum_buffer",)
    decoupled = False

    def __post_init__(self) -> None:
        check_values({"momentum": self.momentum})

    def direction(
        self, gradient: Tensor, state: State, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        buffer = self.momentum * state["momentum_buffer"] + (1 - self.dampening) * gradient
        direction = gradient + self.momentum * buffer if self.nesterov else buffer
        return direction, {"momentum_buffer": buffer}


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam's direction; weight decay is decoupled.

    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient**2
    direction = (exp_avg / (1 - beta1**step)) / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps)

    Without `bias_correction` the two divisions by 1 - beta**step are left out.

    Source: Kingma and Ba, 2015, arXiv:1412.6980, Algorithm 1.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    bias_correction: bool = True
    slots = ("exp_avg", "exp_avg_sq")
    decoupled = True

    def __post_init__(self) -> None:
        check_values({"betas": self.betas, "eps": self.eps})

    def direction(
        self, gradient: Tensor, state: State, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2 = self.betas
        exp_avg = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        exp_avg_sq = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
        mean, variance = exp_avg, exp_avg_sq
        if self.bias_correction:
            # In double precision: 1 - beta2**step loses half its digits in single.
            exact = step.double()
            mean = exp_avg / (1 - beta1**exact).to(exp_avg.dtype)
            variance = exp_avg_sq / (1 - beta2**exact).to(exp_avg.dtype)
        direction = mean / (variance.sqrt() + self.eps)
        return direction, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


@dataclass(frozen=True, kw_only=True)
class RMSprop:
    """The gradient over its root mean square; weight decay joins the gradient.

    square_avg = alpha * square_avg + (1 - alpha) * gradient**2
    direction = gradient / (sqrt(square_avg) + eps)

    Source: Tieleman and Hinton, 2012, lecture 6.5 of "Neural networks for machine learning".
    """

    alpha: float = 0.99
    eps: float = 1e-8
    slots = ("square_avg",)
    decoupled = False

    def __post_init__(self) -> None:
        check_values({"alpha": self.alpha, "eps": self.eps})

    def direction(
        self, gradient: Tensor, state: State, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        square_avg = self.alpha * state["square_avg"] + (1 - self.alpha) * gradient.square()
        return gradient / (square_avg.sqrt() + self.eps), {"square_avg": square_avg}
