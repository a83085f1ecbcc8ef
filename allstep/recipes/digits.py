"""scikit-learn's 1,797 handwritten digits and a small convolutional net: seconds, not minutes."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from allstep import Communicator, Task, UsageError
from allstep.recipes.base import Recipe
from allstep.recipes.classification import Classifier

__all__ = ["Digits", "DigitsNet", "load_digits"]

_NUM_TEST_PER_CLASS = 36
_NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Digits(Recipe):
    """Reads 8 x 8 digits: 1,437 to train on, 360 to test on."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "scikit-learn's 8 x 8 digits, a small conv net; seconds"
    warmup_share: ClassVar[float] = 0.1

    # Chosen among 15 to 40 epochs, batches of 48 to 192 and rates of 0.03 to 0.2; six
    # micro-batches a step so that 1, 2, 3 and 6 workers all have equal work.
    epochs: int = 30
    global_batch: int = 96
    micro_batch: int = 16

    width: int = 32
    """Channels of the first two convolutions; the third has twice as many."""

    dropout: float = 0.3
    """Share of the features dropped before the classifier."""

    def check(self) -> None:
        if find_spec("sklearn") is None:
            raise UsageError("Recipe `digits` needs scikit-learn: pip install scikit-learn.")

    def build(self, comm: Communicator) -> Task:
        train_set, test_set = load_digits()
        classifier = Classifier(mean=[4.88], std=[6.02])
        return Task(
            model=DigitsNet(self.width, self.dropout),
            train_set=train_set,
            test_set=test_set,
            loss=classifier.loss,
            metrics=classifier.metrics,
            optimizer=self.make_optimizer,
            schedule=self.make_schedule(len(train_set)),
        )


class DigitsNet(nn.Module):
    """Three convolutions with batch norm, dropout, one linear layer.

    Args:
        width: channels of the first two convolutions.
        dropout: probability of dropping a feature before the linear layer.
    """

    def __init__(self, width: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv(1, width),
            *_conv(width, width),
            nn.MaxPool2d(2),
            *_conv(width, 2 * width),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 2 * 2, _NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 8, 8] -> logits [batch, 10]."""
        logits: Tensor = self.classifier(self.dropout(self.features(images).flatten(1)))
        return logits


def _conv(num_in: int, num_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(),
    ]


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test digits, always split the same way, equally many of each class.

    Returns:
        Two sets of (uint8 [1, 8, 8] with values 0 to 16, int64 label): 1,437 and 360 samples.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target).long()
    generator = torch.Generator().manual_seed(0)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(_NUM_CLASSES):
        members = (labels == label).nonzero()[:, 0]
        order = torch.randperm(len(members), generator=generator)
        is_test[members[order[:_NUM_TEST_PER_CLASS]]] = True
    return (
        TensorDataset(images[~is_test], labels[~is_test]),
        TensorDataset(images[is_test], labels[is_test]),
    )
