import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.sampler import GlobalBatchSampler, local_part
from allstep.errors import UsageError


def sampler_of(num_samples: int, global_batch: int = 8, micro_batch: int = 2, **changes: bool):
    return GlobalBatchSampler(
        num_samples, global_batch=global_batch, micro_batch=micro_batch, **changes
    )


def walk(sampler: GlobalBatchSampler, position: int = 0, num_epochs: int = 1) -> list[list[int]]:
    """The samples of each micro-batch from a position to the end of some epoch."""
    found = []
    while sampler.epoch(position) < num_epochs:
        plan = sampler.plan(position)
        assert plan.num_samples == sum(len(m.indices) for m in plan.micro_batches)
        assert [m.index for m in plan.micro_batches] == list(range(len(plan.micro_batches)))
        found += [m.indices.tolist() for m in plan.micro_batches]
        position = plan.next_position
    return found


@given(st.integers(1, 60), st.booleans())
def test_an_epoch_covers_every_sample_once(num_samples: int, shuffle: bool) -> None:
    seen = [i for micro in walk(sampler_of(num_samples, shuffle=shuffle)) for i in micro]
    assert sorted(seen) == list(range(num_samples))
    assert shuffle or seen == sorted(seen)


@given(st.integers(8, 60))
def test_drop_last_gives_whole_global_batches_only(num_samples: int) -> None:
    sampler = sampler_of(num_samples, drop_last=True)
    micro_batches = walk(sampler, num_epochs=3)
    assert len(micro_batches) == 3 * 4 * (num_samples // 8) == 3 * 4 * len(sampler)
    assert {len(micro) for micro in micro_batches} == {2}


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 4))
def test_resumed_at_any_batch_also_with_another_global_batch(
    num_samples: int, num_done: int, factor: int
) -> None:
    sampler = sampler_of(num_samples)
    order = [i for micro in walk(sampler, num_epochs=4) for i in micro]
    position = 0
    for _ in range(num_done):
        position = sampler.plan(position).next_position
    other = sampler_of(num_samples, global_batch=4 * factor)
    rest = [i for micro in walk(other, position, num_epochs=4) for i in micro]
    assert rest == order[position:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = GlobalBatchSampler(50, global_batch=50, micro_batch=50, seed=1)
    other = GlobalBatchSampler(50, global_batch=50, micro_batch=50, seed=2)
    first, second = sampler.plan(0), sampler.plan(50)
    assert (first.epoch, second.epoch) == (0, 1)
    orders = [plan.micro_batches[0].indices for plan in (first, second, other.plan(0))]
    assert not any(np.array_equal(a, b) for a, b in [orders[:2], orders[1:], orders[::2]])


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_cover_the_micro_batches_in_order(num_micro_batches: int, size: int) -> None:
    parts = [local_part(num_micro_batches, rank, size) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(num_micro_batches))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`dataset` is empty"),
        ((100, 1000, 48), r"`global_batch` \(=1000\) must be a multiple .* nearest: 960, 1008"),
        ((100, 0, 1), r"`global_batch` \(=0\) must be at least 1"),
        ((100, 8, -2), r"`micro_batch` \(=-2\) must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampler_of(*arguments)


def test_dropping_everything() -> None:
    with pytest.raises(UsageError, match=r"`global_batch` \(=8\) is larger than `dataset`"):
        sampler_of(7, drop_last=True)
