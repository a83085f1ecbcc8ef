"""Any folder of pictures with a sub-folder for each class, and a ResNet."""

import functools
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor, nn

import allstep
from allstep import Communicator, Task, UsageError
from allstep.recipes.base import Recipe
from allstep.recipes.classification import Classifier
from allstep.recipes.resnet import Depth, resnet

_Image = tuple[Path, int]


@dataclass(frozen=True, kw_only=True)
class Images(Recipe):
    """Reads `folder/train/CLASS/*.jpg` and `folder/val/CLASS/*.jpg`, or `folder/CLASS/*.jpg`.

    The defaults are the 90-epoch recipe for ImageNet at batch 256.
    Source: Goyal et al., 2017, arXiv:1706.02677, section 5.1.
    """

    name: ClassVar[str] = "images"
    summary: ClassVar[str] = "any folder of pictures with a sub-folder per class, a ResNet"
    warmup_share: ClassVar[float] = 5 / 90

    epochs: int = 90
    global_batch: int = 256
    micro_batch: int = 32
    weight_decay: float = 1e-4
    loader_workers: int = 2

    folder: Path = Path("images")
    """Folder with train/ and val/, or with the classes; then part of them is held out."""

    val_fraction: float = 0.1
    """Share of the pictures held out for testing where there is no val/; by their names."""

    image_size: int = 224
    """Height and width that the model sees, in pixels."""

    depth: Depth = 50
    """Layers of the ResNet."""

    stem: Literal["large", "small"] = "large"
    """The first layers: the paper's, or one 3x3 convolution for 64 pixels and less."""

    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""

    on_bad_image: Literal["stop", "skip"] = "stop"
    """What an unreadable picture does: end the run naming it, or be left out with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.val_fraction < 1:
            raise UsageError(f"`val_fraction` (={self.val_fraction}) must be between 0 and 1.")
        allstep.errors.check_integer("image_size", self.image_size, 8, "it counts pixels")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(
                f"`label_smoothing` (={self.label_smoothing}) must be at least 0 and below 1."
            )

    def check(self) -> None:
        """Looks for Pillow, the folders, and pictures in each class."""
        self.need_package("PIL", "pillow")
        self._find()

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's pictures."""
        classes, train_images, test_images = self._find()
        folder = allstep.data.image_folder
        make = functools.partial(
            folder.ImageFolder, size=self.image_size, on_bad_image=self.on_bad_image
        )
        # ImageNet's mean and standard deviation, in units of the uint8 values.
        kind = _Readable if self.on_bad_image == "skip" else Classifier
        classifier = kind(
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            label_smoothing=self.label_smoothing,
            top_k=5 if len(classes) > 5 else 0,
        )
        return self.make_task(
            resnet(self.depth, len(classes), self.stem),
            make(train_images, crop=folder.random_crop),
            make(test_images, crop=folder.center_crop),
            classifier,
        )

    def _find(self) -> tuple[list[str], list[_Image], list[_Image]]:
        """Classes, training pictures, test pictures."""
        find_images = allstep.data.image_folder.find_images
        train, val = self.folder / "train", self.folder / "val"
        if train.is_dir() and val.is_dir():
            classes, train_images = find_images(train)
            val_classes, test_images = find_images(val)
            if classes != val_classes:
                differing = sorted(set(classes) ^ set(val_classes))
                raise UsageError(
                    f"`folder` (={self.folder}): train/ and val/ have different classes:"
                    f" {', '.join(differing[:5])}. Give both the same."
                )
            return classes, train_images, test_images
        classes, images = find_images(self.folder)
        held_out = [_score(path.relative_to(self.folder)) < self.val_fraction for path, _ in images]
        train_images = [
            image for image, is_test in zip(images, held_out, strict=True) if not is_test
        ]
        test_images = [image for image, is_test in zip(images, held_out, strict=True) if is_test]
        if not train_images or not test_images:
            raise UsageError(
                f"`val_fraction` (={self.val_fraction}) of the {len(images)} pictures leaves"
                f" {len(train_images)} to train on and {len(test_images)} to test on; choose"
                " another, or make folders train/ and val/."
            )
        return classes, train_images, test_images


@dataclass(frozen=True)
class _Readable(Classifier):
    """A classifier that leaves out pictures which could not be read."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, where an unreadable picture counts as a sample without loss."""
        images, labels = batch
        losses = nn.functional.cross_entropy(
            self.logits(model, images),
            labels,
            ignore_index=allstep.data.image_folder.UNREADABLE,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return losses / len(labels)

    def metrics(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> dict[str, tuple[float | Tensor, float | Tensor]]:
        """As the classifier's, of the readable pictures, and how many were not."""
        images, labels = batch
        is_readable = labels != allstep.data.image_folder.UNREADABLE
        found = dict(super().metrics(model, (images[is_readable], labels[is_readable])))
        found["unreadable"] = ((~is_readable).sum(), len(labels))
        return found


def _score(path: Path) -> float:
    """A number in [0, 1) that belongs to a path, whatever else is in the folder."""
    digest = blake2b(path.as_posix().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
