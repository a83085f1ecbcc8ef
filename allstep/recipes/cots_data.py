"""Photographs and portraits for training and testing the recipe `cots`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from allstep import UsageError
from allstep.recipes.base import package_folder

Photos = Literal["scikit", "mvtb", "folder"]

_SKIMAGE = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "grass.png",
    "gravel.png", "motorcycle_left.png", "rocket.jpg",
)  # fmt: skip
_SKLEARN = ("china.jpg", "flower.jpg")
_MVTB = (
    "campus", "flowers", "building2", "eiffel", "church.png", "castle2", "notre", "parks",
    "road.png", "street", "roof", "rocks2", "tomato", "aerial", "walls",
)  # fmt: skip
_SUFFIXES = (".png", ".jpg", ".jpeg")
_SHRINK = 2**-0.5  # factor from one scale of a photograph to the next
_FLAT = 4.0  # standard deviation of uint8 values below which a patch shows nothing
_WARPS = 10  # crops of each portrait in OpenCV's file


def find_photographs(photos: Photos, folder: Path) -> list[Path]:
    """The photographs' files, sorted by name.

    Raises:
        UsageError: if there are fewer than four, or a package has to be installed.
    """
    if photos == "folder":
        found = [path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES]
    elif photos == "mvtb":
        images = package_folder("cots", "mvtbdata", "mvtb-data") / "images"
        found = [p for p in images.rglob("*.png") if any(word in str(p) for word in _MVTB)]
    else:
        skimage = package_folder("cots", "skimage", "scikit-image") / "data"
        sklearn = package_folder("cots", "sklearn", "scikit-learn") / "datasets" / "images"
        found = [skimage / name for name in _SKIMAGE] + [sklearn / name for name in _SKLEARN]
        found = [path for path in found if path.is_file()]
    if len(found) < 4:
        place = f"`folder` (={folder})" if photos == "folder" else f"`photos` (={photos!r})"
        raise UsageError(
            f"{place} has {len(found)} photographs (.png, .jpg); at least 4 are needed, half of"
            " them to train on and half to test with."
        )
    return sorted(found, key=lambda path: (path.name, path))


def read_photograph(path: Path, channels: int, smallest: int) -> list[Tensor]:
    """A photograph in several scales, each uint8 [channels, height, width], the largest first.

    Args:
        path: the file.
        channels: 1 for grey, 3 for colour.
        smallest: least side of all scales in pixels; the original size is always included.
    """
    from PIL import Image

    with Image.open(path) as file:
        image = file.convert("RGB")
        if channels == 1:
            image = image.convert("L")
        scales: list[Tensor] = []
        while not scales or min(image.size) >= smallest:
            pixels = torch.from_numpy(np.array(image))
            scales.append(pixels.view(image.height, image.width, channels).permute(2, 0, 1))
            size = (round(image.width * _SHRINK), round(image.height * _SHRINK))
            image = image.resize(size, Image.Resampling.LANCZOS)
    return scales


def draw_patches(
    photographs: Sequence[Sequence[Tensor]], num_patches: int, side: int, generator: torch.Generator
) -> Tensor:
    """Squares at random places and scales, uint8 [num_patches, channels, side, side].

    Those with next to no contrast, such as sky, are skipped.

    Raises:
        UsageError: if no photograph is as large as a patch.
    """
    large = [[x for x in scales if min(x.shape[1:]) >= side] for scales in photographs]
    large = [scales for scales in large if scales]
    if not large:
        raise UsageError(
            f"`pixels` (={side}) exceeds all photographs to draw from; take larger ones."
        )

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    patches = torch.empty(num_patches, large[0][0].shape[0], side, side, dtype=torch.uint8)
    num, num_flat = 0, 0
    while num < num_patches:
        scales = large[draw(len(large))]
        x = scales[draw(len(scales))]
        top, left = draw(x.shape[1] - side + 1), draw(x.shape[2] - side + 1)
        patch = x[:, top : top + side, left : left + side]
        if patch.float().std((1, 2)).mean() < _FLAT and num_flat < 9 * (num + 10):
            num_flat += 1
            continue
        patches[num] = patch
        num += 1
    return patches


@dataclass(frozen=True)
class Portraits:
    """Two halves of the portraits: one to choose neurons with, one to report results on.

    Attributes:
        choose, report: one crop of each portrait, uint8 [num, side, side].
        warps: all crops of the portraits in `choose`.
    """

    choose: Tensor
    report: Tensor
    warps: Tensor


def read_portraits(path: Path | None) -> Portraits:
    """The portraits in OpenCV's `trainingfaces_24-24.vec`; if None, 100 of scikit-image's.

    Raises:
        UsageError: if there is no such file, or if it has another format.
    """
    if path is None:
        faces = np.load(
            package_folder("cots", "skimage", "scikit-image") / "data" / "lfw_subset.npy"
        )[:100]
        x, warps = torch.from_numpy((255 * faces).round().astype(np.uint8)), 1
    else:
        x, warps = _read_vec(path), _WARPS
    half = len(x) // warps // 2 * warps
    return Portraits(x[:half:warps], x[half::warps], x[:half])


def _read_vec(path: Path) -> Tensor:
    """Reads OpenCV's format: count and size of samples, then a zero byte and int16 pixels each."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"`faces` (={path}) can't be read ({error.strerror}); the guide to `cots` says where"
            " trainingfaces_24-24.vec comes from. Without it 100 portraits of scikit-image do."
        ) from None
    num, size = np.frombuffer(data, "<i4", 2) if len(data) >= 12 else (0, 0)
    side = round(max(0, int(size)) ** 0.5)
    if num < 2 * _WARPS or side * side != size or len(data) != 12 + num * (1 + 2 * size):
        raise UsageError(f"`faces` (={path}) is no file of square samples as OpenCV writes them.")
    rows = np.frombuffer(data, np.uint8, offset=12).reshape(num, 1 + 2 * size)
    pixels = rows[:, 1:].copy().view("<i2").astype(np.uint8)
    return torch.from_numpy(pixels).view(num, side, side)
