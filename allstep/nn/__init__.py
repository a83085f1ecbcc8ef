"""Layers for models that are larger than one worker: arrays split over a grid of workers.

Windows are laid over the global array; layers are single-worker code on windows.
"""

from allstep.nn import windows
from allstep.nn.batch_norm import GroupedBatchNorm, convert_batch_norm
from allstep.nn.batch_norm_statistics import keep_last_statistics, precise_batch_norm
from allstep.nn.chain import Chain, ChainPart
from allstep.nn.contrast import DivisiveNorm, LocalContrastNorm, SubtractiveNorm
from allstep.nn.convolution import Conv2d
from allstep.nn.locally_connected import LocallyConnected2d, LocallyConnectedTranspose2d
from allstep.nn.mixture_of_experts import MixtureOfExperts
from allstep.nn.mixture_of_experts import serve_others as serve_others
from allstep.nn.mixture_of_experts import serving as serving
from allstep.nn.pipeline import Pipeline
from allstep.nn.pipeline import num_calls_of as num_calls_of
from allstep.nn.pooling import AvgPool2d, L2Pool2d, MaxPool2d
from allstep.nn.replicated import replicated
from allstep.nn.sparse_autoencoder import AutoencoderStage, SparseAutoencoder, StageTraining
from allstep.nn.tensor_parallel import tensor_parallel
from allstep.nn.windows import DividedTensor, Grid, Layout, Window

__all__ = [
    "AvgPool2d",
    "Chain",
    "ChainPart",
    "Conv2d",
    "DividedTensor",
    "DivisiveNorm",
    "Grid",
    "GroupedBatchNorm",
    "L2Pool2d",
    "Layout",
    "LocalContrastNorm",
    "LocallyConnected2d",
    "LocallyConnectedTranspose2d",
    "MaxPool2d",
    "MixtureOfExperts",
    "Pipeline",
    "SparseAutoencoder",
    "AutoencoderStage",
    "StageTraining",
    "SubtractiveNorm",
    "Window",
    "convert_batch_norm",
    "keep_last_statistics",
    "precise_batch_norm",
    "replicated",
    "tensor_parallel",
    "windows",
]
