"""The base classes of recipes on a folder of text files: texts, and a second stage."""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch.utils.data import Dataset

import allstep
from allstep import UsageError
from allstep.recipes.base import Recipe


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe, ABC):
    """Reads `folder/**/*.txt`, and holds out the end of each text."""

    folder: Path = Path("texts")
    """Folder with .txt files in UTF-8, which may be in sub-folders."""

    held_out: float = 0.1
    """Share of each text that is held out for testing, at its end."""

    sequence_length: int = 64
    """Tokens of a sample, or their largest number if it varies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allstep.errors.check_share("held_out", self.held_out, "(0, 1)", "0.1 is usual")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sample in any stage."""
        return self.sequence_length

    def check(self) -> None:
        """Checks for the folder and enough text in it."""
        paths = allstep.data.text_folder.find_texts(self.folder)
        num_bytes = sum(path.stat().st_size for path in paths)
        # A token is a byte or more, so this much is certain before any file is read.
        self.check_enough(round(self.held_out * num_bytes), "bytes", "held out")

    def read_texts(self) -> tuple[list[str], list[str]]:
        """The beginnings of the texts, to train on, and their held-out ends."""
        reader = allstep.data.text_folder
        texts = [reader.read_text(path) for path in reader.find_texts(self.folder)]
        parts = [reader.split_text(text, self.held_out) for text in texts]
        return [train for train, _ in parts], [test for _, test in parts]

    def check_enough(self, count: int, unit: str, part: str) -> None:
        """Raises UsageError if `count` is too small for one sequence and the next token."""
        if count <= self.longest_sequence:
            is_longer = self.longest_sequence > self.sequence_length
            name = "second_sequence_length" if is_longer else "sequence_length"
            raise UsageError(
                f"`folder` (={self.folder}) has too little text: {count} {unit} {part} are less"
                f" than one sequence of `{name}` (={self.longest_sequence}) tokens and"
                " the next one. Add text, or lower it."
            )


@dataclass(frozen=True, kw_only=True)
class TokenRecipe(TextRecipe, ABC):
    """Reads `folder/**/*.txt` and trains on sequences of tokens, maybe longer ones at the end.

    The texts are kept in memory as tokens. The end of each text is held out.
    """

    second_batch_share: ClassVar[float] = 1.0
    """The default of `second_global_batch` as a share of `global_batch`."""

    vocab_size: int = 2048
    """Number of different tokens, learned from the training texts."""

    dropout: float = 0.0
    """Share of the features dropped after the embedding and in each block."""

    second_sequence_length: int | None = None
    """Tokens of a sample in a second stage at the end of the run; None for no such stage."""

    second_epochs: int = 1
    """Epochs of the second stage, the last of `epochs`."""

    second_global_batch: int | None = None
    """Samples of one optimizer step in the second stage; by default as in the first."""

    second_lr_share: float = 1.0
    """Peak learning rate of the second stage, as a share of `lr`; it starts again from 0."""

    second_warmup_epochs: float = 0.0
    """Epochs in which the second stage's rate grows linearly to its peak."""

    def __post_init__(self) -> None:
        if self.second_sequence_length is not None:
            self._check_second_stage()  # first, as its messages name the flags
        super().__post_init__()
        allstep.errors.check_integer("sequence_length", self.sequence_length, 2, "it counts tokens")
        allstep.errors.check_share("dropout", self.dropout, "[0, 1)")

    def _check_second_stage(self) -> None:
        if self.longest_sequence <= self.sequence_length:
            raise UsageError(
                f"`second_sequence_length` (={self.second_sequence_length}) must exceed"
                f" `sequence_length` (={self.sequence_length}); leave it out for one stage."
            )
        if not 1 <= self.second_epochs < self.epochs:
            raise UsageError(
                f"`second_epochs` (={self.second_epochs}) must be at least 1 and below `epochs`"
                f" (={self.epochs})."
            )
        if not 0 <= self.second_warmup_epochs < self.second_epochs:
            raise UsageError(
                f"`second_warmup_epochs` (={self.second_warmup_epochs}) must be 0 or more and below"
                f" `second_epochs` (={self.second_epochs})."
            )
        if not self.second_lr_share > 0:
            raise UsageError(f"`second_lr_share` (={self.second_lr_share}) must be positive.")
        if self.second_batch < 1 or self.second_batch % self.second_micro_batch:
            raise UsageError(
                f"`second_global_batch` (={self.second_batch}) must be a multiple of the second"
                f" stage's micro-batch (={self.second_micro_batch}, as many tokens as"
                f" `micro_batch` of the first)."
            )

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sample in any stage."""
        return self.second_sequence_length or self.sequence_length

    @property
    def second_batch(self) -> int:
        """Samples of a step in the second stage."""
        if self.second_global_batch is not None:
            return self.second_global_batch
        return round(self.second_batch_share * self.global_batch)

    @property
    def second_micro_batch(self) -> int:
        """Samples of a micro-batch in the second stage, with as many tokens as in the first."""
        return max(1, self.micro_batch * self.sequence_length // self.longest_sequence)

    @property
    def second_stage(self) -> allstep.optim.SecondStage | None:
        """The schedule of the second stage; None if there is none."""
        if self.second_sequence_length is None:
            return None
        return allstep.optim.SecondStage(
            epochs=self.second_epochs,
            lr=self.lr * self.second_lr_share,
            warmup_epochs=self.second_warmup_epochs,
        )

    def with_second_stage(
        self, mixed: allstep.optim.MixedBatch, second: allstep.optim.SecondStage
    ) -> Self:
        """This recipe with a second stage of longer sequences."""
        return replace(
            self,
            second_sequence_length=mixed.length_factor * self.sequence_length,
            second_epochs=second.epochs,
            second_global_batch=round(mixed.batch_share * self.global_batch),
            second_lr_share=mixed.lr_share,
            second_warmup_epochs=second.warmup_epochs,
        )

    def check(self) -> None:
        """Checks for the package tokenizers, the folder and enough text in it."""
        self.need_package("tokenizers", "tokenizers")
        super().check()

    def later_stages(
        self, make_sets: Callable[[int], tuple[Dataset[Any], Dataset[Any]]]
    ) -> list[allstep.Stage]:
        """The second stage, if there is one.

        Args:
            make_sets: tokens of a sample -> training set and test set.
        """
        if self.second_sequence_length is None:
            return []
        train_set, test_set = make_sets(self.second_sequence_length)
        return [
            allstep.Stage(
                first_epoch=self.epochs - self.second_epochs,
                train_set=train_set,
                test_set=test_set,
                global_batch=self.second_batch,
                micro_batch=self.second_micro_batch,
            )
        ]
