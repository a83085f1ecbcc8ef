"""The loader of map-style sets: the same contents on any number of workers, from any position."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks  # samples draw from the process's own states
from allstep.data.random import preserved_random_state, seed_all
from allstep.errors import UsageError
from tests.data.sets import (
    Augmented,
    Content,
    Seat,
    Stream,
    contents,
    draw,
    equal,
    indices,
    samples,
    union,
)
from tests.helpers.processes import run_processes

NUM_SAMPLES = 22  # two global batches of 4 micro-batches of 2, and one of 3 micro-batches


def make_loader(comm: Any = None, dataset: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 5} | changes
    return allstep.data.loader(
        Augmented(NUM_SAMPLES) if dataset is None else dataset, comm or Seat(0, 1), **arguments
    )


def on_workers(size: int, num_epochs: int = 1, **changes: Any) -> Content:
    """The union of all workers' micro-batches."""
    parts: list[Content] = []
    for rank in range(size):
        with make_loader(Seat(rank, size), **changes) as loader:
            for _ in range(num_epochs):
                parts.append(contents(loader))
            assert loader.epoch == num_epochs
    return union(parts)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_same_contents_on_any_number_of_workers(size: int, drop_last: bool) -> None:
    reference = on_workers(1, num_epochs=2, drop_last=drop_last)
    assert equal(on_workers(size, num_epochs=2, drop_last=drop_last), reference)
    num_seen = sum(map(len, indices(reference)))
    assert num_seen == 2 * (16 if drop_last else NUM_SAMPLES)


@pytest.mark.parametrize("size", [1, 3])
def test_same_contents_from_loader_processes(size: int) -> None:
    assert equal(on_workers(size, num_epochs=2, num_workers=2), on_workers(1, num_epochs=2))


def read_two_epochs(comm: Communicator, num_workers: int) -> Content:
    with make_loader(comm, num_workers=num_workers) as loader:
        return union([contents(loader), contents(loader)])


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 1])
def test_same_contents_on_ranks_that_are_processes(num_workers: int) -> None:
    parts = run_processes(2, read_two_epochs, num_workers)
    assert equal(union(parts), on_workers(1, num_epochs=2))


def test_same_contents_on_ranks_that_are_threads() -> None:
    parts = run_ranks(3, lambda comm: contents(make_loader(comm)))
    assert equal(union(parts), on_workers(1))


class Shuffling(Augmented):
    """Another order in each epoch, which it draws itself."""

    def set_epoch(self, epoch: int) -> None:
        self.first, self.order = 100 * epoch, torch.randperm(NUM_SAMPLES)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return draw(), self.first + int(self.order[index])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_is_told_the_epoch(num_workers: int) -> None:
    def read(loader: Any, *epochs: int) -> list[Content]:
        with loader:
            found = [contents(loader) for _ in epochs]
        for epoch, content in zip(epochs, found, strict=True):
            seen = samples(content)
            assert seen == list(range(100 * epoch, 100 * epoch + NUM_SAMPLES))
        return found

    whole = read(make_loader(dataset=Shuffling()), 0, 1, 2)
    found = read(loader := make_loader(dataset=Shuffling(), num_workers=num_workers), 0, 1)
    assert all(map(equal, found, whole))
    loader.load_state_dict({"samples": NUM_SAMPLES, "steps": 3})
    assert all(map(equal, read(loader, 1, 2), whole[1:]))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_data_set_within_others_is_told_the_epoch(size: int, num_workers: int) -> None:
    """Also before the samples are read that workers compare."""

    def read(comm: Communicator) -> tuple[Content, ...]:
        part = allstep.data.subset(Shuffling(NUM_SAMPLES), share=0.5, seed=1)
        dataset = ConcatDataset([Subset(Shuffling(NUM_SAMPLES), range(3)), part])
        with make_loader(comm, dataset, num_workers=num_workers) as loader:
            assert loader.first_samples() == loader.first_samples()
            first = contents(loader)
            assert loader.first_samples() == loader.first_samples()
            return first, contents(loader)

    for epoch, parts in enumerate(zip(*run_ranks(size, read), strict=True)):
        seen = samples(union(list(parts)))
        assert len(seen) == 3 + 11
        assert {index // 100 for index in seen} == {epoch}


class Unseeded(Dataset[tuple[Tensor, int]]):
    """Draws from a generator of its own, as if nobody had seeded the sample."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3, generator=self._generator), index


def test_negative_control_without_random_state_of_the_sample() -> None:
    one, three = (on_workers(size, dataset=Unseeded()) for size in (1, 3))
    assert indices(one) == indices(three)
    assert not equal(one, three)


def test_epochs_and_seeds_draw_other_numbers() -> None:
    loader = make_loader(shuffle=False)
    first, second = contents(loader), contents(loader)
    other_seed = contents(make_loader(shuffle=False, seed=6))
    values = [torch.cat([x for x, _ in found.values()]) for found in (first, second, other_seed)]
    assert indices(first) == indices(second)
    assert not (values[0] == values[1]).any()
    assert not (values[0] == values[2]).any()


def test_loader_restores_the_random_state_around_it() -> None:
    with preserved_random_state():
        seed_all(4)
        expected = [draw(), draw()]
        seed_all(4)
        found = [draw()]
        contents(make_loader())
        found.append(draw())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(
    num_steps=st.integers(0, 7),
    size_before=st.integers(1, 4),
    size_after=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_resume_on_another_number_of_workers(
    num_steps: int, size_before: int, size_after: int, drop_last: bool
) -> None:
    reference = on_workers(1, num_epochs=3, drop_last=drop_last)
    loader = make_loader(Seat(size_before - 1, size_before), drop_last=drop_last)
    batches = (batch for _ in range(3) for batch in loader.global_batches())
    for _ in range(num_steps):
        next(batches)
    parts = []
    for rank in range(size_after):
        resumed = make_loader(Seat(rank, size_after), drop_last=drop_last)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.step == num_steps
        while resumed.epoch < 3:
            parts.append(contents(resumed))
    rest = {key: value for key, value in reference.items() if key[0] >= num_steps}
    assert equal(union(parts), rest)


def test_resume_with_another_global_batch() -> None:
    whole = indices(contents(make_loader(global_batch=2)))
    loader = make_loader(global_batch=8)
    next(loader.global_batches())
    smaller = make_loader(global_batch=4)
    smaller.load_state_dict(loader.state_dict())
    assert indices(contents(smaller)) == whole[4:]


def test_position_counts_batches_handed_out_not_read_ahead() -> None:
    with make_loader(num_workers=2, prefetch_factor=4) as loader:
        assert (loader.position, loader.step, loader.epoch) == (0, 0, 0)
        batches = loader.global_batches()
        next(batches)
        assert loader.state_dict() == {"samples": 8, "steps": 1}
        next(batches)
        next(batches)
        assert loader.state_dict() == {"samples": NUM_SAMPLES, "steps": 3}
        assert loader.epoch == 1
        assert next(batches, None) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_may_be_left_and_begun_again(num_workers: int) -> None:
    with make_loader(num_workers=num_workers) as loader:
        found = []
        for batch in loader.global_batches():
            next(batch.micro_batches)  # the other three are thrown away
            break
        found.append(indices(contents(loader)))
        loader.load_state_dict({"samples": 8, "steps": 1})
        found.append(indices(contents(loader)))
    assert found == [indices(on_workers(1))[4:]] * 2


def test_a_batch_of_a_closed_loader_raises() -> None:
    loader = make_loader()
    batch = next(loader.global_batches())
    next(batch.micro_batches)
    loader.close()
    with pytest.raises(UsageError, match=r"closed or set to another position.*global_batches"):
        next(batch.micro_batches)


def test_a_worker_without_micro_batches_gets_an_empty_batch() -> None:
    batch = next(make_loader(Seat(0, 5)).global_batches())
    assert batch.num_local_micro_batches == 0
    assert list(batch.micro_batches) == []
    assert batch.num_samples == 8


TENSORS = TensorDataset(torch.arange(NUM_SAMPLES) * 10, torch.arange(NUM_SAMPLES))


class Singly(Dataset[Any]):
    """Hides that the samples are tensors."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


@pytest.mark.parametrize(
    "dataset", [TENSORS, Subset(TENSORS, [5, 3, 8]), Subset(Subset(TENSORS, range(9)), [4, 2])]
)
def test_tensor_data_sets_give_the_same_as_single_samples(dataset: Dataset[Any]) -> None:
    fast, slow = (
        contents(make_loader(dataset=dataset)),
        contents(make_loader(dataset=Singly(dataset))),
    )
    assert equal(fast, slow)


def test_tensor_data_sets_set_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(allstep.data.fetch, "seed_all", fail)
    assert len(contents(make_loader(dataset=TENSORS))) == 11


def test_collate_fn_is_honoured_for_tensors_too() -> None:
    def collate(samples: list[Any]) -> Any:
        return [-value for value in default_collate(samples)]

    plain = contents(make_loader(dataset=TENSORS))
    negated = contents(make_loader(dataset=TENSORS, collate_fn=collate))
    assert all(torch.equal(-plain[key][0], negated[key][0]) for key in plain)


class Broken(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 13:
            raise FileNotFoundError("photo.jpg")
        return super().__getitem__(index)


def test_an_error_names_the_sample() -> None:
    with pytest.raises(FileNotFoundError, match=r"photo\.jpg") as caught:
        contents(make_loader(dataset=Broken(), shuffle=False))
    assert caught.value.__notes__ == ["while fetching sample 13 of the data set"]


def test_an_error_in_a_process_names_the_sample() -> None:
    with (
        make_loader(dataset=Broken(), shuffle=False, num_workers=2) as loader,
        pytest.raises(FileNotFoundError, match=r"(?s)photo\.jpg.*while fetching sample 13 of"),
    ):
        contents(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_an_error_the_order_is_kept(num_workers: int) -> None:
    with make_loader(dataset=Broken(), shuffle=False, num_workers=num_workers) as loader:
        with pytest.raises(FileNotFoundError):
            contents(loader)
        assert indices(contents(loader)) == [[16, 17], [18, 19], [20, 21]]


@pytest.mark.parametrize("dataset", [Augmented(6), Stream(6)])
def test_numbers_of_numpy_become_pythons(dataset: Dataset[Any]) -> None:
    four, two, five = map(np.int64, (4, 2, 5))
    loader = make_loader(
        Communicator.single_process(), dataset, global_batch=four, micro_batch=two, seed=five
    )
    for batch in loader.global_batches():
        numbers = (batch.num_samples, batch.num_micro_batches, batch.position)
        assert [type(number) for number in numbers] == [int] * 3
        list(batch.micro_batches)
    numbers = [number for number in loader.state_dict().values() if not isinstance(number, list)]
    assert all(type(number) is int for number in numbers)
    assert json.loads(json.dumps(loader.options())) == loader.options()


def test_plain_loop() -> None:
    parts = [list(make_loader(Seat(rank, 2), micro_batch=4, drop_last=True)) for rank in range(2)]
    assert [len(part) for part in parts] == [2, 2]
    seen = torch.cat([y for part in parts for _, y in part]).tolist()
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 16
    assert [len(y) for _, y in make_loader(micro_batch=8)] == [8, 8, 6]


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (1, {}, r"`global_batch` \(=8\) must be 1 workers x `micro_batch` \(=2\) = 2 .*steps"),
        (3, {"micro_batch": 4}, r"\(=8\) must be 3 workers x `micro_batch` \(=4\) = 12"),
        (2, {"micro_batch": 4}, r"may be short.*2 workers.*`allstep\.steps`, or `drop_last=True`"),
    ],
)
def test_plain_loop_refuses_unequal_shares(
    size: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        iter(make_loader(Seat(0, size), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": -1}, r"`num_workers` \(=-1\) must be at least 0"),
        ({"prefetch_factor": 2}, r"`prefetch_factor` \(=2\) needs loader processes.*`num_workers`"),
        ({"prefetch_factor": 0, "num_workers": 1}, r"`prefetch_factor` \(=0\) must be at least 1"),
        ({"multiprocessing_context": "spawn"}, r"`multiprocessing_context` \(='spawn'\) needs"),
        ({"stream": "split"}, r"`stream` \(='split'\): .*`replicated`"),
        ({"seed": 0.5}, r"`seed` \(=0\.5\) must be a whole number"),
        ({"comm": Augmented(4)}, r"`comm` \(a Augmented\) must be a Communicator"),
        ({"dataset": []}, r"`dataset` is empty"),
        ({"dataset": iter([1])}, r"`dataset` \(a list_iterator\) has no `__len__`"),
        ({"shares": None}, r"`shares` \(=None\) must be 'equal', 'measured' or numbers"),
        ({"shares": 3}, r"`shares` \(=3\) must be"),
        ({"shares": ["a"]}, r"`shares` \(=\['a'\]\) must be positive numbers"),
        ({"shares": [True]}, r"`shares` \(=\[True\]\) must be positive numbers"),
        ({"shuffle": "False"}, r"`shuffle` \(='False'\) must be True or False"),
        ({"drop_last": "False"}, r"`drop_last` \(='False'\) must be True or False"),
        ({"pin_memory": "no"}, r"`pin_memory` \(='no'\) must be True or False"),
        ({"collate_fn": 3}, r"`collate_fn` \(=3\) must be a function"),
        ({"collate_fn": [], "dataset": Stream(4)}, r"`collate_fn` \(=\[\]\) must be a function"),
        ({"worker_init_fn": 3, "num_workers": 1}, r"`worker_init_fn` \(=3\) must be a function"),
        ({"global_batch": 9}, r"multiple of `micro_batch` \(=2\); nearest: 8, 10"),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(**changes)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"samples": 1}, r"`state` \(=\{'samples': 1\}\) has no `steps`"),
        ({"samples": -1, "steps": 0}, r'`state\["samples"\]` \(=-1\) must be at least 0'),
        ({"samples": 0.0, "steps": 0}, r'`state\["samples"\]` \(=0\.0\) must be a whole number'),
    ],
)
def test_state_messages(state: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader().load_state_dict(state)


def test_length() -> None:
    assert len(make_loader()) == 3
    assert len(make_loader(drop_last=True)) == 2
    assert len(make_loader(Communicator.single_process(), range(8))) == 1
