"""Makes a folder of patches of photographs by what they show, for `allstep train images`.

    pip install --no-deps 'mvtb-data>=1.6'
    python scripts/photo_patches.py patches
    allstep train images --folder patches --depth 18 --image-size 48

The photographs are those of the package mvtb-data, in 15 classes: a campus, aerial views, flowers,
walls and so on. Each is divided in 4 x 4 blocks, of which one in each row and column is held out:
patches for testing come from there, those to train on from the other blocks, and no two of the two
kinds share a pixel. Of each class there are as many; where they lie is drawn with a seed.
"""

import argparse
import importlib.util
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

CLASSES = {
    "aerial_colour": ["mosaic/aerial-*.png", "mosaic/aerialphoto.png"],
    "aerial_grey": ["mosaic/aerial2-*.png"],
    "building": ["building2-*.png"],
    "campus": ["campus/*.png", "campus/holdout/*.png"],
    "castle": ["castle2.png"],
    "church": ["church.png"],
    "eiffel_tower": ["eiffel-*.png"],
    "flowers": ["flowers*.png"],
    "notre_dame": ["notre-dame.png"],
    "park": ["parks.png"],
    "road": ["road.png"],
    "rocks": ["rocks2-*.png"],
    "roof": ["roof.png"],
    "street": ["street.png"],
    "walls": ["walls-*.png"],
}
NUM_BLOCKS = 4  # of a photograph, in a row and in a column
HELD_OUT = (1, 3, 0, 2)  # the block of each row that is tested on
LONGEST = 1280  # pixels; larger photographs are made smaller, as they would show next to nothing
Box = tuple[int, int, int, int]


def blocks(size: tuple[int, int], *, held_out: bool) -> list[Box]:
    """The parts of a photograph, (left, top, right, bottom), to test on or to train on.

    >>> blocks((40, 80), held_out=True)
    [(10, 0, 20, 20), (30, 20, 40, 40), (0, 40, 10, 60), (20, 60, 30, 80)]
    """
    width, height = size[0] // NUM_BLOCKS, size[1] // NUM_BLOCKS
    return [
        (column * width, row * height, (column + 1) * width, (row + 1) * height)
        for row in range(NUM_BLOCKS)
        for column in range(NUM_BLOCKS)
        if (column == HELD_OUT[row]) == held_out
    ]


def patches(
    photos: Sequence[Image.Image], num: int, side: int, draw: random.Random, *, held_out: bool
) -> Iterator[Image.Image]:
    """Squares at random places, whole in a block, of each photograph in turn."""
    for index in range(num):
        photo = photos[index % len(photos)]
        left, top, right, bottom = draw.choice(blocks(photo.size, held_out=held_out))
        x, y = draw.randint(left, right - side), draw.randint(top, bottom - side)
        yield photo.crop((x, y, x + side, y + side))


def read_photo(path: Path) -> Image.Image:
    """In colour, its longer side at most `LONGEST` pixels."""
    with Image.open(path) as file:
        photo = file.convert("RGB")
    photo.thumbnail((LONGEST, LONGEST))
    return photo


def write_folder(source: Path, folder: Path, num_each: dict[str, int], side: int) -> None:
    """Writes `folder/train/CLASS/*.png` and `folder/val/CLASS/*.png`."""
    for name, patterns in CLASSES.items():
        paths = sorted(path for pattern in patterns for path in source.glob(pattern))
        if not paths:
            raise SystemExit(f"{source} has no {patterns[0]}: give mvtb-data's folder images.")
        photos = [read_photo(path) for path in paths]
        for part, num in num_each.items():
            target = folder / part / name
            target.mkdir(parents=True)
            draw = random.Random(f"{name} {part}")
            found = patches(photos, num, side, draw, held_out=part == "val")
            for number, patch in enumerate(found):
                patch.save(target / f"{number:04}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="to write to; must not exist")
    parser.add_argument("--source", type=Path, help="mvtb-data's folder images, where it is")
    parser.add_argument("--train", type=int, default=240, help="patches of a class to train on")
    parser.add_argument("--val", type=int, default=80, help="patches of a class to test on")
    parser.add_argument("--side", type=int, default=56, help="rows and columns of a patch")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        raise SystemExit(f"`folder` (={arguments.folder}) exists; choose another.")
    source = arguments.source
    if source is None:
        spec = importlib.util.find_spec("mvtbdata")
        if spec is None or spec.origin is None:
            raise SystemExit("mvtb-data is missing: pip install --no-deps 'mvtb-data>=1.6'")
        source = Path(spec.origin).with_name("images")
    num_each = {"train": arguments.train, "val": arguments.val}
    write_folder(source, arguments.folder, num_each, arguments.side)


if __name__ == "__main__":
    main()
