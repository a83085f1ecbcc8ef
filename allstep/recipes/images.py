"""Trains a ResNet on any folder of pictures with a sub-folder for each class."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from torch import Tensor, nn

import allstep
from allstep import Communicator, Metrics, Task, UsageError
from allstep.recipes.base import Recipe, names_kept
from allstep.recipes.classification import Classifier
from allstep.recipes.resnet import Depth, resnet

_Images = TypeVar(
    "_Images", "allstep.data.image_folder.ListedImages", "allstep.data.image_shards.ImageShards"
)

_PARTS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})


@dataclass(frozen=True, kw_only=True)
class Images(Recipe):
    """Reads `folder/train/CLASS/*.jpg` and `folder/val/CLASS/*.jpg`, or `folder/CLASS/*.jpg`.

    Instead of folders of classes there may be tar shards, with `KEY.jpg` and `KEY.cls` for each
    sample, or Parquet files.

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
    """Folder with train/ and val/; or with the classes or shards, of which a part is held out."""

    val_fraction: float = 0.1
    """Share of the pictures held out for testing if there is no val/; they are chosen by their
    names, or in shards by their row numbers."""

    image_size: int = 224
    """Height and width of the model's input in pixels."""

    depth: Depth = 50
    """Number of layers of the ResNet."""

    stem: Literal["large", "small"] = "large"
    """First layers: large as in the paper, or small, a 3x3 convolution for 64 pixels and less."""

    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""

    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do about an unreadable picture: stop with an error, or skip it with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allstep.errors.check_share("val_fraction", self.val_fraction, "(0, 1)")
        allstep.errors.check_integer("image_size", self.image_size, 8, "it counts pixels")
        allstep.errors.check_share("label_smoothing", self.label_smoothing, "[0, 1)")

    def check(self) -> None:
        """Checks for Pillow, and for folders with the same classes, or shards."""
        self.need_package("PIL", "pillow")
        folders = self._folders
        has_shards = [bool(self._shards(folder)) for folder in folders]
        if any(has_shards) and not all(has_shards):
            raise UsageError(
                f"`folder` (={self.folder}): one of train/ and val/ has shards and the other has"
                " none; give both the same kind."
            )
        if any(has_shards):
            self.need_package("datasets", "allstep[shards]")
        else:
            classes = [allstep.data.image_folder.find_classes(folder) for folder in folders]
            if len(folders) == 1:
                self._check_no_parts(classes[0])
            self._check_same(*classes)

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's pictures."""
        has_shards = bool(self._shards(self._folders[0]))
        train_images, test_images = self._read_shards() if has_shards else self._list(comm)
        num_classes = len(train_images.classes)
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
            top_k=5 if num_classes > 5 else 0,
        )
        return self.make_task(
            resnet(self.depth, num_classes, self.stem),
            make(train_images, crop=folder.random_crop),
            make(test_images, crop=folder.center_crop),
            classifier,
            kept=names_kept("classes", train_images.classes),
        )

    @property
    def _folders(self) -> list[Path]:
        """The folders to train on and to test on; only one if a part of it is to be held out."""
        train, val = self.folder / "train", self.folder / "val"
        return [train, val] if train.is_dir() and val.is_dir() else [self.folder]

    def _shards(self, folder: Path) -> list[Path]:
        return allstep.data.image_folder.find_shards(folder)

    def _list(self, comm: Communicator) -> Sequence["allstep.data.image_folder.ListedImages"]:
        """Training and test pictures; rank 0 reads the folders for all."""
        image_folder = allstep.data.image_folder
        plain = None
        if comm.rank == 0:
            found = self._split([image_folder.find_images(folder) for folder in self._folders])
            plain = [(images.classes, images.names, images.labels) for images in found]
        folders = self._folders[0], self._folders[-1]
        listed = zip(folders, comm.broadcast_object(plain), strict=True)
        return [image_folder.ListedImages(folder, *fields) for folder, fields in listed]

    def _read_shards(self) -> Sequence["allstep.data.image_shards.ImageShards"]:
        shards = allstep.data.image_shards.ImageShards
        return self._split([shards(self._shards(folder)) for folder in self._folders])

    def _split(self, found: Sequence[_Images]) -> Sequence[_Images]:
        """The pictures to train on and to test on; without val/, these are a part of the former."""
        self._check_same(*(images.classes for images in found))
        if len(found) == 2:
            return found
        images = found[0]
        is_test = [_score(images.name(i)) < self.val_fraction for i in range(len(images))]
        train = [index for index, is_held_out in enumerate(is_test) if not is_held_out]
        test = [index for index, is_held_out in enumerate(is_test) if is_held_out]
        if not train or not test:
            raise UsageError(
                f"`val_fraction` (={self.val_fraction}) of the {len(images)} pictures leaves"
                f" {len(train)} to train on and {len(test)} to test on; choose another, or make"
                " folders train/ and val/."
            )
        return [images.select(train), images.select(test)]

    def _check_no_parts(self, classes: Sequence[str]) -> None:
        """Checks that the classes aren't names like train/ and test/, which are parts of a set."""
        if _PARTS.issuperset(classes):
            largest = next((name for name in classes if name.startswith("train")), classes[0])
            raise UsageError(
                f"`folder` (={self.folder}) has {', '.join(classes)} in it, which are taken for"
                " classes where there are no train/ and val/. Name them so, or give the one that"
                f" has the classes, as {self.folder / largest}, of which part is held out."
            )

    def _check_same(self, classes: Sequence[str], others: Sequence[str] | None = None) -> None:
        """Checks that val/ has the same classes as train/."""
        if others is not None and list(classes) != list(others):
            differing = sorted(map(str, set(classes) ^ set(others)))
            raise UsageError(
                f"`folder` (={self.folder}): train/ and val/ have different classes:"
                f" {', '.join(differing[:5])}. Give both the same."
            )


@dataclass(frozen=True)
class _Readable(Classifier):
    """A classifier that ignores pictures that could not be read."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy, where an unreadable picture counts as a sample with loss 0."""
        images, labels = batch
        losses = nn.functional.cross_entropy(
            self.logits(model, images),
            labels,
            ignore_index=allstep.data.image_folder.UNREADABLE,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return losses / len(labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Metrics:
        """The classifier's metrics for the readable pictures, and the share of unreadable ones."""
        images, labels = batch
        is_readable = labels != allstep.data.image_folder.UNREADABLE
        found = dict(super().metrics(model, (images[is_readable], labels[is_readable])))
        found["unreadable"] = ((~is_readable).sum(), len(labels))
        return found


def _score(name: str) -> float:
    """A number in [0, 1) that depends only on the name, not on other files in the folder."""
    digest = blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
