"""Fine-tunes a pre-trained BERT to classify texts."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import allstep
from allstep import Communicator, Metrics, Task, UsageError
from allstep.recipes.base import Recipe, names_kept
from allstep.recipes.bert_model import BertForSequenceClassification
from allstep.recipes.bert_pretrained import check_pretrained, load_pretrained
from allstep.recipes.labelled_texts import (
    LabelledTokens,
    collate_labelled,
    read_classes,
    split_samples,
)

_LEAST_SEQUENCE = 3


@dataclass(frozen=True, kw_only=True)
class FineTune(Recipe):
    """Reads `folder/**/*.txt`, each file a class, each line a sample, and fine-tunes a BERT on it.

    It trains all weights of the encoder, and a linear layer on its output for [CLS]. The learning
    rate is for a BERT of size `tiny`; `base` was published with 2e-5 to 5e-5.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 4.1.
    """

    name: ClassVar[str] = "finetune"
    summary: ClassVar[str] = "a pre-trained BERT on texts, a file for each class; minutes"
    warmup_share: ClassVar[float] = 0.1

    epochs: int = 3
    global_batch: int = 32
    micro_batch: int = 16
    optimizer: allstep.optim.OptimizerName = "adamw"
    lr: float = 2e-3  # the better of 5e-4 and 2e-3, for `tiny`
    lr_schedule: allstep.optim.ScheduleName = "linear"
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0

    folder: Path = Path("classes")
    """Folder with a .txt file in UTF-8 for each class, with one sample per line."""

    pretrained: Path = Path("runs/bert")
    """Folder of a run of the recipe `bert`; or a folder with config.json, model.safetensors and
    vocab.txt as written by `save_bert` and transformers, with tokens in lower case."""

    random_weights: bool = False
    """Use only the size and the tokens of `pretrained`, with random weights, as a control."""

    held_out: float = 0.1
    """Share of the distinct texts that is held out for testing, the same with any seed."""

    sequence_length: int = 64
    """Largest number of tokens of a sample, including [CLS] and [SEP]; longer texts are cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allstep.errors.check_integer(
            "sequence_length", self.sequence_length, _LEAST_SEQUENCE, "two frame the text"
        )
        allstep.errors.check_share("held_out", self.held_out, "(0, 1)", "0.1 is usual")

    def check(self) -> None:
        """Checks for the package tokenizers, the classes and the model."""
        self.need_package("tokenizers", "tokenizers")
        allstep.data.text_folder.find_texts(self.folder)
        check_pretrained(self.pretrained)

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's samples."""
        names, samples = read_classes(self.folder)
        train, test = split_samples(samples, self.held_out)
        for part, texts in (("to train on", train.texts), ("held out", test.texts)):
            if not texts:
                raise UsageError(
                    f"`folder` (={self.folder}) has {len(samples.texts)} samples, none of them"
                    f" {part} at `held_out` (={self.held_out}); add some, or change it."
                )
        pretrained = load_pretrained(self.pretrained, comm)
        config = pretrained.model.config
        if self.sequence_length > config.max_position_embeddings:
            raise UsageError(
                f"`sequence_length` (={self.sequence_length}) must be at most"
                f" {config.max_position_embeddings}, the longest that `pretrained`"
                f" (={self.pretrained}) takes."
            )
        model = BertForSequenceClassification(config, len(names))
        if not self.random_weights:
            model.bert.load_state_dict(pretrained.model.bert.state_dict())
        return self.make_task(
            model,
            LabelledTokens(pretrained.vocabulary, train, self.sequence_length),
            LabelledTokens(pretrained.vocabulary, test, self.sequence_length),
            SequenceClassification(majority=Counter(train.labels).most_common(1)[0][0]),
            collate_fn=collate_labelled,
            kept={
                **names_kept("vocabulary", pretrained.vocabulary),
                **names_kept("classes", names),
            },
        )


@dataclass(frozen=True)
class SequenceClassification:
    """Cross-entropy and accuracy of a model on tokens, and the accuracy of a constant answer.

    Args:
        majority: most frequent class of the training set, the constant answer.
    """

    majority: int

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of (tokens, labels), nats."""
        tokens, labels = batch
        return F.cross_entropy(model(tokens), labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Metrics:
        """Sums and counts of `accuracy`, `loss` (nats) and `majority`, the constant answer's."""
        tokens, labels = batch
        logits, count = model(tokens), len(labels)
        return {
            "accuracy": ((logits.argmax(1) == labels).sum(), count),
            "loss": (F.cross_entropy(logits, labels, reduction="sum"), count),
            "majority": ((labels == self.majority).sum(), count),
        }
