"""The nine layers of recipe `cots`, in sizes from a laptop's to the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "large"]


@dataclass(frozen=True)
class StageShape:
    """A stage's numbers; see `allstep.nn.AutoencoderStage`."""

    kernel_size: int
    stride: int
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

WIDER = 4  # maps of the large net for each of the small one
