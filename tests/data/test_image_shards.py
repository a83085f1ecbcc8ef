"""Pictures in tar shards and Parquet files are those of the folders that they were made of."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import allstep
from allstep import Communicator
from allstep.data.image_folder import ImageFolder, center_crop, find_images, find_shards
from allstep.errors import DataError, UsageError
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_images

pytestmark = pytest.mark.slow  # `datasets` is installed with the frameworks

NUM_PICTURES, NUM_CLASSES = 30, 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs allstep[shards]")  # takes a second
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/CLASS/NUMBER.png and val/CLASS/NUMBER.png."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(NUM_PICTURES):
            path = tmp_path / "folders" / part / f"{number % NUM_CLASSES}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 255, (12, 10, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path)
    return tmp_path / "folders"


def write_tars(folder: Path, shards: Path) -> None:
    """As WebDataset has it, in several files."""
    shards.mkdir(parents=True)
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.name)
    for first in range(0, len(paths), 12):
        with tarfile.open(shards / f"part-{first:03}.tar", "w") as tar:
            for path in paths[first : first + 12]:
                tar.add(path, path.name)
                info = tarfile.TarInfo(f"{path.stem}.cls")
                info.size = len(path.parent.name)
                tar.addfile(info, io.BytesIO(path.parent.name.encode()))


def write_parquet(folder: Path, shards: Path, labels: list[int] | None = None) -> None:
    """As on the Hub: encoded pictures beside numbered classes with names."""
    import datasets

    shards.mkdir(parents=True)
    paths = sorted(folder.rglob("*.png"), key=lambda path: path.name)
    names = datasets.ClassLabel(names=["zero", "one", "two"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    pictures = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    labels = [int(path.parent.name) for path in paths] if labels is None else labels
    rows = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
    rows.to_parquet(shards / "all.parquet", batch_size=7)


WRITERS = {"tar": write_tars, "parquet": write_parquet}


def pixels_of(images: Any) -> dict[bytes, int]:
    decoded = ImageFolder(images, size=8, crop=center_crop)
    return {
        decoded[i][0].numpy().tobytes(): decoded[i][1] for i in torch.randperm(len(images)).tolist()
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_shards_hold_the_pictures_of_the_folder(kind: str, folder: Path, tmp_path: Path) -> None:
    WRITERS[kind](folder / "train", tmp_path / "shards")
    shards = allstep.data.image_shards.ImageShards(find_shards(tmp_path / "shards"))
    assert shards.classes == ([0, 1, 2] if kind == "tar" else ["zero", "one", "two"])
    assert len(shards) == NUM_PICTURES
    whole = pixels_of(find_images(folder / "train"))
    assert pixels_of(shards) == whole
    assert len(whole) == NUM_PICTURES
    some = shards.select([4, 17])
    assert len(some) == 2
    assert some[1] == shards[17] != shards[4]


def test_shards_train_the_same_model_on_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    """With loader processes, and a part held out."""
    write_parquet(folder / "train", tmp_path / "shards")
    recipe = small_images(
        tmp_path / "shards", epochs=1, precision="float64", loader_workers=1, compression="exact"
    )
    found = []
    for num_workers in (1, 2):

        def train(comm: Communicator, run_dir: Path = tmp_path / str(num_workers)) -> Any:
            task = recipe.task(comm)
            report = allstep.fit(task, recipe, comm, run_dir)
            return report.totals["accuracy"], [p.detach() for p in task.model.parameters()]

        found.append(run_ranks(num_workers, train)[0])
    (total, parameters), (other_total, others) = found
    assert total == other_total
    assert total[1] > 0
    assert all(torch.equal(p, other) for p, other in zip(parameters, others, strict=True))


def test_shards_with_train_and_val(folder: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_tars(folder / part, tmp_path / "shards" / part)
    recipe = small_images(tmp_path / "shards")
    recipe.check()
    task = recipe.task(Communicator.single_process())
    assert len(task.train_set) == len(task.test_set) == NUM_PICTURES  # type: ignore[arg-type]


def test_shards_beside_folders_are_refused(folder: Path) -> None:
    for part, other in (("train", "val"), ("val", "train")):
        (folder / part / "x.tar").touch()
        with pytest.raises(UsageError, match="one of train/ and val/ has shards and the other"):
            small_images(folder).check()
        (folder / part / "x.tar").unlink()
        assert not find_shards(folder / other)
    small_images(folder).check()


def test_pictures_without_labels_are_refused(folder: Path, tmp_path: Path) -> None:
    labels = [0] * (NUM_PICTURES - 1) + [-1]
    write_parquet(folder / "train", tmp_path / "shards", labels)
    with pytest.raises(UsageError, match="some pictures have the label None or -1"):
        small_images(tmp_path / "shards").task(Communicator.single_process())


def test_files_without_pictures_are_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=r"its files have no pictures: .* none among text"):
        small_images(tmp_path).task(Communicator.single_process())


def test_two_kinds_of_shards_are_refused(tmp_path: Path) -> None:
    for name in ("a.tar", "b.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="has tar and Parquet files"):
        small_images(tmp_path).check()


def test_a_damaged_picture_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "train" / "1" / "004.png"
    path.write_bytes(path.read_bytes()[:60])
    write_tars(folder / "train", tmp_path / "shards")
    shards = allstep.data.image_shards.ImageShards(find_shards(tmp_path / "shards"))
    images = ImageFolder(shards, size=8, crop=center_crop)
    with pytest.raises(DataError, match=r"shards: picture 4 \(004.png\) can't be read"):
        images[4]
    assert images[5][0].shape == (3, 8, 8)


def test_a_missing_picture_is_named_or_skipped(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "shards").mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    pictures = [{"bytes": buffer.getvalue(), "path": None}, None]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [1, 2]}, features=features)
    rows.to_parquet(tmp_path / "shards" / "all.parquet")
    shards = allstep.data.image_shards.ImageShards(find_shards(tmp_path / "shards"))
    with pytest.raises(DataError, match=r"picture 1 \(without a name\) can't be read as a picture"):
        ImageFolder(shards, size=8, crop=center_crop)[1]
    skipping = ImageFolder(shards, size=8, crop=center_crop, on_bad_image="skip")
    assert [skipping[index][1] for index in range(2)] == [0, -1]
