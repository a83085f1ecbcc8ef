"""Pictures in a folder for each class, decoded and cropped with Pillow."""

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
    """What to take of a picture: left, top, right, bottom in pixels, mirrored or not."""

    box: tuple[float, float, float, float]
    mirror: bool = False


@dataclass(frozen=True)
class EncodedImage:
    """A picture that is no file of its own: what to call it, and the bytes of its file."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name


class Images(Protocol):
    """Pictures, each a path or encoded, with the numbers of their classes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Path | EncodedImage, int]: ...


def random_crop(width: int, height: int) -> Crop:
    """A random 8 to 100 % of the area, of aspect 3:4 to 4:3, mirrored half of the time.

    Draws from python's random state, which the loader sets for each sample.

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
    """The square in the middle, of `share` of the shorter side.

    >>> center_crop(300, 200, share=0.5).box
    (100.0, 50.0, 200.0, 150.0)
    """
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return Crop((left, top, left + side, top + side))


def find_classes(folder: Path) -> list[str]:
    """The classes of a folder, which are its sub-folders, in alphabetical order.

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
    """Paths of pictures with the numbers of their classes.

    Two arrays hold them: a million need some tens of megabytes, and loader processes share these
    with the process that they were forked from.

    Args:
        folder: which the names are below.
        classes: their names.
        names: of the pictures, encoded as the file system's, with `/` between folders.
        labels: the number of each picture's class.
    """

    folder: Path
    classes: Sequence[str]
    names: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def name(self, index: int) -> str:
        """A picture's path below the folder."""
        return os.fsdecode(self.names[index])

    def select(self, indices: Sequence[int]) -> Self:
        """Some of the pictures, with the same classes."""
        return replace(self, names=self.names[indices], labels=self.labels[indices])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        return self.folder / self.name(index), int(self.labels[index])


def find_images(folder: Path) -> ListedImages:
    """The pictures of a folder, in the order of their paths.

    Args:
        folder: `folder/<class>/**/*.jpg` and other formats; the classes are in alphabetical order.
            Links to folders are followed.

    Raises:
        UsageError: if the folder is missing, has no classes, one of them has no pictures, or a
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
    """The folder's tar or Parquet files, for `ImageShards`, by their names; empty if it has none.

    Raises:
        UsageError: if it has both.
    """
    tars, tables = sorted(folder.glob("*.tar")), sorted(folder.glob("*.parquet"))
    if tars and tables:
        raise UsageError(f"`folder` (={folder}) has tar and Parquet files; leave one kind there.")
    return tars or tables


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures with their class, as uint8 [3, size, size].

    With `on_bad_image="skip"` an unreadable picture is named in a warning and comes as a grey
    one with the label `UNREADABLE`, which losses and metrics leave out: so a sample's place
    does not depend on which others could be read, nor on the workers.

    Args:
        images: (path or encoded picture, class index) of each, from `find_images` or `ImageShards`.
        size: height and width to resize to, in pixels.
        crop: (width, height) -> what to take, such as `random_crop`.
        on_bad_image: "stop" raises DataError, "skip" goes on.
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
    """The cropped and resized picture, uint8 [3, size, size]; a JPEG decoded no larger than needed.

    torch's resizing of uint8 is within one level of Pillow's and takes a third of the time.
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
    """RGB, with whatever is transparent on white; 16-bit grey keeps its high byte.

    Raises:
        ValueError: if the values are floating-point numbers, whose white is unknown.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed white")
    if image.mode.startswith("I"):  # Pillow would cut off all above 255
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(background, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
