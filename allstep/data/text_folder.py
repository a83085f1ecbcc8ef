"""Reads text files as sequences of tokens, for models that predict tokens."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from allstep.data.folders import file_names
from allstep.errors import DataError, UsageError, check_integer

__all__ = [
    "PADDING",
    "CausalSequences",
    "MaskedSequences",
    "Paragraphs",
    "collate_padded",
    "encode",
    "find_texts",
    "mask_tokens",
    "num_masked",
    "read_text",
    "split_paragraphs",
    "split_text",
    "tokens_of",
    "train_tokenizer",
]

PADDING = -100  # a target that losses ignore, torch's default `ignore_index`
_LONG_WORD = 64  # characters
_NUM_BYTES = 256
_NUM_SPECIAL = 2  # the two highest tokens: the end of a text, and the mask


def find_texts(folder: Path) -> list[Path]:
    """The files `folder/**/*.txt` in the order of their paths; links are followed.

    Raises:
        UsageError: if the folder is missing or has no such file, or if a folder can't be read or a
            link leads nowhere.
    """
    if not folder.is_dir():
        raise UsageError(f"`folder` (={folder}) is no folder; give one with .txt files in it.")
    paths = sorted(folder / name for name in file_names(folder) if name.endswith(".txt"))
    for path in paths:
        if not path.is_file():
            raise UsageError(
                f"`folder` (={folder}): {path} is no file, or a link that leads nowhere; repair or"
                " remove it."
            )
    if not paths:
        raise UsageError(f"`folder` (={folder}) has no .txt files in it; put some there.")
    return paths


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        DataError: if the file can't be read or isn't UTF-8; the message names it and the place.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}). Convert it, say with"
            " iconv, or remove it."
        ) from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}. Repair or remove it.") from error


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """The beginning and the end of a text, split at a space, or anywhere if there is none nearby.

    Args:
        text: a whole document.
        held_out: share of the characters in the end part, 0 to 1.

    >>> split_text("one two three four", 0.5)
    ('one two', ' three four')
    """
    cut = middle = round((1 - held_out) * len(text))
    while 0 < cut < len(text) and not text[cut].isspace():
        cut -= 1
    if middle - cut > max(_LONG_WORD, 0.05 * len(text)):  # in languages without spaces
        cut = middle
    return text[:cut], text[cut:]


def split_paragraphs(text: str) -> list[str]:
    r"""The parts of a text between empty lines, in order.

    >>> split_paragraphs("one\ntwo\n\n\nthree\n")
    ['one\ntwo', 'three']
    """
    parts = re.split(r"\n\s*\n", text)
    return [part.strip() for part in parts if part.strip()]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> str:
    """Trains a byte-level BPE tokenizer, which can encode every text without an unknown token.

    The same texts give the same tokenizer: its first tokens are the 256 bytes, and of equally
    frequent pairs the one with the smaller tokens is merged first. (A WordPiece tokenizer would
    depend on the order in which its trainer's hash map yields words.)

    Args:
        texts: the texts to learn from; use only those of the training set.
        vocab_size: number of different tokens, including the two special ones.

    Returns:
        The tokenizer as JSON.

    Raises:
        UsageError: if `vocab_size` is too small for the bytes and the special tokens.

    Source: Sennrich et al., 2016, arXiv:1508.07909; on bytes as in Radford et al., 2019.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = _NUM_BYTES + _NUM_SPECIAL
    check_integer("vocab_size", vocab_size, least, "a token for each byte and two special ones")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - _NUM_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def encode(tokenizer: str, texts: Sequence[str], vocab_size: int) -> Tensor:
    """The concatenated tokens of all texts, with the token `vocab_size - 2` after each text.

    Args:
        tokenizer: the tokenizer, from `train_tokenizer` with the same `vocab_size`.
        texts: whole documents or parts of them.
        vocab_size: number of different tokens.

    Returns:
        int32 [tokens].
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer)
    end = torch.tensor([vocab_size - 2], dtype=torch.int32)
    rows = []
    for text in texts:
        rows += [torch.tensor(encoder.encode(text).ids, dtype=torch.int32), end]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)


def tokens_of(tokenizer: str) -> list[str]:
    """The tokens as strings in the order of their ids, without the two special ones.

    Args:
        tokenizer: the tokenizer, from `train_tokenizer`.

    >>> tokens_of(train_tokenizer(["ab ab ab"], 259))[-1]
    'ab'
    """
    from tokenizers import Tokenizer

    numbers: dict[str, int] = Tokenizer.from_str(tokenizer).get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


class CausalSequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences in which each token is to be predicted from those before it.

    Each sample is (inputs, targets), both int64 [sequence_length]; a target is the next input.

    Args:
        tokens: tokens from `encode`, [tokens]; a last incomplete sequence is omitted.
        sequence_length: tokens of a sample.
    """

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._sequence_length
        tokens = self._tokens[start : start + self._sequence_length + 1].long()
        return tokens[:-1], tokens[1:]


class Paragraphs(Dataset[tuple[Tensor, Tensor]]):
    """Texts of unequal lengths, in which each token is to be predicted from those before it.

    Args:
        tokens: tokens of successive paragraphs, from `encode`, [tokens].
        sequence_length: most tokens of a sample; longer paragraphs are cut into several samples.
        end: the token that ends a paragraph, which is also to be predicted.

    Each sample is (inputs, targets), both int64 [n], n <= `sequence_length`.

    >>> paragraphs = Paragraphs(torch.tensor([5, 6, 7, 8, 9, 1, 3, 1]), 3, end=1)
    >>> [inputs.tolist() for inputs, _ in map(paragraphs.__getitem__, range(len(paragraphs)))]
    [[5, 6, 7], [8, 9], [3]]
    """

    def __init__(self, tokens: Tensor, sequence_length: int, end: int) -> None:
        self._tokens = tokens
        ends = (tokens == end).nonzero().flatten().tolist()
        starts = [0, *(last + 1 for last in ends[:-1])]
        self._pieces = [
            (first, min(first + sequence_length, last))
            for start, last in zip(starts, ends, strict=False)
            for first in range(start, last, sequence_length)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, last = self._pieces[index]
        tokens = self._tokens[first : last + 1].long()
        return tokens[:-1], tokens[1:]


def collate_padded(
    samples: list[tuple[Tensor, Tensor]], multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), [samples, length]; inputs are padded with 0, targets with `PADDING`.

    The length is that of the longest sample, rounded up to a multiple of `multiple` tokens.

    >>> collate_padded([(torch.tensor([3, 4]), torch.tensor([4, 1])), (torch.tensor([5]),) * 2])[1]
    tensor([[   4,    1],
            [   5, -100]])
    """
    columns = zip(*samples, strict=True)
    inputs, targets = (
        pad_sequence(list(tensors), batch_first=True, padding_value=value)
        for tensors, value in zip(columns, (0, PADDING), strict=True)
    )
    more = -inputs.shape[1] % multiple
    return F.pad(inputs, (0, more)), F.pad(targets, (0, more), value=PADDING)


def num_masked(sequence_length: int) -> int:
    """The number of tokens of a sequence that are masked: 15 %, and at least one.

    >>> num_masked(128), num_masked(2)
    (19, 1)
    """
    return max(1, round(0.15 * sequence_length))


def mask_tokens(targets: Tensor, mask: int, random_tokens: range) -> Tensor:
    """The inputs in place of tokens to be predicted: 80 % are the mask, 10 % are random tokens.

    The other 10 % stay as they are. It draws from torch's random state.

    Args:
        targets: tokens to be predicted, int64 [masked].
        mask: the token that replaces 80 % of them.
        random_tokens: range of the tokens that replace another 10 %.

    Returns:
        The inputs, int64 [masked].

    >>> shown = mask_tokens(torch.full((1000,), 7), 4, range(8, 50))
    >>> 750 < int((shown == 4).sum()) < 850, 60 < int((shown == 7).sum()) < 140
    (True, True)

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3.1.
    """
    kind = torch.rand(targets.shape)
    random = torch.randint(random_tokens.start, random_tokens.stop, targets.shape)
    shown = torch.where(kind < 0.9, random, targets)
    return torch.where(kind < 0.8, mask, shown)


class MaskedSequences(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Sequences in which some tokens are masked, to be predicted from all the others.

    Each sample is (inputs, targets, positions), int64 [sequence_length], [masked], [masked]:
    `targets` are the original tokens at the `positions` of the inputs.

    The number of masked tokens is the same in each sequence, so that the mean over a micro-batch's
    predictions is the mean over its samples. `mask_tokens` masks them with the special token
    `vocab_size - 1`. It draws from torch's random state, which the loader sets for each sample.

    Args:
        tokens: tokens from `encode`, [tokens]; a last incomplete sequence is omitted.
        sequence_length: tokens of a sample.
        vocab_size: number of different tokens.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3.1.
    """

    def __init__(self, tokens: Tensor, sequence_length: int, vocab_size: int) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._tokens) // self._sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        start = index * self._sequence_length
        tokens = self._tokens[start : start + self._sequence_length]
        inputs = tokens.to(torch.int64, copy=True)
        order = torch.randperm(self._sequence_length)
        positions = order[: num_masked(self._sequence_length)].sort().values
        targets = inputs[positions]
        mask = self._vocab_size - 1
        inputs[positions] = mask_tokens(targets, mask, range(self._vocab_size - _NUM_SPECIAL))
        return inputs, targets, positions
