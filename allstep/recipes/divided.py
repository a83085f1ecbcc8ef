"""Recipes whose model is divided over the workers, so that each sees every sample."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from allstep import Communicator

__all__ = ["DividedRecipe"]


@dataclass(frozen=True, kw_only=True)
class DividedRecipe(ABC):
    """A training that runs itself; a frozen dataclass, every field a flag of `allstep train`.

    `Recipe` is for data parallelism: workers share out the samples of a batch. Here they share
    out the model.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def check(self) -> None:
        """Looks for what the recipe needs; cheap, meant to run before any worker starts.

        Raises:
            UsageError: if data or a package is missing; says how to get it.
        """

    @abstractmethod
    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int:
        """Trains, or goes on from the newest checkpoint, and writes `report.json`.

        Args:
            comm: the workers that share the model; each of them must call this.
            run_dir: the run's folder, which exists.
            resume: go on.

        Returns:
            The exit code: 0, or 128 + the signal that ended the run after a checkpoint.
        """
