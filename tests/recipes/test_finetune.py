"""Fine-tuning of a BERT: what it begins with, and the same model on any number of workers."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import allstep
from allstep import Communicator, Task, UsageError
from allstep.errors import CheckpointError
from allstep.recipes import recipe_to_plain, save_bert
from allstep.recipes.bert import Bert
from allstep.recipes.bert_data import learn_vocabulary
from allstep.recipes.bert_model import BertForPreTraining
from allstep.recipes.finetune import FineTune
from allstep.recipes.labelled_texts import Labelled, LabelledTokens, read_classes, split_samples
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes
from tests.helpers.small_recipes import small_finetune, write_classes, write_pretrained

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "classes")


@pytest.fixture
def pretrained(folder: Path, tmp_path: Path) -> Path:
    return write_pretrained(tmp_path / "pretrained", folder)


@pytest.fixture
def make(folder: Path, pretrained: Path) -> Callable[..., FineTune]:
    return partial(small_finetune, folder=folder, pretrained=pretrained)


def leave_out_dropout(pretrained: Path) -> None:
    config = json.loads((pretrained / "config.json").read_text())
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (pretrained / "config.json").write_text(json.dumps(config | dropout))


def train(comm: Communicator, recipe: FineTune, run_dir: Path) -> dict[str, Tensor]:
    task = recipe.task(comm)
    allstep.fit(task, recipe, comm, run_dir)
    return task.model.state_dict()


@pytest.mark.slow
@pytest.mark.process
def test_fine_tuning_is_the_same_on_any_number_of_workers(
    make: Callable[..., FineTune], tmp_path: Path
) -> None:
    """With dropout."""
    recipe = make()
    lone = train(Communicator.single_process(), recipe, tmp_path / "1")
    for n in (2, 3):
        for state in run_processes(n, train, recipe, tmp_path / str(n), timeout_s=600):
            assert state_difference(state, lone) < 1e-10
    other = train(Communicator.single_process(), make(seed=1), tmp_path / "other")
    assert state_difference(other, lone) > 1e-3


def test_fine_tuning_begins_with_a_runs_encoder(
    make: Callable[..., FineTune], folder: Path, tmp_path: Path
) -> None:
    """A run's newest checkpoint and tokens are those of its files; random weights are others."""
    comm = Communicator.single_process()
    recipe = Bert(
        folder=folder,
        held_out=0.4,
        epochs=1,
        vocab_size=120,
        sequence_length=12,
        second_sequence_length=None,
        global_batch=8,
        micro_batch=8,
    )
    run_dir = tmp_path / "run"
    task = recipe.task(comm)
    allstep.fit(task, recipe, comm, run_dir)
    (run_dir / "recipe.json").write_text(json.dumps(recipe_to_plain(recipe)))
    assert isinstance(task.model, BertForPreTraining)
    save_bert(task.model, tmp_path / "files", recipe.vocabulary(comm))

    def start(**changes: Any) -> Task:
        return make(**changes).task(comm)

    of_run, of_files = start(pretrained=run_dir), start(pretrained=tmp_path / "files")
    encoder = task.model.bert.state_dict()
    for found in (of_run, of_files):
        found_encoder = found.model.bert.state_dict()  # type: ignore[operator,union-attr]
        assert all(torch.equal(value, found_encoder[name]) for name, value in encoder.items())
    for number in (0, 7):
        assert torch.equal(of_run.train_set[number][0], of_files.train_set[number][0])
    random = start(pretrained=run_dir, random_weights=True)
    assert state_difference(random.model.state_dict(), of_run.model.state_dict()) > 1e-2
    assert random.model.state_dict().keys() == of_run.model.state_dict().keys()


def test_finetune_learns_and_says_what_a_constant_reaches(
    make: Callable[..., FineTune], pretrained: Path, tmp_path: Path
) -> None:
    leave_out_dropout(pretrained)
    folder = tmp_path / "words"
    folder.mkdir()
    for name, words in {"animal": "cat dog cow", "plant": "oak elm", "sky": "sun"}.items():
        lines = [f"{word} {n}" for word in words.split() for n in range(20)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    vocabulary = learn_vocabulary([path.read_text() for path in folder.iterdir()], 120)
    (pretrained / "vocab.txt").write_text("\n".join(vocabulary))
    recipe = make(folder=folder, epochs=6, lr=1e-2, global_batch=8, micro_batch=8)
    comm = Communicator.single_process()
    metrics = allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run").metrics
    _, test = split_samples(read_classes(folder)[1], recipe.held_out)
    assert metrics["majority"] == pytest.approx(test.labels.count(0) / len(test.labels))
    assert metrics["accuracy"] > metrics["majority"] + 0.3

    (folder / "animal.txt").rename(folder / "zoo.txt")  # another order of the classes
    with pytest.raises(CheckpointError, match=r"`classes` .* differs from the checkpoint's"):
        allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run", resume=True)


def test_padding_changes_no_sample(make: Callable[..., FineTune]) -> None:
    task = make().task(Communicator.single_process())
    model = task.model.double().eval()
    tokens, labels = next(iter(DataLoader(task.train_set, 9, collate_fn=task.collate_fn)))
    lengths = (tokens != 0).sum(1)
    assert lengths.min() < lengths.max() == tokens.shape[1]
    together = model(tokens)
    for row in range(9):
        alone, label = task.train_set[row]
        assert label == labels[row]
        torch.testing.assert_close(model(alone[None])[0], together[row])


def test_labelled_tokens_are_framed_and_cut() -> None:
    vocabulary = ["[PAD]", "a", "[CLS]", "b", "[SEP]", "[UNK]", "[MASK]"]  # as in older files
    found = LabelledTokens(vocabulary, Labelled(["A b", "a b a b", "ä b c"], [0, 1, 0]), 5)
    samples = [found[number] for number in range(len(found))]
    assert [(tokens.tolist(), label.item()) for tokens, label in samples] == [
        ([2, 1, 3, 4], 0),
        ([2, 1, 3, 1, 4], 1),
        ([2, 1, 3, 5, 4], 0),
    ]


def test_equal_texts_stay_together(folder: Path) -> None:
    names, samples = read_classes(folder)
    assert len(names) == len(set(samples.labels)) == 3
    assert [name[:2] for name in names] == ["0.", "1.", "2."]
    doubled = Labelled([*samples.texts, *samples.texts], [*samples.labels, *samples.labels])
    train, test = split_samples(doubled, 0.2)
    assert not set(train.texts) & set(test.texts)
    assert len(train.texts) + len(test.texts) == 2 * len(samples.texts)
    assert len(set(test.texts)) == round(0.2 * len(set(samples.texts)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 2}, r"`sequence_length` \(=2\) must be at least 3"),
        ({"held_out": 1.0}, r"`held_out` \(=1.0\)"),
    ],
)
def test_finetune_refuses_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FineTune(**changes)


def test_finetune_refuses_what_does_not_fit(
    make: Callable[..., FineTune], folder: Path, pretrained: Path, tmp_path: Path
) -> None:
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match=r"`sequence_length` \(=21\) must be at most 20"):
        make(sequence_length=21).task(comm)
    with pytest.raises(UsageError, match=r"none of them held out at `held_out` \(=0.001\)"):
        make(held_out=0.001).task(comm)
    with pytest.raises(UsageError, match=r"nowhere\) is no folder"):
        make(folder=tmp_path / "nowhere").check()
    with pytest.raises(UsageError, match=r"nowhere\) is neither a run"):
        make(pretrained=tmp_path / "nowhere").check()
    (pretrained / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    with pytest.raises(CheckpointError, match=r"vocab.txt must begin with \[PAD\] and hold"):
        make().task(comm)
    (pretrained / "vocab.txt").write_text("a\n" * 121)
    with pytest.raises(CheckpointError, match="has 121 tokens, but the model has 120"):
        make().task(comm)
    (pretrained / "vocab.txt").unlink()
    with pytest.raises(UsageError, match=r"has no vocab.txt"):
        make().check()
    (pretrained / "recipe.json").write_text('{"recipe": "bert"}')
    with pytest.raises(UsageError, match=r"is damaged: it doesn't hold a recipe"):
        make().check()
    (pretrained / "recipe.json").write_text('{"recipe": "bert", "fields": {"folder": "gone"}}')
    with pytest.raises(UsageError, match=r"can't be read: `folder` \(=gone\) is no folder"):
        make().check()
    (pretrained / "recipe.json").write_text('{"recipe": "digits", "fields": {}}')
    with pytest.raises(UsageError, match="is a run of the recipe `digits`"):
        make().check()
    first, second, third = sorted(folder.iterdir())
    first.write_text("\n")
    with pytest.raises(UsageError, match="has no text: a class needs samples"):
        make().build(comm)
    second.unlink()
    third.unlink()
    with pytest.raises(UsageError, match="has a single"):
        make().build(comm)


def test_wordnet_glosses_become_classes(tmp_path: Path) -> None:
    lines = {
        "data.noun": [
            "  1 This software",
            '00001740 05 n 01 cat 0 000 | feline; purrs; "the cat sat | on the mat"  ',
            "00001741 28 n 01 day 0 000 | 24 hours  ",
        ],
        "data.verb": ["00001742 29 v 01 breathe 0 000 01 + 02 00 | draw air into the lungs  "],
    }
    source = tmp_path / "package" / "dict"
    source.mkdir(parents=True)
    for name, text in lines.items():
        (source / name).write_text("\n".join(text) + "\n")
    with tarfile.open(tmp_path / "wordnet.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    for number, given in enumerate((source, tmp_path / "wordnet.tgz")):
        out = tmp_path / str(number)
        script = [sys.executable, ROOT / "scripts" / "wordnet_glosses.py", given, out]
        subprocess.run(script, check=True, timeout=200)
        names, samples = read_classes(out)
        assert names == ["noun.animal", "noun.time", "verb.body"]
        assert samples.texts == ["feline; purrs", "24 hours", "draw air into the lungs"]
