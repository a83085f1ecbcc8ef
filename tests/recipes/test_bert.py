"""BERT's training: the same on any number of workers, the mean over all hidden tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import allstep
from allstep import Communicator, UsageError
from allstep.recipes.bert import Bert
from allstep.recipes.large_batch import apply_large_batch
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_bert, write_sentences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sentences(tmp_path / "texts")


def train(
    comm: Communicator, recipe: Bert, run_dir: Path, initial: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    task = recipe.task(comm)
    if initial is not None:
        task.model.load_state_dict(initial)  # threads share the random state
    allstep.fit(task, recipe, comm, run_dir)
    return task.model.state_dict()


@pytest.mark.slow
@pytest.mark.process
def test_bert_is_the_same_on_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    """With dropout, hidden tokens and random segments, in both stages."""
    recipe = small_bert(folder)
    assert recipe.dropout > 0
    lone = train(Communicator.single_process(), recipe, tmp_path / "1")
    for n in (2, 3):
        for state in run_processes(n, train, recipe, tmp_path / str(n), timeout_s=600):
            assert state_difference(state, lone) < 1e-10
    other = train(Communicator.single_process(), small_bert(folder, seed=1), tmp_path / "other")
    assert state_difference(other, lone) > 1e-2


def test_bert_averages_over_all_hidden_tokens_of_a_global_batch(
    folder: Path, tmp_path: Path
) -> None:
    """As one process with the sum over all; the mean of micro-batches' means is another model."""
    recipe = small_bert(
        folder, epochs=1, second_sequence_length=None, dropout=0.0, lr_schedule="constant"
    )
    alone = Communicator.single_process()
    task = recipe.task(alone)
    initial = {name: value.clone() for name, value in task.model.state_dict().items()}

    def train_whole(weighs: bool) -> dict[str, Tensor]:
        model = task.model.double()
        model.load_state_dict(initial)
        optimizer = task.optimizer(model)
        loader = allstep.data.loader(task.train_set, alone, global_batch=24, micro_batch=4)
        for step, batch in enumerate(loader.global_batches()):
            parts = [(task.loss(model, m.data), m.num_samples) for m in batch.micro_batches]
            if len(parts) > 1:  # the last batch may have one sample alone
                assert len({n / k for (_, n), k in parts}) > 1  # type: ignore[misc]
            if weighs:
                loss = sum(total for (total, _), _ in parts) / sum(n for (_, n), _ in parts)  # type: ignore[misc]
            else:
                loss = sum(total / n * k for (total, n), k in parts) / batch.num_samples  # type: ignore[misc]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * task.schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole, means = train_whole(True), train_whole(False)
    state = train(alone, recipe, tmp_path / "run", initial)
    assert state_difference(state, whole) < 1e-10
    assert state_difference(state, means) > 1e-4


def test_bert_loss_is_a_sum_over_hidden_tokens_and_pairs(folder: Path) -> None:
    task = small_bert(folder, second_sequence_length=None).task(Communicator.single_process())
    model = task.model.eval()
    batch = next(iter(DataLoader(task.train_set, batch_size=7)))
    tokens, segments, positions, targets, is_random = batch
    scores, relations = model(tokens, segments)
    masked, count = torch.zeros(()), 0
    for row in range(7):
        for place, target in zip(positions[row].tolist(), targets[row].tolist(), strict=True):
            if target >= 0:
                masked, count = masked - scores[row, place].log_softmax(0)[target], count + 1
    pairs = -relations.log_softmax(1)[range(7), is_random].sum()
    most_masked = allstep.data.text_folder.num_masked(24)
    total, weight = task.loss(model, batch)  # type: ignore[misc]
    assert weight == count < 7 * most_masked
    torch.testing.assert_close(total, masked + most_masked * pairs)
    metrics = task.metrics(model, batch)
    assert {name: n for name, (_, n) in metrics.items()} == {
        "loss": count,
        "unigram": count,
        "accuracy": count,
        "pair_loss": 7,
        "pair_accuracy": 7,
    }
    torch.testing.assert_close(metrics["loss"][0], masked)
    torch.testing.assert_close(metrics["pair_loss"][0], pairs)


@pytest.mark.slow
def test_bert_learns_more_than_how_often_tokens_occur(folder: Path, tmp_path: Path) -> None:
    words = ["cat", "dog", "sun", "sea", "tree", "wind"]
    for path, word in zip(sorted(folder.iterdir()), 2 * words, strict=True):
        path.write_text(f"{word} {word} {word} {word}. " * 30)
    recipe = small_bert(
        folder, epochs=8, global_batch=8, vocab_size=60, second_sequence_length=None
    )

    def learn(comm: Communicator) -> dict[str, float]:
        return dict(allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run").metrics)

    first, second = run_ranks(2, learn, timeout_s=100)
    assert first == second
    assert first["loss"] < first["unigram"] - 0.2


def test_bert_vocabulary_is_that_of_rank_0(folder: Path) -> None:
    recipe = small_bert(folder)
    lone = recipe.vocabulary(Communicator.single_process())
    assert len(lone) <= 200
    assert run_ranks(2, recipe.vocabulary) == [lone, lone]


def test_bert_takes_the_stages_that_were_published(folder: Path) -> None:
    recipe = small_bert(folder, epochs=10, global_batch=64, second_sequence_length=None)
    applied, _ = apply_large_batch(recipe, "lamb_bert_76min")
    assert isinstance(applied, Bert)
    assert (applied.second_sequence_length, applied.second_batch) == (96, 32)
    stage = applied.task(Communicator.single_process()).later_stages[0]
    assert stage.first_epoch == 9
    assert len(stage.train_set[0][0]) == 96


def test_bert_of_one_stage_and_its_size() -> None:
    recipe = Bert(size="base", vocab_size=30522, second_sequence_length=512)
    assert recipe.describe() == "BERT base: 110.1 M weights"
    one = Bert(second_sequence_length=None, sequence_length=77)
    assert one.config.max_position_embeddings == 77
    assert one.second_stage is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "huge"}, r"`size` \(='huge'\)"),
        ({"sequence_length": 7}, r"`sequence_length` \(=7\) must be at least 8"),
        ({"vocab_size": 5}, r"`vocab_size` \(=5\) must be at least 10"),
        ({"dropout": 1.0}, r"`dropout` \(=1.0\)"),
        ({"epochs": 1}, r"`second_epochs` \(=1\) must be at least 1 and below `epochs` \(=1\)"),
    ],
)
def test_bert_refuses_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Bert(**changes)


def test_bert_refuses_folders_with_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\) is no folder"):
        small_bert(tmp_path / "nowhere").check()
    (tmp_path / "x.txt").write_text("short " * 10)
    with pytest.raises(UsageError, match="too little text: 18 bytes held out"):
        small_bert(tmp_path).check()
    (tmp_path / "x.txt").write_text("short " * 40)
    with pytest.raises(UsageError, match=r"too little text: \d+ tokens"):
        small_bert(tmp_path).task(Communicator.single_process())
