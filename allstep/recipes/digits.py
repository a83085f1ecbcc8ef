"""scikit-learn's 1,797 handwritten digits and a small convolutional net; trains in seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset

from allstep import Communicator, Task
from allstep.recipes.base import Recipe, package_folder
from allstep.recipes.classification import Classifier, ConvNet

_NUM_TEST_PER_CLASS = 36
_NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Digits(Recipe):
    """Trains on 1,437 pictures of 8 x 8 digits, and tests on 360."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "scikit-learn's 8 x 8 digits, a small conv net; seconds"
    warmup_share: ClassVar[float] = 0.1

    # Chosen among 15 to 40 epochs, batches of 48 to 192 and rates of 0.03 to 0.2; with six
    # micro-batches per step, 1, 2, 3 and 6 workers all have equal work.
    epochs: int = 30
    global_batch: int = 96
    micro_batch: int = 16

    compression: str = "exact"

    width: int = 32
    """Channels of the first two convolutions; the third has twice as many."""

    dropout: float = 0.3
    """Share of the features dropped before the classifier."""

    def check(self) -> None:
        digits_file()

    def build(self, comm: Communicator) -> Task:
        classifier = Classifier(mean=[4.88], std=[6.02])
        return self.make_task(digits_net(self.width, self.dropout), *load_digits(), classifier)


def digits_net(width: int = 32, dropout: float = 0.3) -> ConvNet:
    """Three convolutions for 8 x 8 pictures: two of `width` channels, one of twice as many."""
    return ConvNet([(width, width), (2 * width,)], 2, dropout)


def digits_file() -> Path:
    """The path of scikit-learn's file of digits, with 64 values and a label in each line.

    The file is read without importing scikit-learn, which would take longer than several epochs.

    Raises:
        UsageError: if scikit-learn is not installed.
    """
    package = package_folder("digits", "sklearn", "scikit-learn")
    return package / "datasets" / "data" / "digits.csv.gz"


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The training and test sets, always split the same way, with equally many tests per class.

    Returns:
        Sets of 1,437 and 360 samples (uint8 [1, 8, 8] with values 0 to 16, int64 label).
    """
    rows = torch.from_numpy(np.loadtxt(digits_file(), dtype=np.int64, delimiter=","))
    images, labels = rows[:, :-1].to(torch.uint8).view(-1, 1, 8, 8), rows[:, -1]
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
