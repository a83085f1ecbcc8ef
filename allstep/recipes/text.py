"""Any folder of text files and a small transformer that fills in or continues."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import allstep
from allstep import Communicator, Metrics, Task, UsageError
from allstep.recipes.base import Recipe
from allstep.recipes.transformer import Transformer

_MIN_VOCAB_SIZE = 258


@dataclass(frozen=True, kw_only=True)
class Text(Recipe):
    """Reads `folder/**/*.txt`, learns tokens from them and then to predict these.

    The texts are kept in memory as tokens. The end of each is held out.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "any folder of text files, a small transformer; minutes"
    warmup_share: ClassVar[float] = 0.125

    epochs: int = 2
    global_batch: int = 32
    micro_batch: int = 16
    optimizer: allstep.optim.OptimizerName = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.05
    clip_norm: float | None = 1.0

    folder: Path = Path("texts")
    """Folder with .txt files in UTF-8, in sub-folders or not."""

    objective: Literal["masked", "causal"] = "causal"
    """Predict 15 % hidden tokens from all others, or each token from those before it."""

    samples: Literal["pieces", "paragraphs"] = "pieces"
    """Cut the running text in equal pieces; or take each paragraph (up to an empty line) for
    itself, padded in its micro-batch, and average over the tokens of a global batch."""

    held_out: float = 0.1
    """Share of each text, at its end, that is held out for testing."""

    vocab_size: int = 2048
    """Number of different tokens, learned from the training texts."""

    sequence_length: int = 64
    """Tokens of a sample; of paragraphs at most."""

    width: int = 128
    """Features of a token."""

    depth: int = 4
    """Blocks of the transformer."""

    heads: int = 4
    """Heads of its attention; they share the width."""

    dropout: float = 0.0
    """Share of the features dropped after the embedding and in each block."""

    second_sequence_length: int | None = None
    """Tokens of a sample in a second stage at the end of the run; None for no such stage."""

    second_epochs: int = 1
    """Epochs of the second stage, the last of `epochs`."""

    second_global_batch: int | None = None
    """Samples of one optimizer step in the second stage; by default as in the first."""

    second_lr_share: float = 1.0
    """Peak learning rate of the second stage, as a share of `lr`; it begins again from 0."""

    second_warmup_epochs: float = 0.0
    """Epochs in which the second stage's rate grows linearly to its peak."""

    def __post_init__(self) -> None:
        if self.second_sequence_length is not None:
            self._check_second_stage()  # by the names of the flags
        super().__post_init__()
        check_integer = allstep.errors.check_integer
        check_integer(
            "vocab_size", self.vocab_size, _MIN_VOCAB_SIZE, "a token for each byte and two more"
        )
        if self.samples == "paragraphs" and self.objective != "causal":
            raise UsageError(
                f"`samples` (={self.samples!r}) needs `objective` 'causal', not {self.objective!r}."
            )
        if not 0 < self.held_out < 1:
            raise UsageError(f"`held_out` (={self.held_out}) must be between 0 and 1.")
        check_integer("sequence_length", self.sequence_length, 2, "it counts tokens")
        for name in ("width", "depth", "heads"):
            check_integer(name, getattr(self, name))
        allstep.errors.check_multiple("width", self.width, "heads", self.heads)
        if not 0 <= self.dropout < 1:
            raise UsageError(f"`dropout` (={self.dropout}) must be at least 0 and below 1.")

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
        """Tokens of the longest samples, of all stages."""
        return self.second_sequence_length or self.sequence_length

    @property
    def second_batch(self) -> int:
        """Samples of a step in the second stage."""
        return self.global_batch if self.second_global_batch is None else self.second_global_batch

    @property
    def second_micro_batch(self) -> int:
        """Samples that go through the model at once in the second stage: as many tokens."""
        return max(1, self.micro_batch * self.sequence_length // self.longest_sequence)

    @property
    def second_stage(self) -> allstep.optim.SecondStage | None:
        """How the rate goes in the second stage, if there is one."""
        if self.second_sequence_length is None:
            return None
        return allstep.optim.SecondStage(
            epochs=self.second_epochs,
            lr=self.lr * self.second_lr_share,
            warmup_epochs=self.second_warmup_epochs,
        )

    def with_second_stage(
        self, mixed: allstep.optim.MixedBatch, second: allstep.optim.SecondStage
    ) -> "Text":
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
        """Looks for tokenizers, the folder and enough text in it."""
        self.need_package("tokenizers", "tokenizers")
        paths = allstep.data.text_folder.find_texts(self.folder)
        num_bytes = sum(path.stat().st_size for path in paths)
        # A token is a byte or more, so this much is certain before any file is read.
        self._check_enough(round(self.held_out * num_bytes), "bytes", "held out")

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's texts."""
        train_tokens, test_tokens = self._tokens(comm)
        model = Transformer(
            vocab_size=self.vocab_size,
            sequence_length=self.longest_sequence,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            dropout=self.dropout,
            causal=self.objective == "causal",
        )
        return self.make_task(
            model,
            self._sequences(train_tokens, self.sequence_length),
            self._sequences(test_tokens, self.sequence_length),
            LanguageModelling(
                log_frequencies(train_tokens, self.vocab_size), self.samples == "paragraphs"
            ),
            self._later_stages(train_tokens, test_tokens),
            allstep.data.text_folder.collate_padded if self.samples == "paragraphs" else None,
        )

    def _later_stages(self, train_tokens: Tensor, test_tokens: Tensor) -> list[allstep.Stage]:
        if self.second_sequence_length is None:
            return []
        return [
            allstep.Stage(
                first_epoch=self.epochs - self.second_epochs,
                train_set=self._sequences(train_tokens, self.second_sequence_length),
                test_set=self._sequences(test_tokens, self.second_sequence_length),
                global_batch=self.second_batch,
                micro_batch=self.second_micro_batch,
            )
        ]

    def _tokens(self, comm: Communicator) -> tuple[Tensor, Tensor]:
        """The tokens to train on and those held out; the tokenizer is that of rank 0."""
        reader = allstep.data.text_folder
        texts = [reader.read_text(path) for path in reader.find_texts(self.folder)]
        parts = [reader.split_text(text, self.held_out) for text in texts]
        train_texts, test_texts = zip(*parts, strict=True)
        if self.samples == "paragraphs":
            split = reader.split_paragraphs
            train_texts = tuple(part for text in train_texts for part in split(text))
            test_texts = tuple(part for text in test_texts for part in split(text))
        trained = reader.train_tokenizer(train_texts, self.vocab_size) if comm.rank == 0 else None
        tokenizer = comm.broadcast_object(trained)
        train_tokens = reader.encode(tokenizer, train_texts, self.vocab_size)
        test_tokens = reader.encode(tokenizer, test_texts, self.vocab_size)
        self._check_enough(len(train_tokens), "tokens", "to train on")
        self._check_enough(len(test_tokens), "tokens", "held out")
        return train_tokens, test_tokens

    def _sequences(self, tokens: Tensor, sequence_length: int) -> Any:
        reader = allstep.data.text_folder
        if self.samples == "paragraphs":
            return reader.Paragraphs(tokens, sequence_length, end=self.vocab_size - 2)
        if self.objective == "causal":
            return reader.CausalSequences(tokens, sequence_length)
        return reader.MaskedSequences(tokens, sequence_length, self.vocab_size)

    def _check_enough(self, count: int, unit: str, part: str) -> None:
        if count <= self.longest_sequence:
            name = "second_sequence_length" if self.second_sequence_length else "sequence_length"
            raise UsageError(
                f"`folder` (={self.folder}) has too little text: {count} {unit} {part} are less"
                f" than one sequence of `{name}` (={self.longest_sequence}) tokens and"
                " the next one. Add text, or lower it."
            )


@dataclass(frozen=True)
class LanguageModelling:
    """Cross-entropy of predicted tokens, and that of a guess which sees no others.

    A micro-batch is (inputs, targets) or (inputs, targets, positions). Targets that are `PADDING`
    of `data.text_folder` don't count.

    Args:
        unigram_log_probs: logarithm of each token's frequency in the training set, [vocab_size].
        is_padded: whether some targets are padding.
    """

    unigram_log_probs: Tensor
    is_padded: bool = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        """Sum of the targets' cross-entropies, nats, and their number."""
        inputs, targets, *positions = batch
        logits = model(inputs, *positions)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        if not self.is_padded:
            return total, targets.numel()
        return total, float((targets != allstep.data.text_folder.PADDING).sum())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Metrics:
        """Sums and counts of `loss` and `unigram` (nats a target), and of `accuracy`."""
        inputs, targets, *positions = batch
        logits = model(inputs, *positions).flatten(0, 1)
        targets = targets.flatten()
        if self.is_padded:
            counts = targets != allstep.data.text_folder.PADDING
            logits, targets = logits[counts], targets[counts]
        count = len(targets)
        unigram = self.unigram_log_probs.to(targets.device)[targets]
        return {
            "loss": (F.cross_entropy(logits, targets, reduction="sum"), count),
            "unigram": (-unigram.sum(), count),
            "accuracy": ((logits.argmax(1) == targets).sum(), count),
        }


def log_frequencies(tokens: Tensor, vocab_size: int) -> Tensor:
    """log((count + 1) / (number of tokens + vocab_size)) of each token: none is impossible."""
    counts = torch.bincount(tokens, minlength=vocab_size).double() + 1
    return (counts / counts.sum()).log()
