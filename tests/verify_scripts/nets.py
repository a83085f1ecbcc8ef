"""Small models in the forms of PyTorch's examples, and data for them."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import allstep

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
NUM_SAMPLES = 96


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def dropnet() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def bnnet() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def still_bnnet() -> nn.Module:
    """Its running statistics stay, as in finetuning."""
    net = bnnet()
    net[1].eval()
    return net


class Mnist(nn.Module):
    """Two convolutions, two layers; dropout after each pair, unless there is to be none."""

    def __init__(self, dropout: float = 0.25, width: int = 8, side: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 3), nn.Conv2d(width, 2 * width, 3)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(2 * dropout)
        self.fc1 = nn.Linear(2 * width * ((side - 4) // 2) ** 2, 4 * width)
        self.fc2 = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Recurrent(nn.Module):
    """As word_language_model, with its state carried from batch to batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.rnn = getattr(nn, kind)(16, 16)
        self.decoder = nn.Linear(16, 12)

    def forward(self, x: Tensor, state: object) -> tuple[Tensor, object]:
        out, state = self.rnn(self.embedding(x), state)
        return self.decoder(out), state


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(x)).mean(1))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.head(torch.cat((self.body(x), self.body(other)), 1)).squeeze(1)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc2, self.out = nn.Linear(4, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, log = self.mean(hidden), self.log(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log)
        return torch.sigmoid(self.out(F.relu(self.fc2(z)))), mean, log

    @staticmethod
    def loss(out: Tensor, mean: Tensor, log: Tensor, x: Tensor) -> Tensor:
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
        return F.mse_loss(out, torch.sigmoid(x)) + 0.1 * divergence


class TokenNet(nn.Module):
    """A class for each token, some of which are padding."""

    PADDING = -1

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropnet": dropnet,
    "bnnet": bnnet,
    "still_bnnet": still_bnnet,
    "mnist": Mnist,
    "fashion": lambda: Mnist(width=32, side=28),
    "cnn": lambda: Mnist(0.0),
    "lstm": lambda: Recurrent("LSTM"),
    "gru": lambda: Recurrent("GRU"),
    "transformer": Transformer,
    "siamese": Siamese,
    "vae": Vae,
    "tokens": TokenNet,
    "super_resolution": super_resolution,
}


def make_samples(net: str) -> tuple[Tensor, ...]:
    """The data of a net, the same in every process."""
    made = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(NUM_SAMPLES, *shape, generator=made)

    def labels(num: int, *shape: int) -> Tensor:
        return torch.randint(num, (NUM_SAMPLES, *shape), generator=made)

    if net in ("mnist", "cnn", "siamese", "super_resolution"):
        return _images(net)
    if net == "fashion":
        return _fashion()
    if net in ("lstm", "gru"):
        text = labels(12, 65)[:24]
        return text[:, :-1], text[:, 1:]
    if net == "transformer":
        return normal(5, 8), labels(3)
    if net == "tokens":
        kept = torch.arange(6) < 1 + labels(6)[:, None]
        return normal(6, 8), torch.where(kept, labels(3, 6), TokenNet.PADDING)
    x = normal(8)
    return x, x[:, :3].argmax(1)


def _images(net: str) -> tuple[Tensor, ...]:
    """Of sklearn's digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[: 2 * NUM_SAMPLES], dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target[: 2 * NUM_SAMPLES])
    few = images[:NUM_SAMPLES]
    if net == "siamese":
        same = y[:NUM_SAMPLES] == y[NUM_SAMPLES:]
        return few, images[NUM_SAMPLES:], same.float()
    if net == "super_resolution":
        return F.avg_pool2d(few, 2), few
    return (few - 0.13) / 0.31, y[:NUM_SAMPLES]


def _fashion() -> tuple[Tensor, ...]:
    """The first of Fashion-MNIST's, as PyTorch's example scales MNIST's."""
    x, y = (
        torch.as_tensor(allstep.data.read_idx(FASHION / f"train-{name}.gz"))[:1536]
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return (x[:, None].float() / 255 - 0.1307) / 0.3081, y.long()
