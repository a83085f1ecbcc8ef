"""Fashion-MNIST, 70,000 pictures of clothes, and a small convolutional net; takes minutes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Task, UsageError
from allstep.recipes import asynchronous
from allstep.recipes.base import Recipe
from allstep.recipes.classification import Classifier, ConvNet

_SUFFIXES = ("", ".gz")


@dataclass(frozen=True, kw_only=True)
class Fashion(Recipe):
    """Reads the four IDX files of Fashion-MNIST: 60,000 pictures to train on, 10,000 to test on."""

    name: ClassVar[str] = "fashion"
    summary: ClassVar[str] = "Fashion-MNIST, 28 x 28 pictures of clothes, a small conv net; minutes"
    warmup_share: ClassVar[float] = 0.1

    # Chosen among three nets, widths of 16 to 32 and rates of 0.05 and 0.1.
    lr: float = 0.05

    compression: str = "exact"

    folder: Path = Path("/usr/share/datasets/fashion-mnist")
    """Folder with the four IDX files, by default that of Debian's package dataset-fashion-mnist."""

    width: int = 32
    """Channels of the first convolution; the next ones have twice and four times as many."""

    dropout: float = 0.2
    """Share of the features dropped before the classifier."""

    parameter_server: asynchronous.Server | None = None
    """Asynchronous SGD as a baseline: workers push gradients of their own samples, which are
    applied as they arrive; staleness_aware divides the rate by their staleness; with in_turn none
    is stale. By default workers are synchronous."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameter_server is not None:
            asynchronous.check_options(self)

    @property
    def trains_itself(self) -> str | None:
        if self.parameter_server is None:
            return None
        return f"has a parameter server (`parameter_server` = {self.parameter_server})"

    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int:
        """Trains with a parameter server, always from the start, as there are no checkpoints."""
        if self.parameter_server is None:
            return super().run(comm, run_dir, resume=resume)
        asynchronous.train(self, self.parameter_server, comm, run_dir)
        return 0

    def check(self) -> None:
        """Checks for the four files."""
        for part in ("train", "t10k"):
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
                self._file(f"{part}-{kind}")

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's pictures."""
        width = self.width
        model = ConvNet([(width,), (2 * width,), (4 * width,)], 3, self.dropout)
        classifier = Classifier(mean=[72.94], std=[90.02])
        return self.make_task(model, self._load("train"), self._load("t10k"), classifier)

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
