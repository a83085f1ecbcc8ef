"""The sparse autoencoder of "Deep learning with COTS HPC systems", in sizes from a laptop's up."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

import allstep
from allstep import Communicator, UsageError
from allstep.files import json_text, write_whole
from allstep.recipes.base import DividedRecipe
from allstep.recipes.cots_data import (
    Photos,
    Portraits,
    draw_patches,
    find_photographs,
    read_photograph,
    read_portraits,
)
from allstep.recipes.cots_faces import FaceTest, Stimuli
from allstep.recipes.cots_net import NETS, WIDER, Size
from allstep.recipes.cots_pictures import PictureFormat, TrainingPictures
from allstep.recipes.cots_report import show, table_of_neurons
from allstep.recipes.cots_training import GreedyTraining
from allstep.recipes.registry import recipe_to_plain

_UNTRAINED_SEED, _STIMULI_SEED = 500_000, 600_000
_COUNTS = (
    "steps",
    "batch",
    "data_parallel",
    "patches",
    "log_every_steps",
    "checkpoint_every_steps",
)
# The paper's test has 48,000 distractors for 13,152 faces.
_DISTRACTORS_PER_FACE = 48_000 / 13_152


@dataclass(frozen=True, kw_only=True)
class Cots(DividedRecipe):
    """Nine layers, trained stage by stage on photographs; then neurons are tested on faces.

    The net is divided among the workers in space; each has its part of every picture.
    """

    name: ClassVar[str] = "cots"
    summary: ClassVar[str] = "photographs, a sparse autoencoder divided over the workers; minutes"

    size: Size = "small"
    """Size of the net: large has four times as many maps as small in each stage."""

    nonlinearity: Literal["none", "relu"] = "relu"
    """Nonlinearity after filtering; none is as published."""

    pixels: int = 24
    """Rows and columns of a picture, which determine the net: 24, 48 or the paper's 200."""

    channels: int = 1
    """Channels of a picture: 1 for grey, 3 for colour."""

    # Chosen among ten nets, rates of 0.05 to 1, sparsities of 0.1 to 3 and 300 to 2,000 steps, with
    # one seed.
    steps: int = 600
    """Updates of each stage."""

    batch: int = 96
    """Pictures of an update; workers that share a net have a part of each picture."""

    data_parallel: int = 1
    """Number of nets, each divided over workers / nets workers; each gets a share of an update's
    pictures."""

    lr: float | None = None
    """Learning rate for filters with a single input of variance 1; falls to 0. By default 1.0 for
    the net it was tuned for, small with relu at 24 pixels, and 0.3 for others."""

    momentum: float = 0.9
    """SGD's momentum."""

    sparsity: float = 0.3
    """Weight of the pools' responses in the cost, relative to the reconstruction error."""

    tied: bool = True
    """Decode with the encoder's filters; otherwise with separate ones."""

    photos: Photos = "scikit"
    """Source of photographs: scikit-image and scikit-learn, the package mvtb-data, or `folder`."""

    folder: Path = Path("photographs")
    """Folder of photographs for `photos` = folder."""

    patches: int = 20_000
    """Number of squares cut from the photographs to train on."""

    faces: Path | None = None
    """OpenCV's file trainingfaces_24-24.vec; by default 100 portraits from scikit-image."""

    face_share: float = 0.1
    """Share of the training pictures that are unlabelled portraits, from the half to choose on."""

    seed: int = 0
    """Seed of the initial filters and of the samples."""

    precision: Literal["float32", "float64"] = "float32"
    """Dtype of the filters and the pictures."""

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
        for name in _COUNTS:
            allstep.errors.check_integer(name, getattr(self, name))
        if self.data_parallel > self.batch:
            raise UsageError(
                f"`data_parallel` (={self.data_parallel}) must be at most `batch` (={self.batch}):"
                " each net has pictures of every update."
            )
        if not self.learning_rate > 0:
            raise UsageError(f"`lr` (={self.lr}) must be positive.")
        for name in ("momentum", "face_share"):
            allstep.errors.check_share(name, getattr(self, name), "[0, 1)")
        if not self.sparsity >= 0:
            raise UsageError(f"`sparsity` (={self.sparsity}) must be 0 or more.")

    def data_paths(self) -> list[Path]:
        folder = self.folder if self.photos == "folder" else None
        return [path for path in (folder, self.faces) if path is not None]

    def check(self) -> None:
        """Checks for photographs and faces."""
        find_photographs(self.photos, self.folder)
        if self.faces is not None or self.face_share:
            read_portraits(self.faces)

    def check_workers(self, num_workers: int) -> None:
        """Checks that the workers divide evenly among the nets."""
        if num_workers % self.data_parallel:
            raise UsageError(
                f"`data_parallel` (={self.data_parallel}) must divide the workers ({num_workers});"
                f" start a multiple of {self.data_parallel}."
            )

    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int:
        """Trains the stages, tests the neurons, and writes pictures and `report.json`."""
        self.check_workers(comm.size)
        nets = self.data_parallel
        mesh = comm.mesh(data=nets, model=comm.size // nets)  # a net is shared along `model`
        grid = allstep.nn.Grid(mesh["model"])
        paths, portraits = find_photographs(self.photos, self.folder), read_portraits(self.faces)
        photographs = self._read(paths[::2], self.channels, self.pixels)
        stages = self.stages(grid, self.seed)
        pictures = self.pictures(grid, photographs, portraits)
        training = self._training(stages, pictures, mesh)
        with allstep.train.Interrupts() as interrupts:
            loop = allstep.train.Loop(
                training,
                comm,
                run_dir,
                interrupts,
                epochs=len(stages),
                log_every_steps=self.log_every_steps,
                checkpoint_every_steps=self.checkpoint_every_steps,
            )
            loop.run(resume=resume)
        table = []
        if loop.interrupted is None:
            untrained = self.stages(grid, self.seed + _UNTRAINED_SEED)
            test = self._face_test(grid, paths[1::2], portraits)
            table = table_of_neurons(stages, untrained, test, photographs, run_dir, self.seed)
        report = {
            "workers": comm.size,
            "num_parameters": self._num_parameters(stages, mesh["model"]),
            "num_steps": training.step,
            "samples_per_s": loop.meter.samples_per_s,
            "costs": training.costs,
            "neurons": table,
            "interrupted": loop.interrupted,
        }
        if comm.rank == 0:
            write_whole(run_dir / "report.json", json_text(report))
            show(report, run_dir)
        return 128 + loop.interrupted if loop.interrupted else 0

    @property
    def learning_rate(self) -> float:
        """`lr`, or its default: with 1.0 the large net and the linear one diverge."""
        if self.lr is not None:
            return self.lr
        return 1.0 if (self.size, self.nonlinearity, self.pixels) == ("small", "relu", 24) else 0.3

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the filters and the pictures."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def form(self) -> PictureFormat:
        """The format of the net's input pictures."""
        return PictureFormat(
            self.pixels, self.channels, NETS[self.pixels].contrast_size, self.dtype
        )

    def stages(self, grid: "allstep.nn.Grid", seed: int) -> "list[allstep.nn.AutoencoderStage]":
        """The untrained net."""
        layout, channels = grid.split((self.pixels, self.pixels)), self.channels
        stages: list[allstep.nn.AutoencoderStage] = []
        for index, shape in enumerate(NETS[self.pixels].stages):
            depth, height, width = shape.block
            depth *= WIDER if self.size == "large" else 1
            stage = allstep.nn.AutoencoderStage(
                grid,
                layout,
                channels,
                **asdict(replace(shape, block=(depth, height, width))),
                relu=self.nonlinearity == "relu",
                seed=1000 * seed + index,
                dtype=self.dtype,
            )
            stages.append(stage)
            layout, channels = stage.out_layout, depth
        return stages

    def pictures(
        self, grid: "allstep.nn.Grid", photographs: list[list[Tensor]], portraits: Portraits
    ) -> TrainingPictures:
        """The training pictures: patches of photographs, and some portraits."""
        generator = torch.Generator().manual_seed(self.seed)
        return TrainingPictures(
            grid,
            self.form,
            draw_patches(photographs, self.patches, self.pixels, generator),
            self.form.resized(portraits.warps),
            face_share=self.face_share,
            batch=self.batch,
        )

    def _training(
        self,
        stages: "list[allstep.nn.AutoencoderStage]",
        pictures: TrainingPictures,
        mesh: "allstep.comm.Mesh[Communicator]",
    ) -> GreedyTraining:
        free = ("data_parallel", "log_every_steps", "checkpoint_every_steps")
        values = recipe_to_plain(self)["fields"]
        return GreedyTraining(
            stages,
            pictures.draw,
            mesh,
            batch=self.batch,
            steps=self.steps,
            seed=self.seed,
            training={
                "lr": self.learning_rate,
                "momentum": self.momentum,
                "sparsity": self.sparsity,
                "tied": self.tied,
            },
            options={name: value for name, value in values.items() if name not in free},
        )

    def _face_test(
        self, grid: "allstep.nn.Grid", held_out: list[Path], portraits: Portraits
    ) -> FaceTest:
        """The test on held-out photographs; the stimuli don't depend on the recipe's seed."""
        generator = torch.Generator().manual_seed(_STIMULI_SEED)
        half = len(held_out) // 2
        halves = []
        for faces, paths in (
            (portraits.choose, held_out[:half]),
            (portraits.report, held_out[half:]),
        ):
            side, num = faces.shape[1], round(len(faces) * _DISTRACTORS_PER_FACE)
            patches = draw_patches(self._read(paths, 1, side), num, side, generator)
            halves.append(Stimuli(faces, patches[:, 0]))
        return FaceTest(grid, self.form, *halves)

    def _read(self, paths: list[Path], channels: int, side: int) -> list[list[Tensor]]:
        return [read_photograph(path, channels, side) for path in paths]

    def _num_parameters(
        self, stages: "list[allstep.nn.AutoencoderStage]", comm: Communicator
    ) -> int:
        own = sum(parameter.numel() for stage in stages for parameter in stage.parameters())
        return int(comm.all_reduce(torch.tensor(own)))
