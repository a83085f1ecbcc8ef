"""Reads the IDX format of the MNIST family: one array per file, gzipped or not."""

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from allstep.errors import DataError

_MOST_DIMS = 64  # numpy's limit
_UINT8 = 0x08


def read_idx(path: Path | str) -> Tensor:
    """Reads an IDX file of unsigned bytes.

    Args:
        path: file with two zero bytes, the type 0x08, the number of dimensions, their sizes as
            big-endian 32-bit integers, and the values; its name ends in `.gz` if it is compressed.

    Returns:
        uint8 tensor of the file's shape.

    Raises:
        DataError: if the file can't be read or isn't an IDX file; the message names it.
    """
    path = Path(path)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path} is no IDX file: it doesn't begin with two zero bytes.")
    kind, num_dims = content[2], content[3]
    if kind != _UINT8:
        raise DataError(
            f"{path} holds values of type 0x{kind:02x}; unsigned bytes (0x08) are read."
        )
    start = 4 + 4 * num_dims
    if len(content) < start or num_dims > _MOST_DIMS:
        raise DataError(f"{path} has no sizes of its {num_dims} dimensions: it is damaged.")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + prod(shape):
        raise DataError(
            f"{path} has {len(content) - start} values where its shape {shape} needs"
            f" {prod(shape)}: it is cut short or damaged."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
