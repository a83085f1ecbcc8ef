"""The nine layers of recipe `cots`, in sizes from a laptop's to the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

import allstep

__all__ = ["NETS", "NetShape", "Size", "StageShape", "make_stages"]

Size = Literal["small", "large"]


@dataclass(frozen=True)
class StageShape:
    """A stage's numbers; see `allstep.nn.Stage`."""

    kernel_size: int
    step: int
    block: tuple[int, int, int]
    pool_size: int
    pool_stride: int
    norm_size: int


@dataclass(frozen=True)
class NetShape:
    """A net's numbers.

    Attributes:
        contrast_size: neighbourhood in which a picture's contrast is normalised before the net.
        stages: from the first.
    """

    contrast_size: int
    stages: tuple[StageShape, ...]


NETS: Mapping[int, NetShape] = {
    24: NetShape(
        9,
        (
            StageShape(12, 2, (8, 2, 2), 2, 2, 5),
            StageShape(4, 1, (8, 2, 2), 2, 2, 3),
            StageShape(3, 1, (16, 2, 2), 2, 2, 3),
        ),
    ),
    48: NetShape(
        17,
        (
            StageShape(12, 4, (16, 2, 2), 2, 2, 5),
            StageShape(5, 1, (16, 2, 2), 2, 2, 3),
            StageShape(4, 1, (32, 2, 2), 2, 2, 3),
        ),
    ),
    200: NetShape(
        25,
        (
            StageShape(18, 2, (15, 1, 1), 5, 2, 5),
            StageShape(18, 1, (15, 1, 1), 5, 1, 5),
            StageShape(12, 1, (15, 1, 1), 5, 1, 5),
        ),
    ),
}
"""Rows and columns of a picture -> the stages of the small net."""

_WIDER = 4  # maps of the large net for each of the small one


def make_stages(
    grid: "allstep.nn.Grid",
    pixels: int,
    channels: int,
    size: Size,
    *,
    relu: bool,
    seed: int,
    dtype: torch.dtype,
) -> "list[allstep.nn.Stage]":
    """The three stages, on a grid of workers."""
    layout = grid.split((pixels, pixels))
    stages: list[allstep.nn.Stage] = []
    for index, shape in enumerate(NETS[pixels].stages):
        depth, *sides = shape.block
        depth *= _WIDER if size == "large" else 1
        stage = allstep.nn.Stage(
            grid,
            layout,
            channels,
            shape.kernel_size,
            shape.step,
            (depth, *sides),
            pool_size=shape.pool_size,
            pool_stride=shape.pool_stride,
            norm_size=shape.norm_size,
            relu=relu,
            seed=1000 * seed + index,
            dtype=dtype,
        )
        stages.append(stage)
        layout, channels = stage.out_layout, depth
    return stages
