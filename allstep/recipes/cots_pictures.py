"""The training pictures of recipe `cots`, and the format of its net's input."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import allstep
from allstep import Communicator

_AT_ONCE = 256  # pictures that are normalised together
_FLAT = 4.0  # standard deviation of uint8 values below which a picture shows next to nothing


@dataclass(frozen=True)
class PictureFormat:
    """The format of a net's input pictures.

    Attributes:
        pixels: rows and columns.
        channels: 1 for grey, 3 for colour.
        contrast_size: rows and columns of the neighbourhood in which contrast is normalised; odd.
        dtype: dtype of the normalised pictures.
    """

    pixels: int
    channels: int
    contrast_size: int
    dtype: torch.dtype

    def normalised(self, x: Tensor) -> Tensor:
        """Undivided pictures, normalised as a whole and then in each neighbourhood.

        Args:
            x: pictures, uint8 [num, channels, height, width].
        """
        grid = allstep.nn.Grid(Communicator.single_process())
        layout = grid.split(x.shape[2:])
        norm = allstep.nn.LocalContrastNorm(grid, layout, self.contrast_size, floor=0.1)
        parts = [norm(normalise(s, self.dtype)).contiguous() for s in torch.split(x, _AT_ONCE)]
        return torch.cat(parts)

    def own_part(self, grid: "allstep.nn.Grid", x: Tensor) -> Tensor:
        """This worker's part of undivided pictures, as a view."""
        layout = grid.split((self.pixels, self.pixels))
        return allstep.nn.windows.local_shard(grid, x, layout)

    def resized(self, x: Tensor) -> Tensor:
        """Grey squares uint8 [num, side, side] -> uint8 [num, channels, pixels, pixels]."""
        x = x[:, None]
        if x.shape[2] != self.pixels:
            size = (self.pixels, self.pixels)
            smooth = interpolate(x.float(), size, mode="bilinear", antialias=True)
            x = smooth.round().to(torch.uint8)
        return x.expand(-1, self.channels, -1, -1)


def normalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalises each picture to mean 0 and variance 1, [num, channels, height, width] in `dtype`.

    It is (x - mean) / max(std, 4) over the whole picture; a deviation of 4 is hardly visible.
    """
    x = x.to(dtype)
    mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
    return (x - mean) / std.clamp_min(_FLAT)


class TrainingPictures:
    """This worker's part of the training pictures: patches of photographs and unlabelled portraits.

    Args:
        grid: the workers that share each picture.
        form: format of the pictures.
        patches: patches of photographs, uint8 [num, channels, pixels, pixels].
        faces: portraits, also uint8 [num, channels, pixels, pixels].
        face_share: probability that a drawn picture is a portrait.
        batch: number of pictures of a batch.
    """

    def __init__(
        self,
        grid: "allstep.nn.Grid",
        form: PictureFormat,
        patches: Tensor,
        faces: Tensor,
        *,
        face_share: float,
        batch: int,
    ) -> None:
        self._patches, self._faces = (
            torch.cat(
                [form.own_part(grid, form.normalised(s)).clone() for s in torch.split(x, _AT_ONCE)]
            )
            for x in (patches, faces)
        )
        self._device = grid.comm.device
        self._face_share = face_share
        self._batch = batch

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draws a batch, [batch, channels, *this worker's window]."""
        num = self._batch
        are_faces = torch.rand(num, generator=generator) < self._face_share
        patch_numbers = torch.randint(len(self._patches), (num,), generator=generator)
        face_numbers = torch.randint(len(self._faces), (num,), generator=generator)
        places = are_faces.view(-1, 1, 1, 1)
        drawn = torch.where(places, self._faces[face_numbers], self._patches[patch_numbers])
        return drawn.to(self._device)
