"""Global batches as integers: coverage, positions, other global batches, messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data import GlobalBatchSampler
from allstep.data.sampler import local_part
from allstep.errors import UsageError


def samples_from(sampler: GlobalBatchSampler, position: int, num_epochs: int) -> list[int]:
    """All samples, in order, from `position` to the end of an epoch."""
    found: list[int] = []
    while sampler.epoch(position) < num_epochs:
        plan = sampler.plan(position)
        parts = [sampler.indices(plan, index) for index in range(plan.num_micro_batches)]
        assert sum(map(len, parts)) == plan.num_samples
        found += np.concatenate(parts).tolist()
        position = plan.next_position
    return found


@given(
    num_samples=st.integers(1, 60),
    num_micro_batches=st.integers(1, 5),
    micro_batch=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_each_sample_once_an_epoch(
    num_samples: int, num_micro_batches: int, micro_batch: int, shuffle: bool
) -> None:
    sampler = GlobalBatchSampler(
        num_samples,
        global_batch=num_micro_batches * micro_batch,
        micro_batch=micro_batch,
        shuffle=shuffle,
    )
    found = samples_from(sampler, 0, 2)
    assert sorted(found[:num_samples]) == list(range(num_samples))
    assert sorted(found[num_samples:]) == list(range(num_samples))
    if not shuffle:
        assert found == 2 * list(range(num_samples))


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int) -> list[int]:
        return samples_from(GlobalBatchSampler(50, global_batch=8, micro_batch=4, seed=seed), 0, 2)

    assert order(0)[:50] != order(0)[50:]
    assert order(0) == order(0)
    assert order(0)[:50] != order(1)[:50]


@given(batch_before=st.integers(1, 12), batch_after=st.integers(1, 12), num_steps=st.integers(0, 9))
def test_another_global_batch_goes_on_with_the_same_samples(
    batch_before: int, batch_after: int, num_steps: int
) -> None:
    before = GlobalBatchSampler(23, global_batch=batch_before, micro_batch=1)
    after = GlobalBatchSampler(23, global_batch=batch_after, micro_batch=1)
    position, seen = 0, []
    for _ in range(num_steps):
        plan = before.plan(position)
        seen += [int(before.indices(plan, i)[0]) for i in range(plan.num_micro_batches)]
        position = plan.next_position
    num_epochs = after.epoch(position) + 1
    assert seen + samples_from(after, position, num_epochs) == samples_from(before, 0, num_epochs)


def test_a_dropped_tail_counts_as_consumed() -> None:
    sampler = GlobalBatchSampler(10, global_batch=4, micro_batch=2, drop_last=True)
    assert len(sampler) == 2
    assert sampler.plan(4).next_position == 10
    assert [sampler.settle(position) for position in (0, 6, 7, 10, 18)] == [0, 6, 10, 10, 20]
    kept = GlobalBatchSampler(10, global_batch=4, micro_batch=2)
    assert len(kept) == 3
    assert kept.plan(8).num_micro_batches == 1
    assert len(GlobalBatchSampler(8, global_batch=4, micro_batch=2)) == 2


@given(num_micro_batches=st.integers(0, 50), size=st.integers(1, 20))
def test_workers_parts_are_blocks_of_nearly_equal_sizes(num_micro_batches: int, size: int) -> None:
    parts = [local_part(num_micro_batches, rank, size) for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(num_micro_batches))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("num_samples", "changes", "message"),
    [
        (100, {"global_batch": 0}, r"`global_batch` \(=0\) must be at least 1"),
        (100, {"micro_batch": -1}, r"`micro_batch` \(=-1\) must be at least 1"),
        (100, {"global_batch": 8.0}, r"`global_batch` \(=8\.0\) must be a whole number"),
        (100, {"micro_batch": True}, r"`micro_batch` \(=True\) must be a whole number"),
        (100, {"global_batch": 1000, "micro_batch": 48}, r"\(=1000\).*\(=48\); nearest: 960, 1008"),
        (0, {}, r"`dataset` is empty"),
        (7, {"drop_last": True}, r"`global_batch` \(=8\) is larger than `dataset` \(7 samples\)"),
    ],
)
def test_messages(num_samples: int, changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"global_batch": 8, "micro_batch": 4} | changes
    with pytest.raises(UsageError, match=message):
        GlobalBatchSampler(num_samples, **arguments)
