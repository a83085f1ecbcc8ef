"""The net of Baidu's talk: its size as on the slides, the same on any number of workers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep import Communicator, UsageError
from allstep.recipes.gru import CharacterGru, Gru
from allstep.train.flops import count_flops
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_gru
from tests.helpers.texts import write_topics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_topics(tmp_path / "texts", 3, num_characters=700)


@pytest.mark.parametrize(("layers", "width", "batch"), [(5, 3000, 16), (3, 32, 2)])
def test_gru_size_is_what_is_counted(layers: int, width: int, batch: int) -> None:
    """The talk's numbers, which leave out embedding and scores: on torch's "meta" device."""
    recipe = Gru(layers=layers, width=width, micro_batch=batch, sequence_length=6)
    with torch.device("meta"):
        model = CharacterGru(width, layers)
        characters = torch.zeros(batch, 6, dtype=torch.int64)
    matrices = sum(p.numel() for p in model.gru.parameters() if p.ndim == 2)
    assert recipe.num_weights == matrices
    scores = 2 * batch * 6 * width * 256
    assert count_flops(lambda: model(characters)) == recipe.forward_flops + scores
    step = count_flops(lambda: model(characters).sum().backward())
    first_hidden_states = 2 * (matrices / 2) * batch  # their gradient is not computed
    assert step == 3 * (recipe.forward_flops + scores) - first_hidden_states


def test_gru_of_the_talk_has_the_numbers_of_its_slides() -> None:
    recipe = Gru(width=3000, micro_batch=16)
    assert (recipe.layers, recipe.sequence_length) == (5, 100)
    assert recipe.num_weights == 5 * 6000 * 9000
    assert 4 * recipe.num_weights == 1.08e9
    assert recipe.forward_flops == 0.864e12  # "~1 TFLOPs"
    assert "270.0 M weights of the GRU (1.08 GB in float32), 0.864 TFLOP" in recipe.describe()
    assert "and 2.59 with backward" in recipe.describe()


def test_gru_learns_more_than_how_often_characters_occur(folder: Path, tmp_path: Path) -> None:
    recipe = small_gru(folder, epochs=4, layers=1, width=24, lr=2e-2, global_batch=8)

    def learn(comm: Communicator) -> dict[str, float]:
        return dict(allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run").metrics)

    first, second = run_ranks(2, learn, timeout_s=100)
    assert first == second
    assert first["loss"] < first["unigram"] - 0.3 < math.log(256)


def test_gru_knows_bytes_and_where_texts_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é " * 80 + "z " * 20, encoding="utf-8")
    (tmp_path / "b.txt").write_text("x " * 200)
    task = small_gru(tmp_path, sequence_length=10).task(Communicator.single_process())
    shown = torch.cat([task.train_set[i][0] for i in range(len(task.train_set))])  # type: ignore[arg-type]
    assert set(shown.tolist()) == {0, 0xC3, 0xA9, *b" zx"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, r"`layers` \(=0\) must be at least 1"),
        ({"width": 0}, r"`width` \(=0\) must be at least 1"),
        ({"sequence_length": 0}, r"`sequence_length` \(=0\) must be at least 1"),
        ({"held_out": 1.0}, r"`held_out` \(=1.0\) must be between 0 and 1"),
    ],
)
def test_gru_refuses_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Gru(**changes)


def test_gru_refuses_folders_with_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\) is no folder"):
        small_gru(tmp_path / "nowhere").check()
    (tmp_path / "x.txt").write_text("short " * 10)
    with pytest.raises(UsageError, match=r"too little text: 6 bytes .* `sequence_length` \(=10\)"):
        small_gru(tmp_path).check()
    with pytest.raises(UsageError, match=r"too little text: 6 bytes to train on"):
        replace(small_gru(tmp_path), held_out=0.9).task(Communicator.single_process())
