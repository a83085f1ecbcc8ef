"""BERT's training data: pairs of segments of WordPiece tokens, some of which are masked."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

import allstep

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The first tokens of a vocabulary."""

_UNKNOWN, _FIRST, _END, _MASK = range(1, 5)
_NUM_FRAME = 3  # [CLS] first segment [SEP] second segment [SEP]
_LONGEST_SENTENCE = 64  # tokens; longer ones are cut

Sample = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def learn_vocabulary(texts: Sequence[str], vocab_size: int) -> list[str]:
    """Learns WordPiece tokens, in lower case and without accents, as in BERT's "uncased" models.

    The same texts give the same tokens. The library's trainer would number characters in the order
    of its hash map, and of equally frequent pairs it merges the one with the smaller numbers first;
    so the characters are numbered here, the most frequent first, up to a quarter of the tokens.

    Args:
        texts: the texts to learn from; use only those of the training set.
        vocab_size: the largest number of tokens.

    Returns:
        The tokens in the order of their ids, the special ones first.

    >>> learn_vocabulary(["Ah, aha!"], 40)[5:11]
    ['a', 'h', '!', ',', '##a', '##h']

    Source: Schuster and Nakajima, 2012; Devlin et al., 2018, arXiv:1810.04805, section 3.
    """
    from tokenizers import trainers

    tokenizer = wordpiece_tokenizer({"[UNK]": 0})
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    found = [character for character in counts if not character.isspace()]
    found.sort(key=lambda character: (-counts[character], character))
    alphabet = found[: vocab_size // 4]
    numbered = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=numbered,
        limit_alphabet=0,  # no characters but these
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    numbers: dict[str, int] = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def wordpiece_tokenizer(numbers: dict[str, int]) -> "Tokenizer":
    """A tokenizer like those of BERT's "uncased" models, for tokens with these ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def split_sentences(text: str) -> list[str]:
    r"""The sentences of a text, split after punctuation marks and at line breaks.

    >>> split_sentences("One. Two?\nThree of 1.5")
    ['One.', 'Two?', 'Three of 1.5']
    """
    parts = re.split(r"(?<=[.!?])\s+|\n+", text)
    return [part.strip() for part in parts if part.strip()]


@dataclass(frozen=True)
class Documents:
    """Documents as concatenated sentences, and these as concatenated tokens.

    Args:
        tokens: all tokens, int32 [tokens].
        sentences: index of each sentence's first token, and the end, int64 [sentences + 1].
        documents: index of each document's first sentence, and the end, int64 [documents + 1].
    """

    tokens: Tensor
    sentences: Tensor
    documents: Tensor


def encode(vocabulary: Sequence[str], texts: Sequence[str]) -> Documents:
    """The texts as documents of tokens; texts without tokens are omitted.

    Args:
        vocabulary: the tokens, from `learn_vocabulary`.
        texts: the texts, one per document.

    Returns:
        The documents, whose sentences are cut at 64 tokens.

    >>> encode(learn_vocabulary(["Ah. Aha!"], 20), ["Ah. Aha!", "", "Ah"]).documents
    tensor([0, 2, 3])
    """
    tokenizer = wordpiece_tokenizer({token: number for number, token in enumerate(vocabulary)})
    documents = []
    for text in texts:
        encoded = tokenizer.encode_batch(split_sentences(text), add_special_tokens=False)
        document = [
            sentence.ids[start : start + _LONGEST_SENTENCE]
            for sentence in encoded
            for start in range(0, len(sentence.ids), _LONGEST_SENTENCE)
        ]
        if document:
            documents.append(document)
    sentences = [sentence for document in documents for sentence in document]
    return Documents(
        torch.tensor([token for sentence in sentences for token in sentence], dtype=torch.int32),
        torch.tensor([0, *accumulate(map(len, sentences))]),
        torch.tensor([0, *accumulate(map(len, documents))]),
    )


class SegmentPairs(Dataset[Sample]):
    """Pairs of segments of sentences: the second follows the first, or is from another document.

    The documents are cut into runs of sentences that fill a sequence; a run is split into two
    segments at a new random place each time it is read. Half of the second segments are replaced by
    sentences from a random place of the other documents (of the same, if there are no others).
    Surplus tokens are cut off the longer segment. 15 % of the tokens are to be predicted;
    `allstep.data.text_folder.mask_tokens` masks them. The data set draws from torch's random state,
    which the loader sets for each sample.

    Each sample is (tokens, segments, positions, targets, is_random), all int64: the first two
    [sequence_length]; the next two [most masked], with positions padded with 0 and targets with
    `allstep.data.text_folder.PADDING`; and the last [].

    Args:
        documents: the documents, from `encode`.
        sequence_length: tokens of a sample, padding included.
        num_tokens: size of the vocabulary, from which random tokens are drawn.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3.1 and appendix A; cut as in its code.
    """

    def __init__(self, documents: Documents, sequence_length: int, num_tokens: int) -> None:
        self._documents = documents
        self._sequence_length = sequence_length
        self._room = sequence_length - _NUM_FRAME
        self._num_tokens = num_tokens
        self._runs = list(_cut_in_runs(documents, self._room))

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> Sample:
        first, second, is_random = self._draw_segments(*self._runs[index])
        first, second = _fit(first, second, self._room)
        tokens = torch.zeros(self._sequence_length, dtype=torch.int64)
        segments = torch.zeros_like(tokens)
        begin, end = 2 + len(first), _NUM_FRAME + len(first) + len(second)
        tokens[0], tokens[begin - 1], tokens[end - 1] = _FIRST, _END, _END
        tokens[1 : begin - 1], tokens[begin : end - 1] = first, second
        segments[begin:end] = 1
        positions, targets = self._hide(tokens, end)
        return tokens, segments, positions, targets, torch.tensor(int(is_random))

    def _draw_segments(self, start: int, end: int, document: int) -> tuple[Tensor, Tensor, bool]:
        has_several = end - start > 1
        cut = start + 1 + _draw(end - start - 1) if has_several else end
        first = self._tokens(start, cut)
        if has_several and torch.rand(()) < 0.5:
            return first, self._tokens(cut, end), False
        return first, self._random_segment(document, self._room - len(first)), True

    def _random_segment(self, document: int, num_wanted: int) -> Tensor:
        """Sentences from one of the other documents, until they have `num_wanted` tokens."""
        begins, offsets = self._documents.documents, self._documents.sentences
        own_start, own_end = begins[document : document + 2].tolist()
        others = int(begins[-1]) - (own_end - own_start)
        start = _draw(others or int(begins[-1]))
        if others and start >= own_start:
            start += own_end - own_start
        last = int(begins[torch.searchsorted(begins, start, right=True)])
        end = int(torch.searchsorted(offsets, int(offsets[start]) + num_wanted))
        return self._tokens(start, min(max(end, start + 1), last))

    def _tokens(self, start: int, end: int) -> Tensor:
        """The tokens of the sentences from `start` up to `end`."""
        offsets = self._documents.sentences
        return self._documents.tokens[offsets[start] : offsets[end]]

    def _hide(self, tokens: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Masks some of the tokens before `end`; returns their positions and original tokens."""
        reader = allstep.data.text_folder
        most = reader.num_masked(self._sequence_length)
        candidates = ((tokens != _FIRST) & (tokens != _END))[:end].nonzero()[:, 0]
        order = torch.randperm(len(candidates))[: reader.num_masked(end)]
        chosen = candidates[order].sort().values
        positions = torch.zeros(most, dtype=torch.int64)
        targets = torch.full_like(positions, reader.PADDING)
        positions[: len(chosen)], targets[: len(chosen)] = chosen, tokens[chosen]
        shown = reader.mask_tokens(tokens[chosen], _MASK, range(len(SPECIAL), self._num_tokens))
        tokens[chosen] = shown
        return positions, targets


def _cut_in_runs(documents: Documents, room: int) -> Iterator[tuple[int, int, int]]:
    """(first sentence, end, document) of each run; runs have `room` tokens, or end a document."""
    offsets, begins = documents.sentences.tolist(), documents.documents.tolist()
    for document, (start, last) in enumerate(pairwise(begins)):
        for end in range(start + 1, last + 1):
            if offsets[end] - offsets[start] >= room or end == last:
                yield start, end, document
                start = end


def _fit(first: Tensor, second: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Both segments cut to `room` tokens in total; the longer one loses tokens at both ends."""
    num_second = min(len(second), max(room - len(first), room // 2))
    return _crop(first, room - num_second), _crop(second, num_second)


def _crop(tokens: Tensor, most: int) -> Tensor:
    surplus = max(0, len(tokens) - most)
    start = _draw(surplus + 1)
    return tokens[start : len(tokens) - surplus + start]


def _draw(end: int) -> int:
    return int(torch.randint(end, ()))
