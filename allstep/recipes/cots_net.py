"""Shapes of the nets of recipe `cots`, from a size for laptops to the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "large"]


@dataclass(frozen=True)
class StageShape:
    """The shape of a stage, three layers; see `allstep.nn.AutoencoderStage`."""

    kernel_size: int
    stride: int
    block: tuple[int, int, int]
    pool_size: int
    pool_stride: int
    norm_size: int


@dataclass(frozen=True)
class NetShape:
    """The shape of a net.

    Attributes:
        contrast_size: rows and columns of the neighbourhood in which the contrast of the input is
            normalised.
        stages: the stages in order.
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
"""Rows and columns of a picture -> the shape of the small net."""

WIDER = 4  # ratio of the maps of the large net to those of the small one
