"""Patches to test on share no pixel with those to train on."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from allstep.data.image_folder import find_images

SCRIPT = Path(__file__).parents[2] / "scripts" / "photo_patches.py"
PHOTOS = """
    mosaic/aerial-1 mosaic/aerial2-1 building2-1 campus/1 castle2 church eiffel-1 flowers1
    notre-dame parks road rocks2-1 roof street walls-1
"""


def write_photos(folder: Path) -> None:
    """Each with a colour of its own in every pixel."""
    rows, columns = np.mgrid[:96, :128]
    for number, name in enumerate(PHOTOS.split()):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.stack([rows, columns, np.full_like(rows, number)], axis=-1)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def colours(folder: Path) -> tuple[set[bytes], int]:
    """Those of all patches' pixels, and how many patches there are."""
    images = find_images(folder)
    paths = [images[index][0] for index in range(len(images))]
    pixels = [np.asarray(Image.open(path)).reshape(-1, 3) for path in paths]
    return {pixel.tobytes() for patch in pixels for pixel in patch}, len(paths)


def test_patches_to_test_on_are_of_other_places(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    arguments = ["--source", tmp_path / "photos", "--side", 16, "--train", 20, "--val", 8]
    for name in ("one", "other"):
        command = [sys.executable, SCRIPT, tmp_path / name, *arguments]
        subprocess.run([str(word) for word in command], check=True)
    train, num_train = colours(tmp_path / "one" / "train")
    val, num_val = colours(tmp_path / "one" / "val")
    assert (num_train, num_val) == (15 * 20, 15 * 8)
    assert len(train) > 15 * 96 * 128 // 8
    assert not train & val
    for path in (tmp_path / "one").rglob("*.png"):
        assert (
            path.read_bytes()
            == (tmp_path / "other" / path.relative_to(tmp_path / "one")).read_bytes()
        )
    again = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "one"], capture_output=True, text=True
    )
    assert again.returncode == 1
    assert "exists; choose another" in again.stderr
