import gzip
from pathlib import Path

import pytest
import torch

from allstep.data import read_idx
from allstep.errors import DataError

HEADER = b"\0\0\x08\x02" + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
VALUES = bytes([0, 1, 2, 253, 254, 255])


@pytest.mark.parametrize("name", ["pictures", "pictures.gz"])
def test_values_and_shape(tmp_path: Path, name: str) -> None:
    content = HEADER + VALUES
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert torch.equal(
        read_idx(path), torch.tensor([[0, 1, 2], [253, 254, 255]], dtype=torch.uint8)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + VALUES[:-1], r"5 values where its shape \[2, 3\] needs 6: it is cut short"),
        (HEADER + VALUES + b"x", "7 values where"),
        (b"PK\x03\x04", "no IDX file"),
        (b"", "no IDX file"),
        (b"\0\0\x0d\x01" + bytes(8), "type 0x0d"),
        (HEADER[:-1], "no sizes of its 2 dimensions"),
        (b"\0\0\x08\x46" + 70 * b"\0\0\0\1" + b"x", "no sizes of its 70 dimensions"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_damaged_compression_and_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(HEADER + VALUES)[:-9])
    with pytest.raises(DataError, match=r"labels\.gz can't be read"):
        read_idx(path)
    with pytest.raises(DataError, match=r"nowhere can't be read"):
        read_idx(tmp_path / "nowhere")
