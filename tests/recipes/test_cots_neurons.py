"""Scores of neurons, against scikit-learn and by hand; pictures to train on and to test with."""

import numpy as np
import pytest
import torch
from PIL import Image

from allstep.errors import UsageError
from allstep.recipes.cots_data import (
    draw_patches,
    find_photographs,
    read_photograph,
    read_portraits,
)
from allstep.recipes.cots_neurons import Responses, auc, best_threshold, score
from allstep.recipes.cots_pictures import PictureFormat, normalise


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_auc_against_scikit_learn():
    from sklearn.metrics import roc_auc_score  # takes a second, in each process that collects

    faces, distractors = random(40, 300) + 0.3, random(70, 300, seed=1)
    faces[:, ::2], distractors[:, ::2] = faces[:, ::2].round(), distractors[:, ::2].round()  # ties
    labels = np.r_[np.ones(40), np.zeros(70)]
    expected = [
        roc_auc_score(labels, torch.cat([faces, distractors])[:, neuron]) for neuron in range(300)
    ]
    np.testing.assert_allclose(auc(faces, distractors), expected, rtol=1e-12)


def test_best_threshold_against_all_thresholds():
    faces, distractors = random(15).round(decimals=1) + 0.5, random(30, seed=1).round(decimals=1)
    threshold, accuracy = best_threshold(faces, distractors)
    tried = torch.linspace(-6, 6, 4001)
    right = (faces[:, None] > tried).sum(0) + (distractors[:, None] <= tried).sum(0)
    assert accuracy == pytest.approx(float(right.max()) / 45)
    assert (faces > threshold).sum() + (distractors <= threshold).sum() == right.max()


def test_score_chooses_neuron_and_threshold_on_one_half_only():
    choose = Responses(random(50, 9), random(90, 9, seed=1))
    report = Responses(random(50, 9, seed=2), random(90, 9, seed=3))
    choose.distractors[:, 4] += 2.0  # says "no face"
    report.faces[:, 7] += 3.0  # the best where nobody may look
    found = score(choose, report)
    assert (found.neuron, found.sign) == (4, -1.0)
    assert found.chosen_auc > 0.85 > 0.7 > found.auc
    threshold, _ = best_threshold(-choose.faces[:, 4], -choose.distractors[:, 4])
    right = (-report.faces[:, 4] > threshold).sum() + (-report.distractors[:, 4] <= threshold).sum()
    assert found.accuracy == pytest.approx(float(right) / 140)


def photograph(path, width: int, height: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_draw_patches_from_all_scales_and_none_flat(tmp_path):
    photograph(tmp_path / "a.png", 60, 40)
    Image.new("RGB", (300, 300), "blue").save(tmp_path / "sky.png")
    scales = read_photograph(tmp_path / "a.png", 3, smallest=20)
    assert [tuple(x.shape) for x in scales] == [(3, 40, 60), (3, 28, 42), (3, 20, 30)]
    sky = read_photograph(tmp_path / "sky.png", 3, smallest=20)
    generator = torch.Generator().manual_seed(0)
    patches = draw_patches([scales, sky], 50, 20, generator)
    assert patches.shape == (50, 3, 20, 20) and patches.float().std((2, 3)).min() > 4
    flat = draw_patches([sky], 2, 20, generator)  # it does not wait for ever
    assert flat.float().std((2, 3)).max() == 0
    with pytest.raises(UsageError, match=r"`pixels` \(=50\) exceeds all photographs"):
        draw_patches([scales], 1, 50, generator)
    grey = read_photograph(tmp_path / "a.png", 1, smallest=100)
    assert [tuple(x.shape) for x in grey] == [(1, 40, 60)]


def test_normalise_each_picture():
    x = (40 * random(5, 3, 8, 8) + 100).clamp(0, 255).to(torch.uint8)
    y = normalise(x, torch.float64)
    torch.testing.assert_close(y.mean((1, 2, 3)), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(y.std((1, 2, 3)), torch.ones(5, dtype=torch.float64))
    assert normalise(torch.full((1, 1, 4, 4), 9, dtype=torch.uint8), torch.float32).abs().max() == 0
    for pixels, channels in ((8, 3), (16, 1)):
        form = PictureFormat(pixels, channels, 5, torch.float32)
        assert form.resized(x[:, 0]).shape == (5, channels, pixels, pixels)


def test_find_photographs_that_are_missing(tmp_path):
    with pytest.raises(UsageError, match=r"`folder` \(=.*\) has 0 photographs .* at least 4"):
        find_photographs("folder", tmp_path)
    assert len(find_photographs("scikit", tmp_path)) == 11


def vec_bytes(pictures: np.ndarray) -> bytes:
    num, size = len(pictures), pictures[0].size
    rows = [b"\0" + picture.astype("<i2").tobytes() for picture in pictures]
    return np.array([num, size, 0], "<i4").tobytes() + b"".join(rows)


def test_read_portraits_split_between_portraits(tmp_path):
    path = tmp_path / "faces.vec"
    pictures = np.random.default_rng(0).integers(0, 255, (50, 4, 4))
    path.write_bytes(vec_bytes(pictures))
    portraits = read_portraits(path)
    np.testing.assert_array_equal(portraits.choose, pictures[[0, 10]])
    np.testing.assert_array_equal(portraits.warps, pictures[:20])
    np.testing.assert_array_equal(portraits.report, pictures[[20, 30, 40]])
    packaged = read_portraits(None)
    assert packaged.choose.shape == packaged.report.shape == (50, 25, 25)

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"`faces` \(=.*\) is no file of square samples"):
        read_portraits(path)
    with pytest.raises(UsageError, match=r"`faces` \(=.*\) can't be read \(No such file"):
        read_portraits(tmp_path / "none.vec")
