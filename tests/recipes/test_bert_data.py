"""BERT's tokens, and its pairs of segments with hidden tokens."""

from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

import allstep
from allstep import Communicator
from allstep.recipes.bert_data import (
    SPECIAL,
    Documents,
    SegmentPairs,
    encode,
    learn_vocabulary,
    split_sentences,
)
from tests.helpers.processes import run_processes

PAD, UNK, CLS, SEP, MASK = range(5)
PADDING = allstep.data.text_folder.PADDING
TEXTS = [topics[name][:4000] for name in sorted(topics)[:4]]


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    return learn_vocabulary(TEXTS, 400)


@pytest.fixture(scope="module")
def documents(vocabulary: list[str]) -> Documents:
    parts = [text[start : start + 400] for text in TEXTS for start in range(0, len(text), 400)]
    return encode(vocabulary, parts)


def numbered(sizes: list[list[int]]) -> Documents:
    """Documents of sentences of so many tokens; a token is 1,000 * document + its place in it."""
    tokens = [1000 * (d + 1) + i for d, lengths in enumerate(sizes) for i in range(sum(lengths))]
    sentences = torch.tensor([0, *(n for lengths in sizes for n in lengths)]).cumsum(0)
    begins = torch.tensor([0, *map(len, sizes)]).cumsum(0)
    return Documents(torch.tensor(tokens, dtype=torch.int32), sentences, begins)


def unhidden(sample: tuple[Tensor, ...]) -> Tensor:
    """The tokens of a sample as they were."""
    tokens, _, positions, targets, _ = sample
    whole, counts = tokens.clone(), targets != PADDING
    whole[positions[counts]] = targets[counts]
    return whole


def segments_of(sample: tuple[Tensor, ...]) -> tuple[list[int], list[int]]:
    whole = unhidden(sample).tolist()
    first_end = whole.index(SEP)
    return whole[1:first_end], whole[first_end + 1 : whole.index(SEP, first_end + 1)]


def test_vocabulary_is_always_the_same() -> None:
    """The library's own numbering, a control, follows its hash maps."""

    def library_vocabulary() -> tuple[str, ...]:
        tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
        numbers = tokenizer.get_vocab()
        return tuple(sorted(numbers, key=numbers.__getitem__))

    assert len({library_vocabulary() for _ in range(5)}) > 1
    assert len({tuple(learn_vocabulary(TEXTS, 400)) for _ in range(5)}) == 1


def test_vocabulary_has_words_and_their_ends(vocabulary: list[str]) -> None:
    assert vocabulary[:5] == list(SPECIAL)
    assert len(vocabulary) == len(set(vocabulary)) == 400
    assert {"the", "##s"} < set(vocabulary)
    assert all(token == token.lower() for token in vocabulary[5:])


def test_vocabulary_takes_the_most_frequent_characters() -> None:
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 50)))
    vocabulary = learn_vocabulary(["abc abc abc", rare], 40)
    assert {"a", "b", "c"} < set(vocabulary)
    assert sum(token in rare for token in vocabulary) == 40 // 4 - 3
    assert UNK in encode(vocabulary, [rare]).tokens


def test_encoded_sentences_are_those_of_the_text(vocabulary: list[str]) -> None:
    documents = encode(vocabulary, ["One sentence. Another!", "", "no words " * 100])
    assert documents.documents.tolist() == [
        0,
        2,
        2 + -(-(documents.sentences[-1].item() - documents.sentences[2].item()) // 64),
    ]
    first = documents.tokens[: documents.sentences[1]].tolist()
    shown = "".join(vocabulary[token].removeprefix("##") for token in first)
    assert shown == "onesentence."


def test_special_words_of_a_text_are_no_special_tokens(vocabulary: list[str]) -> None:
    documents = encode(vocabulary, ["a [MASK] of [SEP] and [PAD]"])
    assert documents.tokens.min() > MASK or UNK in documents.tokens
    assert not {PAD, CLS, SEP, MASK} & set(documents.tokens.tolist())


def test_sentences_end_at_marks_and_lines() -> None:
    assert split_sentences("A b. C!  D?\n\nE 1.5 f.\n") == ["A b.", "C!", "D?", "E 1.5 f."]


def test_sample_is_laid_out_as_bert_reads_it(documents: Documents) -> None:
    pairs = SegmentPairs(documents, 40, 400)
    torch.manual_seed(0)
    lengths = set()
    for index in range(len(pairs)):
        tokens, segments, _positions, targets, _ = sample = pairs[index]
        whole = unhidden(sample)
        first, second = segments_of(sample)
        assert first and second
        end = 3 + len(first) + len(second)
        assert whole[0] == CLS and (whole[end:] == PAD).all()
        assert segments.tolist() == [0] * (2 + len(first)) + [1] * (len(second) + 1) + [0] * (
            40 - end
        )
        num_hidden = int((targets != PADDING).sum())
        assert num_hidden == max(1, round(0.15 * end)) <= len(targets) == 6
        assert (tokens[:end][[0, 1 + len(first), end - 1]] == torch.tensor([CLS, SEP, SEP])).all()
        lengths.add(end)
    assert max(lengths) == 40 and min(lengths) < 40


def test_second_segment_follows_or_is_of_another_document() -> None:
    sizes = [[7, 5, 6, 8, 4] * 8, [9, 6] * 10, [5] * 30]
    pairs = SegmentPairs(numbered(sizes), 24, 5000)
    torch.manual_seed(1)
    labels, documents_of_random = [], set()
    for _ in range(12):
        for sample in map(pairs.__getitem__, range(len(pairs))):
            first, second = segments_of(sample)
            for segment in (first, second):  # whatever is cut off, it is one piece
                assert segment == list(range(segment[0], segment[0] + len(segment)))
            is_random = bool(sample[-1])
            assert (first[0] // 1000 == second[0] // 1000) != is_random
            if is_random:
                documents_of_random.add((first[0] // 1000, second[0] // 1000))
            else:
                assert first[-1] < second[0]
            labels.append(is_random)
    assert documents_of_random == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b}
    assert 0.4 < sum(labels) / len(labels) < 0.65


def test_segments_of_the_only_document_are_from_anywhere_in_it() -> None:
    pairs = SegmentPairs(numbered([[5] * 40]), 16, 5000)
    torch.manual_seed(0)
    labels = [bool(pairs[index][-1]) for _ in range(5) for index in range(len(pairs))]
    assert 0.25 < sum(labels) / len(labels) < 0.75


def test_every_token_is_shown_sooner_or_later() -> None:
    documents = numbered([[7, 5, 6, 8, 4] * 4, [9, 6, 30] * 3])
    pairs = SegmentPairs(documents, 24, 5000)
    torch.manual_seed(0)
    shown: set[int] = set()
    for _ in range(60):
        for sample in map(pairs.__getitem__, range(len(pairs))):
            shown |= set(unhidden(sample).tolist())
    assert set(documents.tokens.tolist()) <= shown


def test_hidden_tokens_are_masked_replaced_or_left(documents: Documents) -> None:
    pairs = SegmentPairs(documents, 40, 400)
    torch.manual_seed(0)
    kinds = {"masked": 0, "same": 0, "other": 0}
    for _ in range(4):
        for tokens, _, positions, targets, _ in map(pairs.__getitem__, range(len(pairs))):
            counts = targets != PADDING
            shown, targets = tokens[positions[counts]], targets[counts]
            assert not ({PAD, CLS, SEP, MASK} & set(targets.tolist()))
            kinds["masked"] += int((shown == MASK).sum())
            kinds["same"] += int((shown == targets).sum())
            kinds["other"] += int(((shown != MASK) & (shown != targets)).sum())
            assert ((shown >= MASK) | (shown == targets)).all()
    total = sum(kinds.values())
    assert [round(kinds[kind] / total, 1) for kind in kinds] == [0.8, 0.1, 0.1]


def epoch_of_samples(
    comm: Communicator, pairs: SegmentPairs, epoch: int, seed: int
) -> list[tuple[bytes, ...]]:
    """This worker's samples of an epoch."""
    found: list[tuple[bytes, ...]] = []
    with allstep.data.loader(pairs, comm, global_batch=12, micro_batch=4, seed=seed) as loader:
        while loader.epoch <= epoch:
            found = [
                tuple(part[row].numpy().tobytes() for part in micro.data)
                for batch in loader.global_batches()
                for micro in batch.micro_batches
                for row in range(micro.num_samples)
            ]
    return found


@pytest.mark.slow
@pytest.mark.process
def test_samples_depend_on_seed_and_epoch_and_not_on_the_worker(documents: Documents) -> None:
    pairs = SegmentPairs(documents, 24, 400)
    lone = Communicator.single_process()
    expected = sorted(epoch_of_samples(lone, pairs, 1, 3))
    parts = run_processes(3, epoch_of_samples, pairs, 1, 3, timeout_s=100)
    assert all(parts)
    assert sorted(sample for part in parts for sample in part) == expected
    for epoch, seed in ((0, 3), (1, 4)):
        assert not set(epoch_of_samples(lone, pairs, epoch, seed)) & set(expected)
