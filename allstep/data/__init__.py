"""Data in global batches, the same for any number of workers; readers of files.

The readers that need a package of their own are imported when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.data.batches import GlobalBatch as GlobalBatch
from allstep.data.batches import MicroBatch as MicroBatch
from allstep.data.idx import read_idx as read_idx
from allstep.data.loaders import loader as loader
from allstep.data.map_loader import MapLoader as MapLoader
from allstep.data.sampler import GlobalBatchSampler as GlobalBatchSampler
from allstep.data.scattering import scatter as scatter
from allstep.data.streams import StreamLoader as StreamLoader

if TYPE_CHECKING:
    from allstep.data import image_folder as image_folder
    from allstep.data import text_folder as text_folder

_READERS = ("image_folder", "text_folder")


def __getattr__(name: str) -> Any:
    if name in _READERS:
        return import_module(f"allstep.data.{name}")
    raise AttributeError(f"module 'allstep.data' has no attribute {name!r}")
