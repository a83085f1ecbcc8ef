import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer

from allstep.data.text_folder import (
    CausalSequences,
    MaskedSequences,
    encode,
    find_texts,
    num_masked,
    read_text,
    split_text,
    train_tokenizer,
)
from allstep.errors import DataError, UsageError

TEXTS = [topics[name] for name in sorted(topics)[:12]]
VOCAB_SIZE = 400
END, MASK = VOCAB_SIZE - 2, VOCAB_SIZE - 1


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return train_tokenizer(TEXTS, VOCAB_SIZE)


class TestFiles:
    def test_found_in_order_of_their_paths(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a/z.txt", "a/notes.md", "c.txt/inner.txt"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        found = [path.relative_to(tmp_path).as_posix() for path in find_texts(tmp_path)]
        assert found == ["a/z.txt", "b.txt", "c.txt/inner.txt"]

    def test_found_behind_links(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        (tmp_path / "texts").mkdir()
        (tmp_path / "other" / "a.txt").touch()
        (tmp_path / "texts" / "b.txt").touch()
        (tmp_path / "texts" / "more").symlink_to(tmp_path / "other")
        found = [path.relative_to(tmp_path).as_posix() for path in find_texts(tmp_path / "texts")]
        assert found == ["texts/b.txt", "texts/more/a.txt"]
        (tmp_path / "texts" / "c.txt").symlink_to(tmp_path / "nowhere")
        with pytest.raises(UsageError, match=r"c\.txt is no file, or a link that leads nowhere"):
            find_texts(tmp_path / "texts")

    def test_wrong_folders(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"`folder` \(=.*nowhere\) is no folder"):
            find_texts(tmp_path / "nowhere")
        with pytest.raises(UsageError, match=r"`folder` .* has no \.txt files"):
            find_texts(tmp_path)

    def test_utf8_with_or_without_a_mark(self, tmp_path: Path) -> None:
        (tmp_path / "plain.txt").write_bytes("Grüße\r\nan alle".encode())
        (tmp_path / "marked.txt").write_bytes("Grüße\nan alle".encode("utf-8-sig"))
        assert read_text(tmp_path / "plain.txt") == "Grüße\nan alle"
        assert read_text(tmp_path / "marked.txt") == "Grüße\nan alle"

    def test_other_encodings_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "old.txt").write_bytes("Grüße".encode("latin-1"))
        with pytest.raises(DataError, match=r"old\.txt is not UTF-8 \(byte 2: .*iconv"):
            read_text(tmp_path / "old.txt")

    def test_unreadable_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"gone\.txt can't be read"):
            read_text(tmp_path / "gone.txt")


@pytest.mark.parametrize("held_out", [0.1, 0.5, 0.9])
def test_the_parts_are_the_text(held_out: float) -> None:
    for text in [*TEXTS, "", "word", " "]:
        begin, end = split_text(text, held_out)
        assert begin + end == text
        assert not begin or not end or end[0].isspace()
    begin, end = split_text(TEXTS[0], held_out)
    assert len(end) / len(TEXTS[0]) == pytest.approx(held_out, abs=0.02)


@pytest.mark.parametrize("text", ["\u65e5\u672c\u8a9e" * 1000, "title\n" + "ACGT" * 500])
def test_a_text_without_spaces_is_cut_anyhow(text: str) -> None:
    begin, end = split_text(text, 0.1)
    assert begin + end == text
    assert len(end) == pytest.approx(0.1 * len(text), abs=1)


class TestTokens:
    def test_give_the_text_back(self, tokenizer: str) -> None:
        texts = [TEXTS[3], "never seen: Ωμέγα 漢字 🙂 \x00 [MASK]", ""]
        tokens = encode(tokenizer, texts, VOCAB_SIZE)
        assert tokens.dtype == torch.int32
        ends = (tokens == END).nonzero()[:, 0].tolist()
        starts = [0, *(end + 1 for end in ends[:-1])]
        decoder = Tokenizer.from_str(tokenizer)
        decoded = [
            decoder.decode(tokens[start:end].tolist())
            for start, end in zip(starts, ends, strict=True)
        ]
        assert decoded == texts

    def test_leave_room_for_the_special_ones(self, tokenizer: str) -> None:
        assert Tokenizer.from_str(tokenizer).get_vocab_size() == VOCAB_SIZE - 2
        assert int(encode(tokenizer, TEXTS, VOCAB_SIZE).max()) == END

    def test_are_learned(self, tokenizer: str) -> None:
        num_bytes = len("".join(TEXTS).encode())
        assert len(encode(tokenizer, TEXTS, VOCAB_SIZE)) < 0.7 * num_bytes

    def test_of_no_texts(self, tokenizer: str) -> None:
        assert len(encode(tokenizer, [], VOCAB_SIZE)) == 0

    def test_are_the_same_in_another_process(self, tokenizer: str) -> None:
        """Whatever the seed of hash maps: a resumed run learns the same tokens again."""
        code = f"""
from pydoc_data.topics import topics
from allstep.data.text_folder import train_tokenizer
texts = [topics[name] for name in sorted(topics)[:12]]
print(train_tokenizer(texts, {VOCAB_SIZE}), end="")
"""
        again = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
        )
        assert again.stdout == tokenizer

    def test_too_few(self) -> None:
        with pytest.raises(UsageError, match=r"`vocab_size` \(=257\) must be at least 258"):
            train_tokenizer(TEXTS, 257)
        assert len(encode(train_tokenizer(["abc"], 258), ["abc"], 258)) == 4


class TestCausalSequences:
    def test_targets_are_the_next_inputs(self) -> None:
        sequences = CausalSequences(torch.arange(32, dtype=torch.int32), 10)
        assert len(sequences) == 3
        for index in range(3):
            inputs, targets = sequences[index]
            assert inputs.tolist() == list(range(10 * index, 10 * index + 10))
            assert targets.tolist() == [token + 1 for token in inputs.tolist()]

    @pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (10, 0), (11, 1), (21, 2)])
    def test_only_whole_ones(self, num_tokens: int, expected: int) -> None:
        assert len(CausalSequences(torch.zeros(num_tokens), 10)) == expected


class TestMaskedSequences:
    def test_targets_are_what_was_hidden(self) -> None:
        tokens = torch.arange(300, dtype=torch.int32) % (VOCAB_SIZE - 2)
        sequences = MaskedSequences(tokens, 100, VOCAB_SIZE)
        assert len(sequences) == 3
        for index in range(3):
            original = tokens[100 * index : 100 * (index + 1)].long()
            inputs, targets, positions = sequences[index]
            assert len(positions) == len(positions.unique()) == len(targets) == 15
            assert torch.equal(targets, original[positions])
            others = torch.ones(100, dtype=torch.bool)
            others[positions] = False
            assert torch.equal(inputs[others], original[others])

    def test_leave_the_tokens_as_they_were(self) -> None:
        tokens = torch.arange(100, dtype=torch.int64)
        MaskedSequences(tokens, 100, VOCAB_SIZE)[0]
        assert torch.equal(tokens, torch.arange(100))

    def test_shares_of_masks_and_random_tokens(self) -> None:
        tokens = torch.full([100_000], 7, dtype=torch.int32)
        torch.manual_seed(0)
        inputs, _, positions = MaskedSequences(tokens, 100_000, VOCAB_SIZE)[0]
        shown = inputs[positions]
        is_mask, is_kept = shown == MASK, shown == 7
        assert is_mask.double().mean().item() == pytest.approx(0.8, abs=0.01)
        assert is_kept.double().mean().item() == pytest.approx(0.1, abs=0.01)
        random = shown[~is_mask & ~is_kept]
        assert len(random.unique()) > 0.9 * VOCAB_SIZE
        assert int(random.max()) < END

    def test_follow_the_random_state(self) -> None:
        sequences = MaskedSequences(torch.arange(64), 64, VOCAB_SIZE)

        def draw(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return sequences[0][2]

        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))

    @pytest.mark.parametrize("sequence_length", [2, 3, 7, 100])
    def test_always_as_many(self, sequence_length: int) -> None:
        sequences = MaskedSequences(torch.arange(5 * sequence_length), sequence_length, 1000)
        counts = {len(sequences[index][2]) for index in range(len(sequences))}
        assert counts == {num_masked(sequence_length)}
        assert 1 <= num_masked(sequence_length) < sequence_length
