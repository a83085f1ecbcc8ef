"""BERT's training: the same on any number of workers, the mean over all hidden tokens."""

import copy
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import allstep
from allstep import Communicator, Task, UsageError
from allstep.recipes.bert import Bert
from allstep.recipes.large_batch import apply_large_batch
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Short sentences in documents of unequal lengths: samples hide more tokens or fewer."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, name in enumerate(sorted(topics)[:12]):
        words = re.findall(r"[a-z]+", topics[name])[: 40 + 6 * number]
        text = " ".join(f"{word}." if place % 2 else word for place, word in enumerate(words))
        (texts / f"{name}.txt").write_text(text, encoding="utf-8")
    return texts


def small(folder: Path, **changes: Any) -> Bert:
    arguments: dict[str, Any] = {
        "folder": folder,
        "held_out": 0.3,
        "epochs": 2,
        "global_batch": 24,
        "micro_batch": 4,
        "vocab_size": 200,
        "sequence_length": 24,
        "second_sequence_length": 48,
        "precision": "float64",
    }
    return Bert(**arguments | changes)


def train(
    comm: Communicator, recipe: Bert, run_dir: Path, initial: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    task = recipe.task(comm)
    if initial is not None:
        task.model.load_state_dict(initial)  # threads share the random state
    allstep.fit(task, recipe, comm, run_dir)
    return task.model.state_dict()


def train_on_drawn_samples(
    comm: Communicator, task: Task, recipe: Bert, run_dir: Path
) -> dict[str, Tensor]:
    task = replace(task, model=copy.deepcopy(task.model))
    allstep.fit(task, recipe, comm, run_dir)
    return task.model.state_dict()


def test_bert_is_the_same_on_workers_that_are_threads(folder: Path, tmp_path: Path) -> None:
    """Of samples that are drawn before, without dropout: threads share a random state."""
    recipe = small(folder, epochs=1, second_sequence_length=None, dropout=0.0)
    lone_comm = Communicator.single_process()
    task = recipe.task(lone_comm)
    drawn = [task.train_set[index] for index in range(len(task.train_set))]  # type: ignore[arg-type]
    task = replace(task, train_set=drawn, test_set=drawn[:10])
    lone = train_on_drawn_samples(lone_comm, task, recipe, tmp_path / "1")
    train_on_three = partial(
        train_on_drawn_samples, task=task, recipe=recipe, run_dir=tmp_path / "3"
    )
    for state in run_ranks(3, train_on_three, timeout_s=100):
        assert state_difference(state, lone) < 1e-10


@pytest.mark.slow
@pytest.mark.process
def test_bert_is_the_same_on_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    """With dropout, hidden tokens and random segments, in both stages."""
    recipe = small(folder)
    assert recipe.dropout > 0
    lone = train(Communicator.single_process(), recipe, tmp_path / "1")
    for n in (2, 3):
        for state in run_processes(n, train, recipe, tmp_path / str(n), timeout_s=600):
            assert state_difference(state, lone) < 1e-10
    other = train(Communicator.single_process(), small(folder, seed=1), tmp_path / "other")
    assert state_difference(other, lone) > 1e-2


def test_bert_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """From the first stage on, through the second; the vocabulary is learned anew."""
    comm = Communicator.single_process()
    recipe = small(folder, checkpoint_every_steps=2, keep_checkpoints=100)
    whole = recipe.task(comm)
    run_dir = tmp_path / "run"
    report = allstep.fit(whole, recipe, comm, run_dir)
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*"))
    first_stage_steps = recipe.steps_per_epoch(len(whole.train_set))  # type: ignore[arg-type]
    assert 2 < first_stage_steps < report.num_steps
    for checkpoint in checkpoints[1:]:
        shutil.rmtree(checkpoint)
    resumed = recipe.task(comm)
    allstep.fit(resumed, recipe, comm, run_dir, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_bert_averages_over_all_hidden_tokens_of_a_global_batch(
    folder: Path, tmp_path: Path
) -> None:
    """As one process with the sum over all; the mean of micro-batches' means is another model."""
    recipe = small(
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
    task = small(folder, second_sequence_length=None).task(Communicator.single_process())
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
    recipe = small(folder, epochs=8, global_batch=8, vocab_size=60, second_sequence_length=None)

    def learn(comm: Communicator) -> dict[str, float]:
        return dict(allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run").metrics)

    first, second = run_ranks(2, learn, timeout_s=100)
    assert first == second
    assert first["loss"] < first["unigram"] - 0.2


def test_bert_vocabulary_is_that_of_rank_0(folder: Path) -> None:
    recipe = small(folder)
    lone = recipe.vocabulary(Communicator.single_process())
    assert len(lone) <= 200
    assert run_ranks(2, recipe.vocabulary) == [lone, lone]


def test_bert_takes_the_stages_that_were_published(folder: Path) -> None:
    recipe = small(folder, epochs=10, global_batch=64, second_sequence_length=None)
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
        small(tmp_path / "nowhere").check()
    (tmp_path / "x.txt").write_text("short " * 10)
    with pytest.raises(UsageError, match="too little text: 18 bytes held out"):
        small(tmp_path).check()
    (tmp_path / "x.txt").write_text("short " * 40)
    with pytest.raises(UsageError, match=r"too little text: \d+ tokens"):
        small(tmp_path).task(Communicator.single_process())
