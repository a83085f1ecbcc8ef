"""Reads pictures from a folder per class, and decodes and crops them with Pillow."""

import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from allstep.data.folders import file_names
from allstep.errors import DataError, UsageError

__all__ = [
    "UNREADABLE",
    "Crop",
    "EncodedImage",
    "ImageFolder",
    "Images",
    "ListedImages",
    "center_crop",
    "find_classes",
    "find_images",
    "find_shards",
    "random_crop",
]

UNREADABLE = -1
"""Label of a picture that could not be read and was skipped."""

_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_ORIENTATION = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})


@dataclass(frozen=True)
class Crop:
    """The part of a picture to use (left, top, right, bottom in pixels), mirrored or not."""

    box: tuple[float, float, float, float]
    mirror: bool = False


@dataclass(frozen=True)
class EncodedImage:
    """A picture that isn't a separate file: a name for messages, and its encoded bytes."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name


class Images(Protocol):
    """A sequence of pictures, as paths or encoded bytes, with their class indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Path | EncodedImage, int]: ...


def random_crop(width: int, height: int) -> Crop:
    """A random crop of 8 to 100 % of the area, of aspect 3:4 to 4:3, mirrored half of the time.

    It uses Python's random state, which the loader sets for each sample.

    Source: Szegedy et al., 2014, arXiv:1409.4842, section 6; as in Goyal et al., 2017.
    """
    mirror = random.random() < 0.5
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return Crop((left, top, left + w, top + h), mirror)
    return Crop(center_crop(width, height, share=1.0).box, mirror)


def center_crop(width: int, height: int, share: float = 224 / 256) -> Crop:
    """The square in the middle whose side is `share` of the picture's shorter side.

    >>> center_crop(300, 200, share=0.5).box
    (100.0, 50.0, 200.0, 150.0)
    """
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return Crop((left, top, left + side, top + side))


def find_classes(folder: Path) -> list[str]:
    """The classes of a folder, which are the names of its sub-folders, in alphabetical order.

    Raises:
        UsageError: if the folder is missing or has no classes.
    """
    if not folder.is_dir():
        raise UsageError(f"`folder` (={folder}) is no folder; give one with a folder per class.")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes:
        raise UsageError(
            f"`folder` (={folder}) has no folders in it; put the pictures of each class in one."
        )
    return classes


@dataclass(frozen=True)
class ListedImages:
    """Paths of pictures with their class indices.

    They are stored in two arrays: a million pictures take some tens of megabytes, and forked loader
    processes share this memory with their parent.

    Args:
        folder: the folder to which the names are relative.
        classes: names of the classes.
        names: names of the pictures in the file system's encoding, with `/` between folders.
        labels: class index of each picture.
    """

    folder: Path
    classes: Sequence[str]
    names: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def name(self, index: int) -> str:
        """A picture's path relative to the folder."""
        return os.fsdecode(self.names[index])

    def select(self, indices: Sequence[int]) -> Self:
        """The pictures with these indices; the classes stay the same."""
        return replace(self, names=self.names[indices], labels=self.labels[indices])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        return self.folder / self.name(index), int(self.labels[index])


def find_images(folder: Path) -> ListedImages:
    """The pictures of a folder, in the order of their paths.

    Args:
        folder: folder with pictures `folder/<class>/**/*.jpg`, or in other formats; classes are
            numbered in alphabetical order. Links to folders are followed.

    Raises:
        UsageError: if the folder is missing or has no classes, if a class has no pictures, or if a
            folder can't be read.
    """
    classes = find_classes(folder)
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [file for file in file_names(folder, name) if _is_image(file)]
        found.sort(key=lambda file: file.split("/"))
        if not found:
            raise UsageError(
                f"`folder` (={folder}): class `{name}` has no pictures"
                f" ({', '.join(sorted(_SUFFIXES))}); add some or remove the folder."
            )
        names += found
        labels += [label] * len(found)
    encoded = np.array([os.fsencode(name) for name in names])
    return ListedImages(folder, classes, encoded, np.array(labels))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _SUFFIXES


def find_shards(folder: Path) -> list[Path]:
    """The folder's tar or Parquet files, for `ImageShards`, sorted by name; [] if it has none.

    Raises:
        UsageError: if it has both kinds.
    """
    tars, tables = sorted(folder.glob("*.tar")), sorted(folder.glob("*.parquet"))
    if tars and tables:
        raise UsageError(f"`folder` (={folder}) has tar and Parquet files; leave one kind there.")
    return tars or tables


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """A data set of pictures as uint8 [3, size, size], with their class indices.

    With `on_bad_image="skip"`, an unreadable picture is named in a warning and replaced by a grey
    one with the label `UNREADABLE`, which losses and metrics ignore. Hence a sample's index depends
    neither on which others could be read, nor on the workers.

    Args:
        images: pairs (path or encoded picture, class index), from `find_images` or `ImageShards`.
        size: height and width to resize to, in pixels.
        crop: (width, height) -> the crop, such as `random_crop`.
        on_bad_image: "stop" to raise DataError for an unreadable picture, "skip" to continue.
    """

    def __init__(
        self,
        images: Images,
        *,
        size: int,
        crop: Callable[[int, int], Crop],
        on_bad_image: Literal["stop", "skip"] = "stop",
    ) -> None:
        self._images = images
        self._size = size
        self._crop = crop
        self._on_bad_image = on_bad_image
        self._num_unreadable = 0

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._images[index]
        try:
            return _decode(image, self._size, self._crop), label
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            if self._on_bad_image == "stop":
                raise DataError(
                    f"{image} can't be read as a picture: {error}. Remove it, or go on without"
                    " such files: `--on-bad-image skip`."
                ) from error
            self._num_unreadable += 1
            logging.getLogger("allstep").warning(
                "skipped %s, which can't be read (%s); %d so far in this process",
                image,
                error,
                self._num_unreadable,
            )
            return torch.full((3, self._size, self._size), 128, dtype=torch.uint8), UNREADABLE


def _decode(source: Path | EncodedImage, size: int, crop: Callable[[int, int], Crop]) -> Tensor:
    """The cropped and resized picture, uint8 [3, size, size].

    A JPEG is decoded no larger than needed. torch's resizing of uint8 differs from Pillow's by at
    most one level, and takes a third of the time.
    """
    file = BytesIO(source.data) if isinstance(source, EncodedImage) else source
    with Image.open(file) as image:
        orientation = image.getexif().get(_ORIENTATION, 1)
        is_sideways = orientation in _SIDEWAYS
        width, height = image.size[::-1] if is_sideways else image.size
        chosen = crop(width, height)
        left, top, right, bottom = chosen.box
        scale = min(1.0, max(size / (right - left), size / (bottom - top)))
        image.draft("RGB", (math.ceil(scale * image.width), math.ceil(scale * image.height)))
        upright = ImageOps.exif_transpose(image) if orientation != 1 else image
        x, y = upright.width / width, upright.height / height
        box = math.floor(left * x), math.floor(top * y), math.ceil(right * x), math.ceil(bottom * y)
        pixels = torch.from_numpy(np.array(_as_rgb(upright.crop(box))))
    resized = F.interpolate(
        pixels.permute(2, 0, 1)[None], size=(size, size), mode="bilinear", antialias=True
    )[0]
    return (resized.flip(-1) if chosen.mirror else resized).contiguous()


def _as_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, transparent parts on white; 16-bit grey is reduced to its high byte.

    Raises:
        ValueError: if the values are floating-point numbers, as it is unknown which one is white.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed white")
    if image.mode.startswith("I"):  # Pillow would clip values above 255
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(background, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
