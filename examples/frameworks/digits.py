"""What the examples of this folder share: the digits, a small conv net, and what is counted.

In float64, so that what differs between one worker and several is seen to the last digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

EPOCHS = 6
GLOBAL_BATCH, MICRO_BATCH = 120, 24  # five micro-batches: no two workers share them evenly


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64)[:, None] / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10),
    ).double()  # fmt: skip


def correct(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}
