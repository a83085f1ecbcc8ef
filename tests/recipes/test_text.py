import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import allstep
from allstep import Communicator, DataError, UsageError
from allstep.recipes.text import Text
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_text
from tests.helpers.texts import write_topics

OBJECTIVES = ["masked", "causal"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_topics(tmp_path / "texts", 5)


def train(
    comm: Communicator, recipe: Text, run_dir: Path, initial: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    task = recipe.task(comm)
    if initial is not None:
        task.model.load_state_dict(initial)
    allstep.fit(task, recipe, comm, run_dir)
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float64}
    return task.model.state_dict()


def test_text_averages_paragraphs_over_all_tokens_of_a_global_batch(
    folder: Path, tmp_path: Path
) -> None:
    """Unequal samples, padded in their micro-batch: as one process with the sum over all."""
    recipe = small_text(folder, samples="paragraphs", sequence_length=40, lr_schedule="constant")
    alone = Communicator.single_process()
    task = recipe.task(alone)
    initial = {name: value.clone() for name, value in task.model.state_dict().items()}

    def train_whole(weighs: bool) -> dict[str, torch.Tensor]:
        """torch alone; with `weighs` False the mean of the micro-batches' means."""
        model = task.model.double()
        model.load_state_dict(initial)
        optimizer = task.optimizer(model)
        loader = allstep.data.loader(
            task.train_set, alone, global_batch=24, micro_batch=6, collate_fn=task.collate_fn
        )
        for step, batch in enumerate(loader.global_batches()):
            parts = [(task.loss(model, m.data), m.num_samples) for m in batch.micro_batches]
            if weighs:
                loss = sum(total for (total, _), _ in parts) / sum(n for (_, n), _ in parts)
            else:
                loss = sum(total / n * k for (total, n), k in parts) / batch.num_samples
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * task.schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    lengths = {len(task.train_set[i][0]) for i in range(len(task.train_set))}
    assert min(lengths) < 20 and max(lengths) == 40
    whole, means = train_whole(True), train_whole(False)
    both = run_ranks(2, lambda comm: train(comm, recipe, tmp_path / "both", initial), timeout_s=100)
    for state in both:
        assert state_difference(state, whole) < 1e-10
        assert state_difference(state, means) > 1e-4


def test_text_paragraphs_are_for_the_causal_objective(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"`samples` .*'causal'"):
        small_text(folder, samples="paragraphs", objective="masked")


@pytest.mark.process
@pytest.mark.slow
def test_text_on_two_processes_gives_the_same(folder: Path, tmp_path: Path) -> None:
    """Even though tokens are hidden and features dropped at random."""
    recipe = small_text(folder, objective="masked", dropout=0.1)
    lone = train(Communicator.single_process(), recipe, tmp_path / "lone")
    for state in run_processes(2, train, recipe, tmp_path / "both", timeout_s=100):
        assert state_difference(state, lone) < 1e-10


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_text_loss_falls_on_two_workers(folder: Path, tmp_path: Path, objective: str) -> None:
    recipe = small_text(folder, objective=objective, epochs=2)

    def learn(comm: Communicator) -> dict[str, float]:
        return dict(allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run").metrics)

    first, second = run_ranks(2, learn, timeout_s=100)
    assert first == second
    assert first["loss"] < math.log(300) - 0.5  # the first guess is uniform


def test_text_tokenizer_is_that_of_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels: the others need not learn the same, nor take the time to learn."""
    reader = allstep.data.text_folder
    trained = []

    def train_tokenizer(texts: Any, vocab_size: int) -> str:
        trained.append(vocab_size)
        return original(texts, vocab_size)

    original = reader.train_tokenizer
    monkeypatch.setattr(reader, "train_tokenizer", train_tokenizer)
    recipe = small_text(folder, objective="causal")
    samples = run_ranks(3, lambda comm: recipe.task(comm).train_set[7])
    assert trained == [300]
    for inputs, targets in samples:
        assert torch.equal(inputs, samples[0][0])
        assert torch.equal(targets, samples[0][1])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_text_metrics_are_sums_over_the_targets(folder: Path, objective: str) -> None:
    task = small_text(folder, objective=objective).task(Communicator.single_process())
    model = task.model.double().eval()
    batch = next(iter(DataLoader(task.test_set, batch_size=5)))
    metrics = task.metrics(model, batch)
    targets = batch[1].flatten()
    assert {count for _, count in metrics.values()} == {len(targets)}
    loss, count = metrics["loss"]
    torch.testing.assert_close(loss / count, task.mean_loss(model, batch))

    counts = torch.ones(300, dtype=torch.float64)  # one of each token is added
    for _, train_targets in _causal_samples(folder):
        for target in train_targets.tolist():
            counts[target] += 1
    expected = -(counts / counts.sum()).log()[targets].mean()
    unigram, count = metrics["unigram"]
    assert float(unigram) / float(count) == pytest.approx(expected.item(), abs=0.02)


def _causal_samples(folder: Path) -> Any:
    train_set = small_text(folder, objective="causal").task(Communicator.single_process()).train_set
    return [train_set[index] for index in range(len(train_set))]  # type: ignore[arg-type]


def test_text_model_is_causal_or_not(folder: Path) -> None:
    for objective in OBJECTIVES:
        model = small_text(folder, objective=objective).task(Communicator.single_process()).model
        one, other = torch.zeros(2, 1, 16, dtype=torch.int64)
        other[0, -1] = 5
        is_blind = torch.equal(model(one)[:, :-1], model(other)[:, :-1])
        assert is_blind == (objective == "causal")


def test_text_held_out_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a " * 900 + "z " * 100)
    recipe = small_text(tmp_path, objective="causal", vocab_size=258)
    task = recipe.task(Communicator.single_process())
    train_tokens = torch.cat([task.train_set[i][0] for i in range(len(task.train_set))])  # type: ignore[arg-type]
    test_tokens = torch.cat([task.test_set[i][0] for i in range(len(task.test_set))])  # type: ignore[arg-type]
    assert len(train_tokens.unique()) == len(test_tokens.unique()) == 2
    assert len(torch.cat([train_tokens, test_tokens]).unique()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 0.0}, r"`held_out` \(=0.0\) must be between 0 and 1"),
        ({"sequence_length": 1}, r"`sequence_length` \(=1\) must be at least 2"),
        ({"depth": 0}, r"`depth` \(=0\) must be at least 1"),
        ({"heads": 3}, r"`width` \(=16\) must be a multiple of `heads` \(=3\)"),
        ({"dropout": 1.0}, r"`dropout` \(=1.0\)"),
        ({"vocab_size": 100}, r"`vocab_size` \(=100\) must be at least 258"),
    ],
)
def test_text_refuses_wrong_values(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small_text(folder, **changes)


def test_text_refuses_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\) is no folder"):
        small_text(tmp_path / "nowhere").check()
    with pytest.raises(UsageError, match=r"has no \.txt files"):
        small_text(tmp_path).check()
    (tmp_path / "x.txt").write_text("short " * 20)
    with pytest.raises(UsageError, match="too little text: 12 bytes held out"):
        small_text(tmp_path).check()


def test_text_with_few_tokens_in_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("word " * 200)
    recipe = small_text(tmp_path, sequence_length=80)
    recipe.check()
    with pytest.raises(UsageError, match=r"too little text: \d+ tokens held out"):
        recipe.task(Communicator.single_process())


def test_text_refuses_a_file_that_is_no_text(folder: Path) -> None:
    (folder / "picture.txt").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DataError, match=r"picture\.txt is not UTF-8"):
        small_text(folder).task(Communicator.single_process())


def test_text_without_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="pip install tokenizers"):
        small_text(folder).check()
