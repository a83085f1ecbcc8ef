"""Fashion-MNIST, 70,000 pictures of clothes, and a small convolutional net: a few minutes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Task, UsageError
from allstep.recipes.base import Recipe
from allstep.recipes.classification import Classifier

__all__ = ["Fashion", "FashionNet"]

_NUM_CLASSES = 10
_SUFFIXES = ("", ".gz")


@dataclass(frozen=True, kw_only=True)
class Fashion(Recipe):
    """Reads the four IDX files of Fashion-MNIST: 60,000 to train on, 10,000 to test on."""

    name: ClassVar[str] = "fashion"
    summary: ClassVar[str] = "Fashion-MNIST, 28 x 28 pictures of clothes, a small conv net; minutes"
    warmup_share: ClassVar[float] = 0.1

    # Chosen among three nets, widths of 16 to 32 and rates of 0.05 and 0.1.
    lr: float = 0.05

    folder: Path = Path("/usr/share/datasets/fashion-mnist")
    """Folder of the four IDX files, as Debian's package dataset-fashion-mnist installs them."""

    width: int = 32
    """Channels of the first convolution; the next ones have twice and four times as many."""

    dropout: float = 0.2
    """Share of the features dropped before the classifier."""

    def check(self) -> None:
        """Looks for the four files."""
        for part in ("train", "t10k"):
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
                self._file(f"{part}-{kind}")

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's pictures."""
        train_set = self._load("train")
        classifier = Classifier(mean=[72.94], std=[90.02])
        return Task(
            model=FashionNet(self.width, self.dropout),
            train_set=train_set,
            test_set=self._load("t10k"),
            loss=classifier.loss,
            metrics=classifier.metrics,
            optimizer=self.make_optimizer,
            schedule=self.make_schedule(len(train_set)),
        )

    def _load(self, part: str) -> TensorDataset:
        images = allstep.data.read_idx(self._file(f"{part}-images-idx3-ubyte"))
        labels = allstep.data.read_idx(self._file(f"{part}-labels-idx1-ubyte"))
        return TensorDataset(images[:, None], labels.long())

    def _file(self, name: str) -> Path:
        for suffix in _SUFFIXES:
            path = self.folder / (name + suffix)
            if path.is_file():
                return path
        raise UsageError(
            f"`folder` (={self.folder}) has no {name}.gz. Debian and Ubuntu have Fashion-MNIST as"
            " a package: apt-get install dataset-fashion-mnist. Or give the folder of the four"
            " IDX files with `--folder`."
        )


class FashionNet(nn.Module):
    """Three convolutions with batch norm and pooling, dropout, one linear layer.

    Args:
        width: channels of the first convolution.
        dropout: probability of dropping a feature before the linear layer.
    """

    def __init__(self, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_stage(1, width), *_stage(width, 2 * width), *_stage(2 * width, 4 * width)
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(4 * width * 3 * 3, _NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 28, 28] -> logits [batch, 10]."""
        logits: Tensor = self.classifier(self.dropout(self.features(images).flatten(1)))
        return logits


def _stage(num_in: int, num_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
