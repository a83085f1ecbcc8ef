"""Reads a folder with a file per class and a text per line, as a data set of WordPiece tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import allstep
from allstep import UsageError
from allstep.recipes.bert_data import wordpiece_tokenizer
from allstep.recipes.bert_model import PADDING_TOKEN

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Labelled:
    """Texts with their classes.

    Args:
        texts: the text of each sample.
        labels: the class index of each sample.
    """

    texts: Sequence[str]
    labels: Sequence[int]


def read_classes(folder: Path) -> tuple[list[str], Labelled]:
    """Reads `folder/**/*.txt`: each file is a class named after it, each of its lines a sample.

    Returns:
        The classes' names, in the order of their files, and the samples.

    Raises:
        UsageError: if there are fewer than two files, or one has no text.
        DataError: if a file can't be read or isn't UTF-8.
    """
    reader = allstep.data.text_folder
    paths = reader.find_texts(folder)
    if len(paths) < 2:
        raise UsageError(
            f"`folder` (={folder}) has a single .txt file; give one for each class, at least two."
        )
    texts: list[str] = []
    labels: list[int] = []
    for label, path in enumerate(paths):
        lines = [line.strip() for line in reader.read_text(path).split("\n") if line.strip()]
        if not lines:
            raise UsageError(f"{path} has no text: a class needs samples, one a line.")
        texts += lines
        labels += [label] * len(lines)
    names = [str(path.relative_to(folder).with_suffix("")) for path in paths]
    return names, Labelled(texts, labels)


def split_samples(samples: Labelled, held_out: float) -> tuple[Labelled, Labelled]:
    """Splits into training and held-out samples, always the same way; equal texts stay together.

    Args:
        samples: all samples.
        held_out: share of the distinct texts that is held out, 0 to 1.

    >>> _, test = split_samples(Labelled(["a", "b", "b", "c"], [0, 0, 1, 1]), 0.34)
    >>> len(set(test.texts))
    1
    """
    texts = sorted(set(samples.texts))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = {texts[i] for i in order[: round(held_out * len(texts))]}

    def part(is_held_out: bool) -> Labelled:
        pairs = zip(samples.texts, samples.labels, strict=True)
        kept = [(text, label) for text, label in pairs if (text in chosen) is is_held_out]
        return Labelled([text for text, _ in kept], [label for _, label in kept])

    return part(False), part(True)


class LabelledTokens(Dataset[Sample]):
    """A data set of texts as tokens [CLS] text [SEP], with their classes.

    Each sample is (tokens int64 [tokens], label int64 []); `collate_labelled` makes batches.

    Args:
        vocabulary: tokens in the order of their ids.
        samples: texts and classes.
        sequence_length: largest number of tokens of a sample; longer ones are cut at the end.
    """

    def __init__(self, vocabulary: Sequence[str], samples: Labelled, sequence_length: int) -> None:
        numbers = {token: number for number, token in enumerate(vocabulary)}
        first, end, room = numbers["[CLS]"], numbers["[SEP]"], sequence_length - 2
        encoded = wordpiece_tokenizer(numbers).encode_batch(
            list(samples.texts), add_special_tokens=False
        )
        rows = [[first, *text.ids[:room], end] for text in encoded]
        self._tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        self._offsets = torch.tensor([0, *accumulate(map(len, rows))])
        self._labels = torch.tensor(samples.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        start, end = self._offsets[index : index + 2].tolist()
        return self._tokens[start:end].long(), self._labels[index]


def collate_labelled(samples: Sequence[Sample]) -> Sample:
    """Collates tokens, int64 [batch, tokens], padded to the longest sample, and labels [batch]."""
    tokens = [each for each, _ in samples]
    padded = pad_sequence(tokens, batch_first=True, padding_value=PADDING_TOKEN)
    return padded, torch.stack([label for _, label in samples])
