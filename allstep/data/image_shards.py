"""Reads pictures in tar shards or Parquet files with Hugging Face's `datasets`.

That package converts them once into its own format, below `HF_DATASETS_CACHE`, which has fast
access to any row; processes that need the same files wait for the first one to convert them.
"""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Self

from allstep.data.image_folder import EncodedImage
from allstep.errors import UsageError

__all__ = ["ImageShards"]

_BUILDERS = {".tar": "webdataset", ".parquet": "parquet"}
_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "fine_label")


class ImageShards:
    """The pictures of some shards with their class indices, in the order of the files.

    In tar files a sample consists of `KEY.jpg` (or another format) and `KEY.cls`, as in WebDataset;
    in Parquet files it is a row with the columns `image` and `label`, as on the Hugging Face Hub.

    Args:
        shards: files of one kind, from `find_shards`.

    Attributes:
        classes: names of the classes from the files' schema, or all labels that occur, sorted.

    Raises:
        UsageError: if there is no column of pictures or of labels, or a picture has no label.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        import datasets  # an optional dependency, and slow to import

        self._folder = shards[0].parent
        files = [str(path) for path in shards]
        rows = datasets.load_dataset(_BUILDERS[shards[0].suffix], data_files=files, split="train")
        self._image = self._column(rows.column_names, _IMAGE_COLUMNS, "pictures")
        self._label = self._column(rows.column_names, _LABEL_COLUMNS, "labels")
        labels, kind = rows.unique(self._label), rows.features[self._label]
        if None in labels or -1 in labels:
            raise UsageError(
                f"`folder` (={self._folder}): some pictures have the label None or -1, as in test"
                " sets whose labels are secret; take files with labels."
            )
        is_numbered = isinstance(kind, datasets.ClassLabel)
        self.classes = list(kind.names) if is_numbered else sorted(labels)
        values = range(len(self.classes)) if is_numbered else self.classes
        self._numbers = {value: number for number, value in enumerate(values)}
        self._rows = rows.cast_column(self._image, datasets.Image(decode=False))
        self._indices: Sequence[int] = range(len(rows))

    def _column(self, found: Sequence[str], known: Sequence[str], what: str) -> str:
        for name in known:
            if name in found:
                return name
        raise UsageError(
            f"`folder` (={self._folder}): its files have no {what}: of {', '.join(known)} there is"
            f" none among {', '.join(found)}."
        )

    def select(self, indices: Sequence[int]) -> Self:
        """The pictures with these indices; the classes stay the same."""
        chosen = copy(self)
        chosen._indices = [self._indices[index] for index in indices]
        return chosen

    def name(self, index: int) -> str:
        """A picture's unique name: its row number in the shards."""
        return str(self._indices[index])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[EncodedImage, int]:
        number = self._indices[index]
        row = self._rows[number]
        image = row[self._image] or {"path": None, "bytes": b""}  # bytes that can't be decoded
        name = f"{self._folder}: picture {number} ({image['path'] or 'without a name'})"
        return EncodedImage(name, image["bytes"]), self._numbers[row[self._label]]
