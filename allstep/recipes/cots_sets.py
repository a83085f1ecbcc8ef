"""What the recipe `cots` trains on and what it asks its neurons about."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import allstep
from allstep.recipes.cots_data import (
    contrast_normalised,
    draw_patches,
    find_photographs,
    read_photograph,
    read_portraits,
    resized,
)
from allstep.recipes.cots_faces import FaceTest, Stimuli

if TYPE_CHECKING:
    from allstep.recipes.cots import Cots

__all__ = ["PictureSets"]

# The paper's test has 48,000 distractors for 13,152 faces.
_DISTRACTORS_PER_FACE = 48_000 / 13_152
_STIMULI_SEED = 600_000


class PictureSets:
    """This worker's part of the training pictures, and the stimuli of the test.

    Half of the photographs are trained on. The others give the distractors: the first half of
    these the ones to choose with, the rest the ones to report.
    """

    def __init__(self, recipe: "Cots", grid: "allstep.nn.Grid") -> None:
        self.grid = grid
        self.channels = recipe.channels
        self._recipe = recipe
        self._layout = grid.split((recipe.pixels, recipe.pixels))
        self._paths = find_photographs(recipe.photos, recipe.folder)
        self._portraits = read_portraits(recipe.faces)
        self.train_photographs = self._read(self._paths[::2], recipe.channels, recipe.pixels)
        generator = torch.Generator().manual_seed(recipe.seed)
        patches = draw_patches(self.train_photographs, recipe.patches, recipe.pixels, generator)
        warps = resized(self._portraits.warps, recipe.pixels, recipe.channels)
        self._patches = self._own_part(patches)
        self._warps = self._own_part(warps)

    def draw(self, generator: torch.Generator) -> Tensor:
        """A batch: this worker's part of photographs' patches and of unlabelled portraits."""
        num = self._recipe.batch
        are_faces = torch.rand(num, generator=generator) < self._recipe.face_share
        patch_numbers = torch.randint(len(self._patches), (num,), generator=generator)
        warp_numbers = torch.randint(len(self._warps), (num,), generator=generator)
        places = are_faces.view(-1, 1, 1, 1)
        return torch.where(places, self._warps[warp_numbers], self._patches[patch_numbers])

    def face_test(self) -> FaceTest:
        """The stimuli are the same whatever the seed."""
        generator = torch.Generator().manual_seed(_STIMULI_SEED)
        held_out = self._paths[1::2]
        half = len(held_out) // 2
        portraits, recipe = self._portraits, self._recipe
        return FaceTest(
            self.grid,
            self._layout,
            self._stimuli(portraits.choose, held_out[:half], generator),
            self._stimuli(portraits.report, held_out[half:], generator),
            pixels=recipe.pixels,
            channels=recipe.channels,
            contrast_size=recipe.contrast_size,
            dtype=recipe.dtype,
        )

    def _stimuli(self, faces: Tensor, paths: list[Path], generator: torch.Generator) -> Stimuli:
        side = faces.shape[1]
        num = round(len(faces) * _DISTRACTORS_PER_FACE)
        patches = draw_patches(self._read(paths, 1, side), num, side, generator)
        return Stimuli(faces, patches[:, 0])

    def _own_part(self, pictures: Tensor) -> Tensor:
        """Normalised as whole pictures, a part of them kept."""
        recipe = self._recipe
        parts = [
            allstep.nn.windows.own_part(
                self.grid,
                contrast_normalised(some, recipe.dtype, recipe.contrast_size),
                self._layout,
            ).clone()
            for some in torch.split(pictures, 256)
        ]
        return torch.cat(parts)

    def _read(self, paths: list[Path], channels: int, side: int) -> list[list[Tensor]]:
        return [read_photograph(path, channels, side) for path in paths]
