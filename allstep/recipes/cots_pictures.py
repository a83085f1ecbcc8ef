"""Pictures of filters and of the stimuli that neurons respond to most."""

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["save_filters", "save_stimuli"]

_MOST_FILTERS = 400
_ZOOM = 3
_FACE = (80, 220, 100)
_DISTRACTOR = (60, 60, 60)


def save_filters(path: Path, filters: Tensor, channels: int) -> None:
    """A sheet of first-layer filters, each scaled so that grey is zero.

    Args:
        path: a .png.
        filters: [rows, columns, num_filters, kernel * kernel * channels] of all blocks; a few
            hundred of them, evenly spread, are shown.
        channels: of the pictures.
    """
    flat = filters.flatten(0, 2)
    chosen = torch.linspace(0, len(flat) - 1, min(len(flat), _MOST_FILTERS)).long()
    flat = flat[chosen].float()
    side = round((flat.shape[1] / channels) ** 0.5)
    tiles = flat.view(-1, side, side, channels)
    tiles = 127.5 + 127.5 * tiles / tiles.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    tiles = tiles.expand(-1, -1, -1, 3).to(torch.uint8)
    border = torch.tensor((0, 0, 0), dtype=torch.uint8)
    _save(path, [_framed(tile, border) for tile in tiles], columns=20)


def save_stimuli(path: Path, rows: list[tuple[Tensor, Tensor]]) -> None:
    """A line for each neuron with its best stimuli, faces in a green frame.

    Args:
        path: a .png.
        rows: for each neuron its stimuli, uint8 [num, side, side], and which are faces, [num].
    """
    colours = {True: _FACE, False: _DISTRACTOR}
    tiles = [
        _framed(
            picture[:, :, None].expand(-1, -1, 3),
            torch.tensor(colours[bool(is_face)], dtype=torch.uint8),
        )
        for pictures, are_faces in rows
        for picture, is_face in zip(pictures, are_faces, strict=True)
    ]
    _save(path, tiles, columns=len(rows[0][0]))


def _framed(tile: Tensor, colour: Tensor) -> Tensor:
    height, width, _ = tile.shape
    framed = colour.expand(height + 2, width + 2, 3).clone()
    framed[1:-1, 1:-1] = tile
    return framed


def _save(path: Path, tiles: list[Tensor], *, columns: int) -> None:
    from PIL import Image

    height, width, _ = tiles[0].shape
    rows = -(-len(tiles) // columns)
    sheet = torch.zeros(rows * height, columns * width, 3, dtype=torch.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // columns * height, i % columns * width
        sheet[top : top + height, left : left + width] = tile
    image = Image.fromarray(sheet.numpy())
    image.resize((_ZOOM * image.width, _ZOOM * image.height), Image.Resampling.NEAREST).save(path)
