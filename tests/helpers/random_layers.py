"""Random small models, of layers that depend on samples, on random numbers and on each other."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

CHANNELS, LENGTH, NUM_CLASSES = 6, 8, 3


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Recurrent(nn.Module):
    """A GRU along the length."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(CHANNELS, CHANNELS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.transpose(1, 2))[0].transpose(1, 2)


class Attention(nn.Module):
    """Of the channels to each other, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(LENGTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(layer, nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return found


class AtRandom(nn.Module):
    """Stochastic depth: a layer that some micro-batches leave out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        is_left_out = self.training and torch.rand(()).item() < 0.4
        return x if is_left_out else x + self.layer(x)


class BySamples(nn.Module):
    """A layer that micro-batches of some samples leave out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if x[0, 0, 0].item() > 0 else x


class SomeSamples(nn.Module):
    """Batch norm and a layer for some of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(CHANNELS), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0, 0] > 0
        y = x.clone()
        if chosen.any():
            y[chosen] = self.layer(self.norm(x[chosen]))
        return y


class Scale(nn.Module):
    """By one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


_SIMPLE: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
    lambda: nn.Linear(LENGTH, LENGTH),
    lambda: nn.BatchNorm1d(CHANNELS),
    lambda: nn.BatchNorm1d(CHANNELS, momentum=None),
    lambda: nn.BatchNorm1d(CHANNELS, momentum=0.5, affine=False),
    lambda: nn.LayerNorm(LENGTH),
    lambda: nn.GroupNorm(2, CHANNELS),
    lambda: nn.InstanceNorm1d(CHANNELS, affine=True),
    lambda: nn.Dropout(0.3),
    lambda: nn.FeatureAlphaDropout(0.2),
    nn.ReLU,
    nn.GELU,
    lambda: nn.PReLU(CHANNELS),
    lambda: weight_norm(nn.Linear(LENGTH, LENGTH)),
    Tied,
    Twice,
    Recurrent,
    Attention,
    SomeSamples,
    Scale,
)
_NOT_ALWAYS = (AtRandom, BySamples, SomeSamples)
_AROUND: tuple[Callable[[nn.Module], nn.Module], ...] = (Recomputed, AtRandom, BySamples)


def draw_layer(draw: random.Random) -> nn.Module:
    """One of all of these, in another one at times."""
    layer = draw.choice(_SIMPLE)()
    return draw.choice(_AROUND)(layer) if draw.random() < 0.2 else layer


class RandomModel(nn.Module):
    """Random layers, and one or two heads.

    Args:
        draw: of what there is.

    Attributes:
        critic: what may be trained by an exchange and an optimizer of its own.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        layers = [draw_layer(draw) for _ in range(draw.randint(1, 5))]
        self.body = nn.Sequential(nn.Linear(LENGTH, LENGTH, bias=False), *layers)
        self.head = nn.Linear(CHANNELS * LENGTH, NUM_CLASSES)
        self.second_head = nn.Linear(CHANNELS * LENGTH, 1) if draw.random() < 0.4 else None
        self.unused = nn.Parameter(torch.zeros(2)) if draw.random() < 0.2 else None
        self.table = nn.Embedding(5, LENGTH) if draw.random() < 0.3 else None

    @property
    def leaves_out_layers(self) -> bool:
        """Whether a micro-batch may have no gradient for some that others have one for."""
        return any(isinstance(module, _NOT_ALWAYS) for module in self.modules())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, classes], and [batch] of the second head, or zeros."""
        if self.table is not None:
            x = x + self.table((x[:, 0, 0].abs() * 5).long() % 5)[:, None]
        hidden = self.body(x).flatten(1)
        second = x.new_zeros(len(x)) if self.second_head is None else self.second_head(hidden)[:, 0]
        return self.head(hidden), second
