"""The pictures that recipe `cots` trains on, and how its net sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import allstep
from allstep import Communicator

_AT_ONCE = 256  # pictures that are normalised together
_FLAT = 4.0  # standard deviation, of 255, below which a picture shows next to nothing


@dataclass(frozen=True)
class PictureFormat:
    """The pictures of a net.

    Attributes:
        pixels: rows and columns.
        channels: 1 for grey, 3 for colour.
        contrast_size: rows and columns of the neighbourhood in which contrast is normalised; odd.
        dtype: of their numbers.
    """

    pixels: int
    channels: int
    contrast_size: int
    dtype: torch.dtype

    def normalised(self, x: Tensor) -> Tensor:
        """Pictures as the net sees them, whole: normalised, then so in each place.

        Args:
            x: uint8 [num, channels, height, width].
        """
        grid = allstep.nn.Grid(Communicator.single_process())
        layout = grid.split(x.shape[2:])
        norm = allstep.nn.LocalContrastNorm(grid, layout, self.contrast_size, floor=0.1)
        parts = [norm(normalise(s, self.dtype)).contiguous() for s in torch.split(x, _AT_ONCE)]
        return torch.cat(parts)

    def own_part(self, grid: "allstep.nn.Grid", x: Tensor) -> Tensor:
        """This worker's part of whole pictures, a view."""
        layout = grid.split((self.pixels, self.pixels))
        return allstep.nn.windows.local_shard(grid, x, layout)

    def resized(self, x: Tensor) -> Tensor:
        """Grey squares, uint8 [num, side, side], as uint8 [num, channels, pixels, pixels]."""
        x = x[:, None]
        if x.shape[2] != self.pixels:
            size = (self.pixels, self.pixels)
            smooth = interpolate(x.float(), size, mode="bilinear", antialias=True)
            x = smooth.round().to(torch.uint8)
        return x.expand(-1, self.channels, -1, -1)


def normalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Each picture with mean 0 and variance 1: [num, channels, height, width] in `dtype`.

    (x - mean) / max(std, 4), over the whole picture; 4 of 255 is next to nothing to see.
    """
    x = x.to(dtype)
    mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
    return (x - mean) / std.clamp_min(_FLAT)


class TrainingPictures:
    """This worker's part of patches of photographs and of unlabelled portraits, mixed.

    Args:
        grid: the workers that share each picture.
        form: of the pictures.
        patches: uint8 [num, channels, pixels, pixels].
        faces: uint8, shaped alike.
        face_share: of the faces in a batch.
        batch: pictures drawn at once.
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
        """A batch, [batch, channels, *this worker's window]."""
        num = self._batch
        are_faces = torch.rand(num, generator=generator) < self._face_share
        patch_numbers = torch.randint(len(self._patches), (num,), generator=generator)
        face_numbers = torch.randint(len(self._faces), (num,), generator=generator)
        places = are_faces.view(-1, 1, 1, 1)
        drawn = torch.where(places, self._faces[face_numbers], self._patches[patch_numbers])
        return drawn.to(self._device)
