"""Shares of a data set: nested, seeded, and the same training on any number of workers."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import allstep
from allstep import Communicator, UsageError
from allstep.data import subset
from allstep.data.random import derive_permutation
from allstep.errors import DisagreementError
from allstep.recipes import REGISTRY
from allstep.recipes.digits import Digits, load_digits
from tests.helpers.compare import differing_names
from tests.helpers.ranks import run_ranks

SHARES = (0.01, 0.03, 0.1, 0.3, 0.999, 1.0)


def test_a_smaller_share_is_part_of_a_larger() -> None:
    parts = [set(subset(range(1000), share, seed=3)) for share in SHARES]
    assert [len(part) for part in parts] == [10, 30, 100, 300, 999, 1000]
    for smaller, larger in itertools.pairwise(parts):
        assert smaller < larger


def test_the_seed_decides_which_samples() -> None:
    drawn = [list(subset(range(1000), 0.1, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0]) & set(drawn[2])) < 30  # 10 by chance


def test_a_share_is_no_epochs_order() -> None:
    """Else the whole set's first batches were the share, in its own order."""
    drawn = list(subset(range(1000), 0.1, seed=5))
    for epoch in range(3):
        assert drawn != derive_permutation(1000, 5, epoch)[:100].tolist()


def test_the_whole_set_stays_itself_and_the_least_share_has_a_sample() -> None:
    whole = range(7)
    assert subset(whole, 1.0) is whole
    assert len(subset(whole, 0.001)) == 1


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(UsageError, match=r"`share` \(=.*\) must be above 0 and at most 1"):
        subset(range(4), share)
    with pytest.raises(UsageError, match=r"`train_share` \(=.*\) must be above 0 and at most 1"):
        Digits(train_share=share)


def test_a_stream_has_no_share() -> None:
    for unfit in (iter([1]), DataLoader([1])):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="has no length or can't be indexed; give a map-style"):
            subset(unfit, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_a_recipe_trains_on_its_share(share: float) -> None:
    recipe = Digits(train_share=share)
    task = recipe.task(Communicator.single_process())
    expected = subset(load_digits()[0], share)
    assert len(task.train_set) == len(expected) == round(1437 * share)  # type: ignore[arg-type]
    for number in range(len(expected)):  # type: ignore[arg-type]
        for tensor, other in zip(task.train_set[number], expected[number], strict=True):
            assert torch.equal(tensor, other)
    assert len(task.test_set) == 360  # type: ignore[arg-type]
    total = recipe.epochs * recipe.steps_per_epoch(len(expected))  # type: ignore[arg-type]
    assert task.schedule(total - 1) < 0.01 * task.schedule(total // 2)  # falls over these steps


def train(comm: Communicator, run_dir: Path, share: float) -> dict[str, Tensor]:
    recipe = REGISTRY["digits"](epochs=1, warmup_epochs=0, width=4, dropout=0.0, train_share=share)
    assert isinstance(recipe, Digits)
    task = recipe.task(comm)
    allstep.fit(task, recipe, comm, run_dir / f"{comm.size} {share}")
    return task.model.state_dict()


def test_a_share_is_trained_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    """Bit for bit; control: one sample more is another model."""
    alone = train(Communicator.single_process(), tmp_path, 0.1)
    for size in (2, 3):
        for found in run_ranks(size, lambda comm: train(comm, tmp_path, 0.1), timeout_s=120):
            assert not differing_names(found, alone), size
    other = train(Communicator.single_process(), tmp_path, 145 / 1437)
    assert differing_names(other, alone)


def test_a_share_that_each_worker_chooses_for_itself_is_noticed() -> None:
    def load(comm: Communicator) -> None:
        own = subset(load_digits()[0], 0.1, seed=comm.rank)
        allstep.data.loader(own, comm, global_batch=8, micro_batch=4)

    with pytest.raises(DisagreementError, match="Workers that make a loader disagree"):
        run_ranks(2, load)
