"""The recipes as a user meets them: what they need, what they refuse, that they learn."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

import allstep
from allstep import Communicator, UsageError
from allstep.errors import CheckpointError
from allstep.recipes import REGISTRY
from allstep.recipes.digits import Digits, load_digits
from allstep.recipes.fashion import Fashion
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_images, write_clothes, write_pictures


@pytest.mark.parametrize("name", REGISTRY)
def test_registry(name: str) -> None:
    recipe = REGISTRY[name]
    assert recipe.name == name
    assert recipe.summary
    for field in dataclasses.fields(recipe):
        assert field.default is not dataclasses.MISSING, field.name  # a flag may be left out


def test_digits_split() -> None:
    train_set, test_set = load_digits()
    assert (len(train_set), len(test_set)) == (1437, 360)
    assert torch.bincount(test_set.tensors[1]).tolist() == [36] * 10


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn import datasets

    expected = datasets.load_digits()
    parts = load_digits()
    images, labels = (torch.cat([part.tensors[n] for part in parts]) for n in (0, 1))
    found = sorted(zip(images.view(-1, 64).tolist(), labels.tolist(), strict=True))
    own = sorted(zip(expected.data.astype(int).tolist(), expected.target.tolist(), strict=True))
    assert found == own


def test_recipe_seed_decides_the_initial_weights() -> None:
    comm = Communicator.single_process()

    def weights(seed: int) -> torch.Tensor:
        return next(Digits(seed=seed).task(comm).model.parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_digits_learn_on_two_workers(tmp_path: Path) -> None:
    def train(comm: Communicator) -> float:
        recipe = Digits(epochs=3, warmup_epochs=1)
        return allstep.fit(recipe.task(comm), recipe, comm, tmp_path).metrics["accuracy"]

    first, second = run_ranks(2, train, timeout_s=120)
    assert first == second > 0.9


@pytest.mark.parametrize("name", ["digits", "fashion", "images", "text"])
def test_warmup_of_a_shorter_run_has_the_same_share(name: str) -> None:
    recipe = REGISTRY[name]()
    share = recipe.settings.warmup_epochs / recipe.epochs
    assert 0.05 < share < 0.15
    for epochs in (1, 2, 7 * recipe.epochs):
        shorter = dataclasses.replace(recipe, epochs=epochs)
        assert shorter.settings.warmup_epochs == pytest.approx(share * epochs)
    asked = dataclasses.replace(recipe, epochs=3, warmup_epochs=1.5)
    assert asked.settings.warmup_epochs == 1.5


@pytest.mark.parametrize(
    ("name", "warmup_epochs"), [("digits", 3.0), ("fashion", 0.5), ("images", 5.0), ("text", 0.25)]
)
def test_warmup_of_each_recipe_by_default(name: str, warmup_epochs: float) -> None:
    assert REGISTRY[name]().settings.warmup_epochs == pytest.approx(warmup_epochs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"`lr` \(=0.0\) must be above 0"),
        ({"momentum": 1.0}, r"`momentum` \(=1.0\)"),
        ({"weight_decay": -1.0}, r"`weight_decay` \(=-1.0\)"),
        ({"warmup_epochs": 30.0}, r"`warmup_epochs` \(=30.0\).*below `epochs`"),
        ({"global_batch": 100}, "nearest: 96, 112"),
        ({"epochs": 0}, r"`epochs` \(=0\) must be at least 1"),
        ({"clip_norm": 0.0}, r"`clip_norm` \(=0.0\) must be positive"),
        ({"loader_workers": -1}, r"`loader_workers` \(=-1\)"),
        ({"checkpoint_every_steps": 0}, r"`checkpoint_every_steps` \(=0\)"),
    ],
)
def test_recipe_refuses_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Digits(**changes)


def test_fashion_says_how_to_get_its_data(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no train-images-idx3-ubyte\.gz.*apt-get install dataset"
    ):
        Fashion(folder=tmp_path).check()


def test_fashion_reads_its_folder(tmp_path: Path) -> None:
    task = Fashion(folder=write_clothes(tmp_path)).task(Communicator.single_process())
    assert (len(task.train_set), len(task.test_set)) == (20, 10)  # type: ignore[arg-type]
    assert task.loss(task.model, task.train_set[:4]).isfinite()  # type: ignore[index]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path)


def test_images_learn_and_are_held_out_by_name(pictures: Path, tmp_path: Path) -> None:
    recipe = small_images(pictures, on_bad_image="skip")
    comm = Communicator.single_process()
    task = recipe.task(comm)
    sizes = len(task.train_set), len(task.test_set)  # type: ignore[arg-type]
    assert sum(sizes) == 48
    assert 5 < sizes[1] < 25
    (pictures / "dark" / "0.jpg").unlink()  # the others stay where they were
    again = recipe.task(comm)
    assert abs(len(again.test_set) - sizes[1]) <= 1  # type: ignore[arg-type]
    report = allstep.fit(again, recipe, comm, tmp_path / "run")
    assert report.totals["accuracy"][1] == len(again.test_set)  # type: ignore[arg-type]
    assert report.metrics["unreadable"] == 0
    # With the statistics of the batch: after a dozen steps the running ones are far behind.
    images, labels = default_collate([again.test_set[i] for i in range(len(again.test_set))])  # type: ignore[arg-type]
    right, count = again.metrics(again.model.train(), (images, labels))["accuracy"]
    assert right > 0.9 * count


def test_images_whose_classes_were_renamed_are_not_resumed(tmp_path: Path) -> None:
    """In the order of the new names the model's classes would be each other's."""
    pictures = write_pictures(tmp_path / "pictures")
    comm, recipe = Communicator.single_process(), small_images(pictures)
    allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run")
    (pictures / "dark").rename(pictures / "a dark one")
    with pytest.raises(CheckpointError, match=r"`classes` .* differs from the checkpoint's"):
        allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run", resume=True)


def test_images_unreadable_picture_is_a_sample_without_loss(pictures: Path) -> None:
    path = next((pictures / "dark").glob("*.jpg"))
    path.write_bytes(path.read_bytes()[:200])
    task = small_images(pictures, on_bad_image="skip").task(Communicator.single_process())
    readable = torch.randint(0, 255, (3, 3, 8, 8), dtype=torch.uint8)
    images = torch.cat([readable, readable[:1]])
    model = task.model.eval()
    whole = task.loss(model, (readable, torch.tensor([0, 1, 0])))
    with_bad = task.loss(model, (images, torch.tensor([0, 1, 0, -1])))
    torch.testing.assert_close(with_bad * 4, whole * 3)
    metrics = task.metrics(model, (images, torch.tensor([0, 1, 0, -1])))
    assert metrics["accuracy"][1] == 3
    assert int(metrics["unreadable"][0]) == 1


def test_images_with_train_and_val_folders(tmp_path: Path) -> None:
    for part, names in (("train", "ab"), ("val", "ac")):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "x.png")
    with pytest.raises(UsageError, match="different classes: b, c"):
        small_images(tmp_path).check()
    (tmp_path / "train" / "b").rename(tmp_path / "train" / "c")
    small_images(tmp_path).check()


def test_images_whose_names_are_no_text(pictures: Path) -> None:
    """As on disks of the time before UTF-8."""
    (pictures / "dark" / "0.jpg").rename(pictures / "dark" / os.fsdecode(b"\xe9.jpg"))
    (pictures / "dark").rename(pictures / os.fsdecode(b"d\xfcster"))
    recipe = small_images(pictures)
    recipe.check()
    task = recipe.build(Communicator.single_process())
    images = [part[index] for part in (task.train_set, task.test_set) for index in range(len(part))]  # type: ignore[arg-type]
    assert sorted(label for _, label in images) == [0] * 24 + [1] * 24


@pytest.mark.parametrize("parts", [("train",), ("test", "train"), ("training", "valid")])
def test_images_refuses_parts_for_classes(pictures: Path, parts: tuple[str, ...]) -> None:
    """A model would learn to tell the training set from the test set."""
    small_images(pictures).check()
    for part in parts:
        shutil.copytree(pictures / "dark", pictures / "both" / part / "dark")
        shutil.copytree(pictures / "bright", pictures / "both" / part / "bright")
    with pytest.raises(UsageError, match=f"has {', '.join(parts)} in it, which are taken for"):
        small_images(pictures / "both").check()
    shutil.copytree(pictures / "both" / parts[0] / "dark", pictures / "both" / "plane")
    small_images(pictures / "both").check()  # of vehicles


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 1.5}, r"`val_fraction` \(=1.5\)"),
        ({"image_size": 4}, r"`image_size` \(=4\)"),
        ({"label_smoothing": 1.0}, r"`label_smoothing` \(=1.0\)"),
    ],
)
def test_images_refuses_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small_images(Path("nowhere"), **changes)


def test_images_with_nothing_held_out(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "x.png")
    with pytest.raises(UsageError, match=r"`val_fraction` .* of the 1 pictures leaves"):
        small_images(tmp_path).task(Communicator.single_process())


@pytest.mark.parametrize("name", ["lars", "lamb", "rmsprop_warmup"])
def test_recipe_optimizers_leave_nonfinite_gradients_to_the_step(name: Any) -> None:
    """Else `--nonfinite propagate` would raise, and each gradient be looked at twice."""
    task = Digits(optimizer=name, warmup_epochs=1.0).task(Communicator.single_process())
    assert task.optimizer(task.model).nonfinite == "propagate"
