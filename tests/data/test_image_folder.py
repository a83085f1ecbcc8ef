import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from allstep.data import image_folder
from allstep.data.image_folder import Crop, ImageFolder, center_crop, find_images, random_crop
from allstep.errors import DataError, UsageError


def whole(width: int, height: int) -> Crop:
    return Crop((0, 0, width, height))


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    """Red grows to the right, green downwards."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def read(path: Path, crop=whole, size: int = 16) -> torch.Tensor:
    return ImageFolder([(path, 0)], size=size, crop=crop)[0][0]


def test_pixels_are_those_of_the_picture(tmp_path: Path) -> None:
    gradient().save(tmp_path / "x.png")
    tensor = read(tmp_path / "x.png")
    assert tensor.shape == (3, 16, 16)
    assert tensor.dtype == torch.uint8
    expected = np.array(gradient().resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert (tensor.int() - torch.from_numpy(expected).permute(2, 0, 1)).abs().max() <= 1


def test_a_large_jpeg_is_decoded_small_and_alike(tmp_path: Path) -> None:
    gradient(1024, 768).save(tmp_path / "x.jpg", quality=95)
    gradient(1024, 768).save(tmp_path / "x.png")
    small, whole_size = read(tmp_path / "x.jpg"), read(tmp_path / "x.png")
    assert (small.float() - whole_size.float()).abs().max() <= 6


def test_crop_and_mirror(tmp_path: Path) -> None:
    gradient().save(tmp_path / "x.png")
    left = read(tmp_path / "x.png", lambda w, h: Crop((0, 0, w / 2, h)))
    right = read(tmp_path / "x.png", lambda w, h: Crop((w / 2, 0, w, h)))
    mirrored = read(tmp_path / "x.png", lambda w, h: Crop((0, 0, w / 2, h), mirror=True))
    assert left[0].float().mean() < 70 < 180 < right[0].float().mean()
    assert torch.equal(mirrored, left.flip(-1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_honoured(tmp_path: Path, orientation: int) -> None:
    """A file turned as a camera would turn it reads as the upright picture."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    turned = gradient().transpose(turns[orientation]) if orientation > 1 else gradient()
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned.save(tmp_path / "turned.png", exif=exif)
    gradient().save(tmp_path / "upright.png")

    def top_right(width: int, height: int) -> Crop:
        assert (width, height) == (64, 48)
        return Crop((32, 0, 64, 24))

    difference = read(tmp_path / "turned.png", top_right).int() - read(
        tmp_path / "upright.png", top_right
    )
    assert difference.abs().max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    picture = gradient().convert("L" if mode == "I;16" else mode)
    picture = picture.convert("I;16") if mode == "I;16" else picture
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    picture.save(path)
    assert read(path).shape == (3, 16, 16)


def test_transparent_is_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "x.png")
    assert int(read(tmp_path / "x.png").min()) == 255


def test_random_crops_are_within_bounds() -> None:
    random.seed(0)
    for width, height in [(640, 480), (10, 1000), (1, 1)]:
        crops = [random_crop(width, height) for _ in range(200)]
        for crop in crops:
            left, top, right, bottom = crop.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
        assert {crop.mirror for crop in crops} == {False, True}


def test_random_crops_follow_the_random_state() -> None:
    random.seed(1)
    first = random_crop(100, 80)
    random.seed(1)
    assert random_crop(100, 80) == first
    assert random_crop(100, 80) != first


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    gradient(256, 256).save(tmp_path / "x.jpg")
    path = tmp_path / "cut.jpg"
    path.write_bytes((tmp_path / "x.jpg").read_bytes()[:1500])
    return path


def test_unreadable_picture_stops_and_is_named(truncated: Path) -> None:
    with pytest.raises(DataError, match=r"cut\.jpg can't be read.*--on-bad-image skip"):
        read(truncated, center_crop)


def test_unreadable_picture_is_skipped_and_counted(
    truncated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ImageFolder([(truncated, 3)] * 2, size=8, crop=center_crop, on_bad_image="skip")
    with caplog.at_level(logging.WARNING, "allstep"):
        labels = [dataset[i][1] for i in range(2)]
    assert labels == [image_folder.UNREADABLE] * 2
    assert "cut.jpg" in caplog.text
    assert "2 so far" in caplog.text


def test_find_images(tmp_path: Path) -> None:
    for name in ("b/2.JPG", "b/deep/1.png", "a/1.jpeg", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    images = find_images(tmp_path)
    assert images.classes == ["a", "b"]
    found = [images[index] for index in range(len(images))]
    names = [("a/1.jpeg", 0), ("b/2.JPG", 1), ("b/deep/1.png", 1)]
    assert found == [(tmp_path / name, label) for name, label in names]
    some = images.select([2, 0])
    assert [some.name(index) for index in range(len(some))] == ["b/deep/1.png", "a/1.jpeg"]


def test_images_behind_links_are_found(tmp_path: Path) -> None:
    for name in ("other/1.png", "other/deep/2.png", "data/a/3.png", "data/b/4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "data" / "a" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "c").symlink_to(tmp_path / "other" / "deep")
    images = find_images(tmp_path / "data")
    assert [images.name(index) for index in range(len(images))] == [
        *("a/3.png", "a/more/1.png", "a/more/deep/2.png", "b/4.png", "c/2.png")
    ]


@pytest.mark.parametrize("target", ["a", "a/deep", ".", "b"])
def test_links_in_a_circle_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "deep" / "1.png").touch()
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "deep" / "on").symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match=r"the link .* leads to a folder that it is in"):
        find_images(tmp_path)


def test_images_are_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = ["a/b-c.png", "a/b/1.png", "a/b/ü.png", "a/b.c/2.png", "a b/3.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    images = find_images(tmp_path)
    assert [images[index][0] for index in range(len(images))] == sorted(
        tmp_path / name for name in names
    )


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pictures would be missing in silence; `scandir` fails, as root may read all folders."""
    (tmp_path / "cats" / "secret").mkdir(parents=True)
    (tmp_path / "cats" / "1.png").touch()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match=r"cats/secret can't be read \(Permission denied\)"):
        find_images(tmp_path)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        find_images(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no folders in it"):
        find_images(tmp_path)
    (tmp_path / "cats").mkdir()
    with pytest.raises(UsageError, match="class `cats` has no pictures"):
        find_images(tmp_path)


def test_16_bit_grey_keeps_its_shades(tmp_path: Path) -> None:
    shades = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(shades).save(tmp_path / "x.png")
    Image.fromarray((shades >> 8).astype(np.uint8)).save(tmp_path / "y.png")
    assert torch.equal(read(tmp_path / "x.png"), read(tmp_path / "y.png"))


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(DataError, match=r"x.tif can't be read as a picture: floating-point"):
        read(tmp_path / "x.tif")


def test_a_jpeg_is_decoded_no_smaller_than_either_side_needs(tmp_path: Path) -> None:
    """Stripes that a picture decoded at half the height would have lost."""
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[::4], pixels[1::4] = 255, 255
    Image.fromarray(pixels).save(tmp_path / "x.jpg", quality=95)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    # The width would allow a quarter of the size, the height not even a half.
    stripes = lambda w, h: Crop((0, 0, w, h / 4))  # noqa: E731
    jpeg, png = (read(tmp_path / name, stripes, size=64) for name in ("x.jpg", "x.png"))
    assert (jpeg.float() - png.float()).abs().mean() < 8
