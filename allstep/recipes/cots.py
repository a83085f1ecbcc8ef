"""The sparse autoencoder of "Deep learning with COTS HPC systems", from a laptop's size up."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

import allstep
from allstep import Communicator, UsageError
from allstep.recipes.cots_data import Photos, find_photographs, read_portraits
from allstep.recipes.cots_net import NETS, Size, make_stages
from allstep.recipes.cots_report import show, table_of_neurons
from allstep.recipes.cots_sets import PictureSets
from allstep.recipes.cots_training import GreedyTraining
from allstep.recipes.divided import DividedRecipe

__all__ = ["Cots"]

_UNTRAINED_SEED = 500_000


@dataclass(frozen=True, kw_only=True)
class Cots(DividedRecipe):
    """Nine layers, trained stage by stage on photographs; then single neurons look at faces.

    The net is divided over the workers in space; each has its part of every picture.
    """

    name: ClassVar[str] = "cots"
    summary: ClassVar[str] = "photographs, a sparse autoencoder divided over the workers; minutes"

    size: Size = "small"
    """The net: large has four times the maps of small in each stage."""

    nonlinearity: Literal["none", "relu"] = "relu"
    """After filtering; none is as published."""

    pixels: int = 24
    """Rows and columns of a picture, which choose the net: 24, 48 or the paper's 200."""

    channels: int = 1
    """1 for grey, 3 for colour."""

    # Chosen among ten nets, rates of 0.05 to 1, sparsities of 0.1 to 3 and 300 to 2,000 steps, with
    # one seed.
    steps: int = 600
    """Updates of each stage."""

    batch: int = 96
    """Pictures of an update; every worker sees all of them, a part of each."""

    lr: float | None = None
    """Learning rate of filters that see one number with a variance of 1; falls to 0. By default
    1.0 for the net it was tuned for, small with relu at 24 pixels, and 0.3 for others."""

    momentum: float = 0.9
    """SGD's momentum."""

    sparsity: float = 0.3
    """Weight of the pools' responses beside the error of the reconstruction."""

    tied: bool = True
    """Decode with the encoder's filters; otherwise with others, trained apart."""

    photos: Photos = "scikit"
    """Photographs of scikit-image and scikit-learn, of the package mvtb-data, or of `folder`."""

    folder: Path = Path("photographs")
    """Folder of photographs for `photos` = folder."""

    patches: int = 20_000
    """Squares that are cut from the photographs to train on."""

    faces: Path | None = None
    """OpenCV's trainingfaces_24-24.vec; without it 100 portraits of scikit-image."""

    face_share: float = 0.1
    """Share of the training pictures that are portraits, unlabelled, of the half to choose on."""

    seed: int = 0
    """Start of the initial filters and of the order of samples."""

    precision: Literal["float32", "float64"] = "float32"
    """Of all numbers."""

    log_every_steps: int = 20
    """Updates between two lines of metrics.jsonl."""

    checkpoint_every_steps: int = 200
    """Updates between two checkpoints."""

    def __post_init__(self) -> None:
        if self.pixels not in NETS:
            known = ", ".join(map(str, NETS))
            raise UsageError(f"`pixels` (={self.pixels}) must be one of {known}.")
        if self.channels not in (1, 3):
            raise UsageError(f"`channels` (={self.channels}) must be 1 or 3.")
        for name in ("steps", "batch", "patches", "log_every_steps", "checkpoint_every_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"`{name}` (={getattr(self, name)}) must be at least 1.")
        if not self.learning_rate > 0:
            raise UsageError(f"`lr` (={self.lr}) must be positive.")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"`momentum` (={self.momentum}) must be at least 0 and below 1.")
        if not self.sparsity >= 0:
            raise UsageError(f"`sparsity` (={self.sparsity}) must be 0 or more.")
        if not 0 <= self.face_share < 1:
            raise UsageError(f"`face_share` (={self.face_share}) must be at least 0 and below 1.")

    def check(self) -> None:
        """Looks for photographs and faces."""
        find_photographs(self.photos, self.folder)
        if self.faces is not None or self.face_share:
            read_portraits(self.faces)

    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int:
        """Trains the stages, tests the neurons, writes pictures and `report.json`."""
        grid = allstep.nn.Grid(comm)
        sets = PictureSets(self, grid)
        stages = self.stages(grid, self.seed)
        training = self._training(stages, sets, comm, run_dir)
        if resume:
            training.restore()
        else:
            training.refuse_old_checkpoints()
        interrupted = training.run()
        table = []
        if not interrupted:
            untrained = self.stages(grid, self.seed + _UNTRAINED_SEED)
            table = table_of_neurons(stages, untrained, sets, run_dir, self.seed)
        report = {
            "workers": comm.size,
            "num_parameters": self._num_parameters(stages, comm),
            "num_steps": training.num_steps,
            "samples_per_s": training.samples_per_s,
            "costs": training.costs,
            "neurons": table,
            "interrupted": interrupted,
        }
        if comm.rank == 0:
            (run_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
            show(report, run_dir)
        return 128 + interrupted if interrupted else 0

    @property
    def learning_rate(self) -> float:
        """`lr`, or its default: with 1.0 the large net and the linear one diverge."""
        if self.lr is not None:
            return self.lr
        return 1.0 if (self.size, self.nonlinearity, self.pixels) == ("small", "relu", 24) else 0.3

    @property
    def dtype(self) -> torch.dtype:
        """Of all numbers."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def contrast_size(self) -> int:
        """Rows and columns of the neighbourhood in which pictures are normalised."""
        return NETS[self.pixels].contrast_size

    def stages(self, grid: "allstep.nn.Grid", seed: int) -> "list[allstep.nn.Stage]":
        """The untrained net."""
        return make_stages(
            grid,
            self.pixels,
            self.channels,
            self.size,
            relu=self.nonlinearity == "relu",
            seed=seed,
            dtype=self.dtype,
        )

    def _training(
        self, stages: "list[allstep.nn.Stage]", sets: PictureSets, comm: Communicator, run_dir: Path
    ) -> GreedyTraining:
        names = [field.name for field in fields(self) if not field.name.endswith("_every_steps")]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        plain = {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
        return GreedyTraining(
            stages,
            sets.draw,
            comm,
            run_dir,
            batch=self.batch,
            steps=self.steps,
            seed=self.seed,
            lr=self.learning_rate,
            momentum=self.momentum,
            sparsity=self.sparsity,
            tied=self.tied,
            log_every_steps=self.log_every_steps,
            checkpoint_every_steps=self.checkpoint_every_steps,
            options=plain,
        )

    def _num_parameters(self, stages: "list[allstep.nn.Stage]", comm: Communicator) -> int:
        own = sum(parameter.numel() for stage in stages for parameter in stage.parameters())
        return int(comm.all_reduce(torch.tensor(own)))
