"""Any folder of text files and a small transformer that fills in or continues."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import allstep
from allstep import Communicator, Metrics, Task, UsageError
from allstep.recipes.base import Recipe
from allstep.recipes.transformer import Transformer

__all__ = ["LanguageModelling", "Text"]

_MIN_VOCAB_SIZE = 258


@dataclass(frozen=True, kw_only=True)
class Text(Recipe):
    """Reads `folder/**/*.txt`, learns tokens from them and then to predict these.

    The texts are kept in memory as tokens. The end of each is held out.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "any folder of text files, a small transformer; minutes"

    epochs: int = 2
    global_batch: int = 32
    micro_batch: int = 16
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_epochs: float = 0.25
    clip_norm: float | None = 1.0

    folder: Path = Path("texts")
    """Folder with .txt files in UTF-8, in sub-folders or not."""

    objective: Literal["masked", "causal"] = "causal"
    """Predict 15 % hidden tokens from all others, or each token from those before it."""

    held_out: float = 0.1
    """Share of each text, at its end, that is held out for testing."""

    vocab_size: int = 2048
    """Number of different tokens, learned from the training texts."""

    sequence_length: int = 64
    """Tokens of a sample."""

    width: int = 128
    """Features of a token."""

    depth: int = 4
    """Blocks of the transformer."""

    heads: int = 4
    """Heads of its attention; they share the width."""

    dropout: float = 0.0
    """Share of the features dropped after the embedding and in each block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < _MIN_VOCAB_SIZE:
            raise UsageError(
                f"`vocab_size` (={self.vocab_size}) must be at least {_MIN_VOCAB_SIZE}: a token for"
                " each byte and two special ones."
            )
        if not 0 < self.held_out < 1:
            raise UsageError(f"`held_out` (={self.held_out}) must be between 0 and 1.")
        if self.sequence_length < 2:
            raise UsageError(
                f"`sequence_length` (={self.sequence_length}) must be at least 2 tokens."
            )
        for name in ("width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"`{name}` (={getattr(self, name)}) must be at least 1.")
        if self.width % self.heads:
            raise UsageError(
                f"`width` (={self.width}) must be a multiple of `heads` (={self.heads})."
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(f"`dropout` (={self.dropout}) must be at least 0 and below 1.")

    def check(self) -> None:
        """Looks for tokenizers, the folder and enough text in it."""
        if find_spec("tokenizers") is None:
            raise UsageError("Recipe `text` needs tokenizers: pip install tokenizers.")
        paths = allstep.data.text_folder.find_texts(self.folder)
        num_bytes = sum(path.stat().st_size for path in paths)
        # A token is a byte or more, so this much is certain before any file is read.
        self._check_enough(round(self.held_out * num_bytes), "bytes", "held out")

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's texts."""
        train_tokens, test_tokens = self._tokens(comm)
        train_set = self._sequences(train_tokens)
        modelling = LanguageModelling(_log_frequencies(train_tokens, self.vocab_size))
        return Task(
            model=Transformer(
                vocab_size=self.vocab_size,
                sequence_length=self.sequence_length,
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                dropout=self.dropout,
                causal=self.objective == "causal",
            ),
            train_set=train_set,
            test_set=self._sequences(test_tokens),
            loss=modelling.loss,
            metrics=modelling.metrics,
            optimizer=self.make_optimizer,
            schedule=self.make_schedule(len(train_set)),  # type: ignore[arg-type]
        )

    def _tokens(self, comm: Communicator) -> tuple[Tensor, Tensor]:
        """The tokens to train on and those held out; the tokenizer is that of rank 0."""
        reader = allstep.data.text_folder
        texts = [reader.read_text(path) for path in reader.find_texts(self.folder)]
        parts = [reader.split_text(text, self.held_out) for text in texts]
        train_texts, test_texts = zip(*parts, strict=True)
        trained = reader.train_tokenizer(train_texts, self.vocab_size) if comm.rank == 0 else None
        tokenizer = comm.broadcast_object(trained)
        train_tokens = reader.encode(tokenizer, train_texts, self.vocab_size)
        test_tokens = reader.encode(tokenizer, test_texts, self.vocab_size)
        self._check_enough(len(train_tokens), "tokens", "to train on")
        self._check_enough(len(test_tokens), "tokens", "held out")
        return train_tokens, test_tokens

    def _sequences(self, tokens: Tensor) -> Dataset[tuple[Tensor, ...]]:
        reader = allstep.data.text_folder
        if self.objective == "causal":
            return reader.CausalSequences(tokens, self.sequence_length)
        return reader.MaskedSequences(tokens, self.sequence_length, self.vocab_size)

    def _check_enough(self, count: int, unit: str, part: str) -> None:
        if count <= self.sequence_length:
            raise UsageError(
                f"`folder` (={self.folder}) has too little text: {count} {unit} {part} are less"
                f" than one sequence of `sequence_length` (={self.sequence_length}) tokens and"
                " the next one. Add text, or lower it."
            )


@dataclass(frozen=True)
class LanguageModelling:
    """Cross-entropy of predicted tokens, and that of a guess which sees no others.

    A micro-batch is (inputs, targets) or (inputs, targets, positions); each of its samples has as
    many targets.

    Args:
        unigram_log_probs: logarithm of each token's frequency in the training set, [vocab_size].
    """

    unigram_log_probs: Tensor

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy of the targets, nats."""
        inputs, targets, *positions = batch
        logits = model(inputs, *positions)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Metrics:
        """Sums and counts of `loss` and `unigram` (nats a target), and of `accuracy`."""
        inputs, targets, *positions = batch
        logits = model(inputs, *positions).flatten(0, 1)
        targets = targets.flatten()
        count = len(targets)
        unigram = self.unigram_log_probs.to(targets.device)[targets]
        return {
            "loss": (F.cross_entropy(logits, targets, reduction="sum"), count),
            "unigram": (-unigram.sum(), count),
            "accuracy": ((logits.argmax(1) == targets).sum(), count),
        }


def _log_frequencies(tokens: Tensor, vocab_size: int) -> Tensor:
    """log((count + 1) / (number of tokens + vocab_size)) of each token: none is impossible."""
    counts = torch.bincount(tokens, minlength=vocab_size).double() + 1
    return (counts / counts.sum()).log()
