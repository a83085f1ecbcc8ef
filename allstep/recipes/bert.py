"""BERT pre-training on any folder of text files: masked tokens and next-sentence prediction."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Metrics, Task
from allstep.recipes.base import names_kept
from allstep.recipes.bert_data import SPECIAL, SegmentPairs, encode, learn_vocabulary
from allstep.recipes.bert_model import BertConfig, BertForPreTraining
from allstep.recipes.text import log_frequencies
from allstep.recipes.texts import TokenRecipe
from allstep.recipes.token_loss import summed_cross_entropy

Size = Literal["tiny", "mini", "small", "base", "large"]

_SIZES: dict[Size, tuple[int, int, int]] = {  # blocks, features, heads
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
_LEAST_SEQUENCE = 8


@dataclass(frozen=True, kw_only=True)
class Bert(TokenRecipe):
    """Reads `folder/**/*.txt`, each file a document, learns WordPiece tokens and pre-trains BERT.

    It trains on short sequences first, then, in a second stage, on longer ones. The texts are kept
    in memory as tokens. The end of each text is held out.

    Source: Devlin et al., 2018, arXiv:1810.04805; sizes below base by Turc et al., 2019,
    arXiv:1908.08962; LAMB and the stages by You et al., 2020, arXiv:1904.00962.
    """

    name: ClassVar[str] = "bert"
    summary: ClassVar[str] = "any folder of text files, BERT tiny to large; minutes"
    warmup_share: ClassVar[float] = 0.1
    second_batch_share: ClassVar[float] = 0.5

    epochs: int = 4
    global_batch: int = 32
    micro_batch: int = 16
    optimizer: allstep.optim.OptimizerName = "lamb"
    lr: float = 2e-2
    lr_schedule: allstep.optim.ScheduleName = "linear"
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0

    size: Size = "tiny"
    """2, 4, 4, 12 or 24 blocks of 128, 256, 512, 768 or 1,024 features."""

    vocab_size: int = 4096
    """Largest number of different tokens, which are learned from the training texts."""

    dropout: float = 0.1
    """Share dropped of the features after the embedding and in each block, and of the attention."""

    second_sequence_length: int | None = 128
    second_lr_share: float = 2 / 3
    second_warmup_epochs: float = 0.1

    second_global_batch: int | None = None
    """Samples of one optimizer step in the second stage; by default half of those in the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer = allstep.errors.check_integer
        check_integer("sequence_length", self.sequence_length, _LEAST_SEQUENCE, "it counts tokens")
        check_integer("vocab_size", self.vocab_size, 2 * len(SPECIAL), "five of them are special")
        allstep.errors.check_choice("size", self.size, _SIZES)

    @property
    def config(self) -> BertConfig:
        """The model's configuration.

        >>> Bert(size="base").config.intermediate_size
        3072
        """
        layers, width, heads = _SIZES[self.size]
        return BertConfig(
            vocab_size=self.vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=self.longest_sequence,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )

    def describe(self) -> str:
        """The model's size."""
        with torch.device("meta"):
            model = BertForPreTraining(self.config)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        return f"BERT {self.size}: {num_weights / 1e6:,.1f} M weights"

    def vocabulary(self, comm: Communicator) -> list[str]:
        """The tokens in the order of their ids, learned by rank 0. Collective."""
        train_texts, _ = self.read_texts()
        return self._learn_vocabulary(train_texts, comm)

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's texts."""
        train_texts, test_texts = self.read_texts()
        vocabulary = self._learn_vocabulary(train_texts, comm)
        train, test = encode(vocabulary, train_texts), encode(vocabulary, test_texts)
        self.check_enough(len(train.tokens), "tokens", "to train on")
        self.check_enough(len(test.tokens), "tokens", "held out")

        def make_sets(length: int) -> tuple[SegmentPairs, SegmentPairs]:
            num_tokens = len(vocabulary)
            return SegmentPairs(train, length, num_tokens), SegmentPairs(test, length, num_tokens)

        return self.make_task(
            BertForPreTraining(self.config),
            *make_sets(self.sequence_length),
            PreTraining(log_frequencies(train.tokens, self.vocab_size)),
            self.later_stages(make_sets),
            kept=names_kept("vocabulary", vocabulary),
        )

    def _learn_vocabulary(self, texts: list[str], comm: Communicator) -> list[str]:
        learned = learn_vocabulary(texts, self.vocab_size) if comm.rank == 0 else None
        found: list[str] = comm.broadcast_object(learned)
        return found


@dataclass(frozen=True)
class PreTraining:
    """The loss of pre-training: a mean over masked tokens plus a mean over pairs of segments.

        loss = (sum of tokens' losses + most_masked * sum of pairs' losses) / number of tokens

    over a global batch, where `most_masked` is the number of masked tokens of a full sequence, so
    that both means have the same weight if all sequences are full.

    Args:
        unigram_log_probs: logarithm of each token's frequency in the training set, [vocab_size].
    """

    unigram_log_probs: Tensor

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        """The summed loss of a micro-batch of `SegmentPairs` in nats, and its masked tokens."""
        tokens, segments, positions, targets, is_random = batch
        scores, relations = model(tokens, segments, positions)
        masked = summed_cross_entropy(scores.flatten(0, 1), targets.flatten())
        total = masked + targets.shape[1] * summed_cross_entropy(relations, is_random)
        return total, float(_counts(targets).sum())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Metrics:
        """Sums and counts of the masked tokens' and the pairs' losses (nats) and right answers.

        They are `loss`, `accuracy` and `unigram`, the loss of a guess by frequency, for the masked
        tokens; `pair_loss` and `pair_accuracy` for the pairs.
        """
        tokens, segments, positions, targets, is_random = batch
        scores, relations = model(tokens, segments, positions)
        counts = _counts(targets)
        targets, scores = targets[counts], scores[counts]
        num_tokens, num_pairs = len(targets), len(is_random)
        unigram = self.unigram_log_probs.to(targets.device)[targets]
        return {
            "loss": (summed_cross_entropy(scores, targets), num_tokens),
            "unigram": (-unigram.sum(), num_tokens),
            "accuracy": ((scores.argmax(1) == targets).sum(), num_tokens),
            "pair_loss": (summed_cross_entropy(relations, is_random), num_pairs),
            "pair_accuracy": ((relations.argmax(1) == is_random).sum(), num_pairs),
        }


def _counts(targets: Tensor) -> Tensor:
    return targets != allstep.data.text_folder.PADDING
