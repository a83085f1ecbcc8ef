"""Data in global batches, the same for any number of workers."""

from allstep.data.batches import GlobalBatch as GlobalBatch
from allstep.data.batches import MicroBatch as MicroBatch
from allstep.data.loaders import loader as loader
from allstep.data.map_loader import MapLoader as MapLoader
from allstep.data.sampler import GlobalBatchSampler as GlobalBatchSampler
from allstep.data.scattering import scatter as scatter
from allstep.data.streams import StreamLoader as StreamLoader
