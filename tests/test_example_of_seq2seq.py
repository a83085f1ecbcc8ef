"""Spelling to pronunciation: encoder and decoder on one rank or two, one pair of ranks or more."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.comm import Mesh
from allstep.nn import Chain
from examples import seq2seq
from tests.helpers.compare import state_difference
from tests.helpers.generators import seeded_thread, thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[1]
DICTIONARY = """\
'bout B AW1 T
a AH0
a(2) EY1
aalborg AO1 L B AO0 R G # place, danish
aalborg(2) AA1 L B AO0 R G
abandon AH0 B AE1 N D AH0 N
abandonment AH0 B AE1 N D AH0 N M AH0 N T
abandons AH0 B AE1 N D AH0 N Z
adele AH0 D EH1 L
mr. M IH1 S T ER0
the DH AH0
the(2) DH AH1
the(3) DH IY0
drillbit D R IH1 L B IH0 T
pavilions P AH0 V IH1 L Y AH0 N Z
racehorses R EY1 S HH AO2 R S IH0 Z
"""
OPTIONS = seq2seq.Options(
    epochs=2, global_batch=6, micro_batch=2, width=3, dropout=0.3, lr=0.02, max_phonemes=6,
    dtype=torch.float64,
)  # fmt: skip


@pytest.fixture
def dictionary(tmp_path: Path) -> Path:
    path = tmp_path / "cmudict.dict"
    path.write_text(DICTIONARY, encoding="utf-8")
    return path


@pytest.fixture
def words(dictionary: Path) -> TensorDataset:
    return seq2seq.read_words(dictionary)


def alone(**changes: Any) -> Chain:
    """A model of one worker, without dropout."""
    options = replace(OPTIONS, dropout=0.0, **changes)
    return seq2seq.model_of(seq2seq.mesh_of(Communicator.single_process()), options)


def trained(
    comm: Communicator, words: TensorDataset, options: seq2seq.Options
) -> tuple[Mesh[Communicator], Chain]:
    """A model that drops by the thread's own random numbers, as ranks are threads."""
    mesh = seq2seq.mesh_of(comm)
    parts = seq2seq.parts_of(options, mesh["model"].size)
    names = {"inputs": ("letters", "said"), "outputs": ("answer",)}
    model = Chain(parts, mesh, **names, seeded=seeded_thread)
    seq2seq.train(mesh, model, words, options)
    return mesh, model


def test_seq2seq_is_the_same_on_any_number_of_workers(
    thread_generators: None,  # noqa: F811
    words: TensorDataset,
) -> None:
    def work(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, float]]:
        mesh, model = trained(comm, words, OPTIONS)
        return model.state_dict(), seq2seq.test(mesh, model, words)

    [(lone, rates)] = run_ranks(1, work)
    for num_workers in (2, 4):
        ranks = run_ranks(num_workers, work)
        for (encoder, _), (decoder, _) in zip(ranks[::2], ranks[1::2], strict=True):
            assert encoder and decoder
            assert state_difference(encoder | decoder, lone) < 1e-10
        assert [found for _, found in ranks] == [rates] * num_workers


def test_seq2seq_weighs_phonemes_not_words_nor_micro_batches(words: TensorDataset) -> None:
    """The gradient is that of the mean over all phonemes; means of means are others."""
    letters, pronunciations = words.tensors
    said = seq2seq.trimmed(pronunciations[:, 0])

    def gradient(model: Chain) -> dict[str, Tensor]:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def by_hand(of_parts: list[slice], *, by_micro_batch: bool) -> dict[str, Tensor]:
        model = alone()
        for part in of_parts:
            chosen = seq2seq.trimmed(letters[part])
            values, _ = model(letters=chosen, said=said[part])
            loss = seq2seq.summed_loss(values["answer"], said[part])
            of = said[part] if by_micro_batch else said
            num_parts = len(of_parts) if by_micro_batch else 1
            (loss / (of != seq2seq.PAD).sum() / num_parts).backward()
        return gradient(model)

    def work(comm: Communicator) -> dict[str, Tensor]:
        mesh = seq2seq.mesh_of(comm)
        model = seq2seq.model_of(mesh, replace(OPTIONS, dropout=0.0))
        exchange = allstep.attach(model, mesh["data"])
        loader = allstep.data.loader(
            words, mesh["data"], global_batch=12, micro_batch=4, shuffle=False
        )
        (grads,) = (
            seq2seq.add_gradients(model, batch) or gradient(model)
            for batch in allstep.steps(loader, exchange)
        )
        exchange.detach()
        return grads

    encoder, decoder, *_ = run_ranks(4, work)
    whole = by_hand([slice(None)], by_micro_batch=False)
    assert state_difference(encoder | decoder, whole) < 1e-12
    cuts = [slice(0, 4), slice(4, 8), slice(8, None)]
    for parts in (cuts, [slice(i, i + 1) for i in range(len(words))]):
        assert state_difference(by_hand(parts, by_micro_batch=False), whole) < 1e-12
        assert state_difference(by_hand(parts, by_micro_batch=True), whole) > 1e-3


def test_seq2seq_answers_do_not_depend_on_the_words_beside(words: TensorDataset) -> None:
    model = alone()
    letters, said = words.tensors[0], seq2seq.trimmed(words.tensors[1][:, 0])
    together = model(letters=seq2seq.trimmed(letters), said=said)[0]["answer"]
    for i in range(len(words)):
        letters_alone = seq2seq.trimmed(letters[i : i + 1])
        scores = model(letters=letters_alone, said=said[i : i + 1])[0]["answer"]
        torch.testing.assert_close(scores, together[i : i + 1], rtol=0, atol=1e-12)


def test_seq2seq_answer_is_the_likeliest_at_each_step(words: TensorDataset) -> None:
    model = alone(seed=1)
    letters = seq2seq.trimmed(words.tensors[0])
    with torch.no_grad():
        answer = model.eval()(letters=letters, said=letters)[0]["answer"]
        scores = model.train()(letters=letters, said=answer)[0]["answer"]
    assert torch.equal(scores.argmax(2), answer)


def test_seq2seq_refuses_a_worker_without_another() -> None:
    with pytest.raises(UsageError, match=r"3 workers don't go in pairs .* start one, or an even"):
        run_ranks(3, seq2seq.mesh_of)


def test_seq2seq_reads_a_dictionary(words: TensorDataset) -> None:
    letters, pronunciations = words.tensors
    shown = {
        "".join(seq2seq.LETTERS[x] for x in row): [
            " ".join(seq2seq.PHONEMES[x] for x in seq2seq.unpadded(said))
            for said in several.tolist()
            if said[0] != seq2seq.PAD
        ]
        for row, several in zip(letters.tolist(), pronunciations, strict=True)
    }
    assert len(shown) == 11  # not the one with a full stop
    assert shown["'bout"] == ["B AW T"]
    assert shown["aalborg"] == ["AO L B AO R G", "AA L B AO R G"]
    assert shown["the"] == ["DH AH", "DH IY"]  # stress left out, two are one
    train_set, test_set = seq2seq.split(words, 4)
    assert (len(train_set), len(test_set)) == (7, 4)


def test_seq2seq_refuses_what_is_no_dictionary(words: TensorDataset, tmp_path: Path) -> None:
    path = tmp_path / "other.dict"
    for line in ("eins AI N S", "one"):
        path.write_text(line, encoding="utf-8")
        with pytest.raises(UsageError, match=rf"other.dict\) has the line '{line}'; give a file"):
            seq2seq.read_words(path)
    with pytest.raises(UsageError, match="no package `no_such_package`: pip install"):
        seq2seq.dictionary("no_such_package")
    with pytest.raises(UsageError, match=r"`test_words` \(=11\) must leave .* choose 1 to 10"):
        seq2seq.split(words, 11)


def test_seq2seq_edits_are_counted_against_the_nearest_pronunciation(words: TensorDataset) -> None:
    assert seq2seq.num_edits([2, 3, 4], [2, 4]) == seq2seq.num_edits([2], [3]) == 1
    assert seq2seq.num_edits([], [2, 3]) == 2 and seq2seq.num_edits([5, 2, 3], [2, 3, 5]) == 2
    pronunciations = words.tensors[1]
    right = seq2seq.compared(pronunciations[:, 0], pronunciations)
    assert right["phoneme errors"][0] == 0 and right["words right"] == (11, 11)
    answers = pronunciations[:, 0].clone()
    answers[1, 0] = seq2seq.PHONEMES.index("EY")  # the second pronunciation of "a"
    answers[2, 1] = seq2seq.PHONEMES.index("R")
    assert seq2seq.compared(answers, pronunciations) == {
        "phoneme errors": (1, right["phoneme errors"][1]),
        "words right": (10, 11),
    }


def test_seq2seq_baseline_says_letters_as_most_words_do(words: TensorDataset) -> None:
    """Of "a", "the" has too few phonemes; "drillbit" has as many as letters but one."""
    letters = words.tensors[0]
    answers = seq2seq.letter_by_letter(words, letters)
    a = seq2seq.PHONEMES.index("AH")
    assert answers[1].tolist() == [a] + [seq2seq.EDGE] * (letters.shape[1] - 1)


@pytest.mark.slow
@pytest.mark.process
def test_seq2seq_runs_on_one_and_four_processes(dictionary: Path) -> None:
    script = str(ROOT / "examples" / "seq2seq.py")
    flags = ["--dictionary", str(dictionary), "--test-words", "4", "--epochs", "1"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    printed = []
    for launcher in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *launcher, script, *flags], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1] and "words right" in printed[0]
