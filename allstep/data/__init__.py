"""Loaders of global batches, the same for any number of workers; and readers of files.

The readers of pictures, which need additional packages, are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.data import text_folder as text_folder
from allstep.data.batches import GlobalBatch, MicroBatch
from allstep.data.idx import read_idx
from allstep.data.loaders import loader
from allstep.data.map_loader import MapLoader
from allstep.data.sampler import GlobalBatchSampler
from allstep.data.splitting import split
from allstep.data.streams import StreamLoader
from allstep.data.subsets import subset, subset_size

if TYPE_CHECKING:
    from allstep.data import image_folder as image_folder
    from allstep.data import image_shards as image_shards

__all__ = [
    "GlobalBatch",
    "GlobalBatchSampler",
    "MapLoader",
    "MicroBatch",
    "StreamLoader",
    "loader",
    "read_idx",
    "split",
    "subset",
    "subset_size",
]


def __getattr__(name: str) -> Any:
    if name in ("image_folder", "image_shards"):
        return import_module(f"allstep.data.{name}")
    raise AttributeError(f"module 'allstep.data' has no attribute {name!r}")
