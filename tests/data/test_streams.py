"""Streams: the same contents on any number of workers, uneven ends, resume, disagreement."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks  # samples draw from the process's own states
from allstep.data.random import preserved_random_state, seed_all
from allstep.errors import DisagreementError, UsageError
from tests.data.sets import (
    Content,
    SplitStream,
    Stream,
    contents,
    draw,
    equal,
    indices,
    samples,
    union,
)

NUM_SAMPLES = 22


def make_loader(comm: Communicator, dataset: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 5} | changes
    return allstep.data.loader(dataset or Stream(NUM_SAMPLES), comm, **arguments)


def on_workers(size: int, dataset: Any = None, num_epochs: int = 1, **changes: Any) -> Content:
    def read(comm: Communicator) -> Content:
        with make_loader(comm, dataset, **changes) as loader:
            found = union([contents(loader) for _ in range(num_epochs)])
            assert loader.epoch == num_epochs
            return found

    return union(run_ranks(size, read))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_replicated_is_the_same_on_any_number_of_workers(size: int, drop_last: bool) -> None:
    reference = on_workers(1, num_epochs=2, drop_last=drop_last)
    assert equal(on_workers(size, num_epochs=2, drop_last=drop_last), reference)
    assert sum(map(len, indices(reference))) == 2 * (16 if drop_last else NUM_SAMPLES)


@pytest.mark.parametrize("dataset", [Stream(NUM_SAMPLES), SplitStream(NUM_SAMPLES)])
def test_replicated_is_the_same_from_loader_processes(dataset: Stream) -> None:
    lone = Communicator.single_process()
    with make_loader(lone, dataset, num_workers=2) as loader:
        found = union([contents(loader), contents(loader)])
    assert equal(found, on_workers(1, num_epochs=2))


def test_a_stream_cut_like_a_map_style_set() -> None:
    assert indices(on_workers(1)) == [[i, i + 1] for i in range(0, NUM_SAMPLES, 2)]


def test_epochs_draw_other_numbers() -> None:
    found = on_workers(1, num_epochs=2)
    assert not (found[0, 0][0] == found[3, 0][0]).any()


def test_loader_restores_the_random_state_around_it() -> None:
    with preserved_random_state():
        seed_all(4)
        expected = [draw(), draw()]
        seed_all(4)
        found = [draw()]
        contents(make_loader(Communicator.single_process()))
        found.append(draw())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("size", [1, 3])
def test_replicated_resumes_anywhere(num_steps: int, size: int) -> None:
    reference = on_workers(1, num_epochs=2)

    def interrupted(comm: Communicator) -> dict[str, int]:
        loader = make_loader(comm)
        batches = (batch for _ in range(2) for batch in loader.global_batches())
        for _ in range(num_steps):
            next(batches)
        return loader.state_dict()

    state = run_ranks(2, interrupted)[0]
    num_samples = num_steps // 3 * NUM_SAMPLES + min(8 * (num_steps % 3), NUM_SAMPLES)
    assert (state["steps"], state["samples"]) == (num_steps, num_samples)

    def resumed(comm: Communicator) -> Content:
        loader = make_loader(comm)
        loader.load_state_dict(state)
        found: Content = {}
        while loader.epoch < 2:
            found.update(contents(loader))
        return found

    rest = {key: value for key, value in reference.items() if key[0] >= num_steps}
    assert equal(union(run_ranks(size, resumed)), rest)


def test_replicated_resumes_with_another_global_batch() -> None:
    comm = Communicator.single_process()
    loader = make_loader(comm)
    next(loader.global_batches())
    smaller = make_loader(comm, global_batch=4)
    smaller.load_state_dict(loader.state_dict())
    assert indices(contents(smaller)) == [[i, i + 1] for i in range(8, NUM_SAMPLES, 2)]


def test_a_loop_may_be_left_and_begun_again() -> None:
    loader = make_loader(Communicator.single_process())
    for _ in loader.global_batches():
        break
    assert indices(contents(loader)) == [[i, i + 1] for i in range(8, NUM_SAMPLES, 2)]


def uneven(comm: Communicator, lengths: tuple[int, ...], **changes: Any) -> Any:
    stream = Stream(lengths[comm.rank], first=100 * comm.rank)
    arguments = {"global_batch": 2 * 2 * comm.size, "stream": "sharded"} | changes
    return make_loader(comm, stream, **arguments)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((0, 7, 50), [8, 7] + [4] * 10 + [2]),
        ((8, 8), [8, 8]),
        ((1, 0, 0, 0), [1]),
    ],
)
def test_uneven_sharded_streams_end_together(lengths: tuple[int, ...], expected: list[int]) -> None:
    def read(comm: Communicator) -> tuple[Content, list[int]]:
        loader = uneven(comm, lengths)
        sizes, found = [], {}
        for batch in loader.global_batches():
            sizes.append(batch.num_samples)
            for micro in batch.micro_batches:
                found[batch.step, micro.index] = list(micro.data)
        assert loader.epoch == 1
        return found, sizes

    results = run_ranks(len(lengths), read)
    assert [sizes for _, sizes in results] == [expected] * len(lengths)
    seen = samples(union([found for found, _ in results]))
    assert seen == [100 * rank + i for rank, n in enumerate(lengths) for i in range(n)]


def test_uneven_sharded_streams_in_training() -> None:
    """Through `steps`: the gradient is the mean over whatever samples there were."""

    def train(comm: Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False).double()
        exchange = allstep.attach(model, comm)
        own = Stream((3, 0, 9)[comm.rank], first=10 * comm.rank)
        loader = make_loader(comm, own, global_batch=6, stream="sharded")
        found = []
        for batch in allstep.steps(loader, exchange):
            for _, numbers in batch:
                batch.backward(model(numbers.double()[:, None]).mean())
            assert model.weight.grad is not None
            found.append(float(model.weight.grad))
            model.zero_grad()
        return found

    # Two samples of each worker a step: (0, 1 | 20, 21), (2 | 22, 23), (24, 25), (26, 27), (28)
    expected = [42 / 4, 47 / 3, 49 / 2, 53 / 2, 28.0]
    for found in run_ranks(3, train):
        assert found == pytest.approx(expected)


def test_sharded_streams_repeat_and_drop() -> None:
    seen = on_workers(2, num_epochs=2, stream="sharded")
    assert samples(seen) == sorted(4 * list(range(NUM_SAMPLES)))
    # each worker has five whole shares of 4 and a rest of 2
    dropped = on_workers(2, stream="sharded", drop_last=True)
    assert sum(map(len, indices(dropped))) == 2 * 20


def test_a_shard_draws_its_own_numbers() -> None:
    found = on_workers(2, stream="sharded")
    assert indices(found)[0] == found[0, 2][1].tolist()  # the same stream on both
    assert not (found[0, 0][0] == found[0, 2][0]).any()


@pytest.mark.parametrize("drop_last", [False, True])
def test_sharded_stream_that_splits_itself_among_processes(drop_last: bool) -> None:
    lone = Communicator.single_process()
    changes = {"stream": "sharded", "num_workers": 2, "drop_last": drop_last}
    with make_loader(lone, SplitStream(27), **changes) as loader:
        seen = samples(contents(loader))
    # 14 and 13 samples, in shares of 8: the rests are dropped if asked for
    assert seen == (list(range(16)) if drop_last else list(range(27)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_sharded_resumes_within_an_epoch(num_steps: int, num_workers: int) -> None:
    lone = Communicator.single_process()

    def make() -> Any:
        stream = Skewed(30) if num_workers else Stream(30)
        return make_loader(lone, stream, stream="sharded", num_workers=num_workers)

    with make() as loader:
        reference = contents(loader)
    with make() as loader:
        batches = loader.global_batches()
        for _ in range(num_steps):
            next(batches)
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        rest = contents(loader)
    assert equal(rest, {key: value for key, value in reference.items() if key[0] >= num_steps})


class Skewed(SplitStream):
    """The first loader process has 3 samples, the second all others."""

    def __iter__(self) -> Any:
        samples = list(super().__iter__())
        first = samples[0][1] == 0
        return iter(samples[:3] if first else samples)


class Epochs(IterableDataset[int]):
    """A stream that shuffles itself when it is told the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(0.0, self.epoch)] * 2)


def test_a_stream_is_told_the_epoch() -> None:
    assert indices(on_workers(1, Epochs(), num_epochs=2)) == [[0, 0], [1, 1]]


class DrawsAtTheStart(Stream):
    """Draws when its iterator is made, before the first sample."""

    def __iter__(self) -> Any:
        offset = int(torch.randint(1000, ()))
        return iter([(0.0, offset + i) for i in range(4)])


def test_what_is_drawn_at_the_start_is_the_same() -> None:
    assert equal(on_workers(1, DrawsAtTheStart(4)), on_workers(3, DrawsAtTheStart(4)))


def noisy(samples: list[Any]) -> list[Tensor]:
    """Draws for the micro-batch as a whole, as one that masks words does."""
    return [draw(), default_collate(samples)[1]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_collate_function_draws_is_the_same(num_workers: int) -> None:
    reference = on_workers(1, num_epochs=2, collate_fn=noisy)
    found = on_workers(3, num_epochs=2, collate_fn=noisy, num_workers=num_workers)
    assert equal(found, reference)
    drawn = [tuple(numbers.tolist()) for numbers, _ in reference.values()]
    assert len(set(drawn)) == len(drawn)


def test_replicated_streams_of_other_samples() -> None:
    """As where each worker reads its part, and `stream="sharded"` was forgotten."""

    def read(comm: Communicator) -> None:
        contents(make_loader(comm, Stream(8, first=comm.rank)))

    message = r"`first sample of global batch 0` is content \w+ on rank 0; content \w+ on rank 1\."
    with pytest.raises(DisagreementError, match=message):
        run_ranks(2, read)


def test_replicated_streams_that_differ() -> None:
    def read(comm: Communicator) -> None:
        contents(make_loader(comm, Stream(20 + comm.rank)))

    message = r"`samples of global batch 2` is 4 on rank 0; 5 on rank 1\..*stream=\"sharded\""
    with pytest.raises(DisagreementError, match=message):
        run_ranks(2, read)


class Broken(Stream):
    def __iter__(self) -> Any:
        yield draw(), 0
        raise OSError("connection lost")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_place(num_workers: int) -> None:
    with (
        make_loader(Communicator.single_process(), Broken(9), num_workers=num_workers) as loader,
        pytest.raises(OSError, match="connection lost") as caught,
    ):
        contents(loader)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "while reading sample 1 of the stream" in told


class Pinnable:
    """Notes that its memory was pinned, as a tensor's would be where there is a GPU."""

    is_pinned = False

    def pin_memory(self) -> "Pinnable":
        self.is_pinned = True
        return self


@pytest.mark.parametrize("stream", ["replicated", "sharded"])
def test_pin_memory_reaches_the_micro_batches_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")
    )
    loader = make_loader(
        Communicator.single_process(),
        pin_memory=True,
        stream=stream,
        collate_fn=lambda _: Pinnable(),
    )
    batch = next(loader.global_batches())
    assert [micro.data.is_pinned for micro in batch.micro_batches] == [True] * 4


class ReadOnce(Stream):
    """Keeps its iterator, as one over a file that is open."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self._own = super().__iter__()

    def __iter__(self) -> Any:
        return self._own


@pytest.mark.parametrize("stream", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("kind", "num_samples", "drop_last", "message"),
    [
        (Stream, 0, False, r"`dataset` \(a Stream\) gave 0 samples in epoch 0.*begin anew"),
        (Stream, 7, True, r"no global batch of 32 \(`drop_last` leaves out a short one\)"),
        (ReadOnce, 4, False, r"\(a ReadOnce\) gave 0 samples in epoch 1"),
    ],
)
def test_an_epoch_without_a_step(
    kind: type[Stream], num_samples: int, drop_last: bool, message: str, stream: str
) -> None:
    def read(comm: Communicator) -> str:
        changes: dict[str, Any] = {"stream": stream, "global_batch": 32, "drop_last": drop_last}
        loader = make_loader(comm, kind(num_samples), **changes)
        with pytest.raises(UsageError) as caught:
            while loader.epoch < 2:
                contents(loader)
        return str(caught.value)

    for told in run_ranks(2, read):
        assert re.search(message, told)


def test_a_resumed_epoch_may_have_no_step_left() -> None:
    loader = make_loader(Communicator.single_process(), global_batch=NUM_SAMPLES + 2)
    next(loader.global_batches())
    again = make_loader(Communicator.single_process(), global_batch=8)
    again.load_state_dict(loader.state_dict())
    assert contents(again) == {}
    assert again.epoch == 1


def test_plain_loop() -> None:
    def read(comm: Communicator) -> list[int]:
        return [len(y) for _, y in make_loader(comm, micro_batch=4, drop_last=True)]

    assert run_ranks(2, read) == [[4, 4], [4, 4]]
    assert [len(y) for _, y in make_loader(Communicator.single_process(), micro_batch=8)] == [
        8,
        8,
        6,
    ]
    with pytest.raises(UsageError, match=r"may be short.*2 workers"):
        run_ranks(2, lambda comm: iter(make_loader(comm, micro_batch=4)))


def test_messages() -> None:
    lone = Communicator.single_process()
    with pytest.raises(UsageError, match=r"`shuffle` \(=True\) needs a map-style.*in.* the stream"):
        make_loader(lone, shuffle=True)
    with pytest.raises(TypeError, match="has no len"):
        len(make_loader(lone))
    with pytest.raises(UsageError, match=r"`state` .* has no `epoch`"):
        make_loader(lone).load_state_dict({"samples": 0, "steps": 0})
    with pytest.raises(
        UsageError, match=r"\(=4\) has 2 micro-batches for 3 workers.*use 6 or more"
    ):
        run_ranks(3, lambda comm: uneven(comm, (9, 9, 9), global_batch=4))


def test_sharded_state_of_other_workers() -> None:
    lone = Communicator.single_process()
    loader = make_loader(lone, stream="sharded")
    next(loader.global_batches())
    state = loader.state_dict()
    other_batch = make_loader(lone, stream="sharded", global_batch=4)
    with pytest.raises(UsageError, match=r'`state\["global_batch"\]` \(=8\) must be 4 to go on'):
        other_batch.load_state_dict(state)
    with pytest.raises(UsageError, match=r'`state\["workers"\]` \(=2\) must be 1 to go on within'):
        loader.load_state_dict(state | {"workers": 2})
    loader.load_state_dict(state | {"workers": 2, "epoch_steps": 0, "epoch_samples": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": 2}, r'`state\["num_workers"\]` \(=1\) must be 2 to go on'),
        ({"micro_batch": 2}, r'`state\["shares"\]` \(=\[4, 8\]\) must be \[6, 6\] to go on'),
        ({"shares": [2, 1]}, r'`state\["shares"\]` \(=\[4, 8\]\) must be \[8, 4\] to go on'),
        ({"stream": "replicated"}, r'`state\["shares"\]` \(=\[4, 8\]\) must be \[\] to go on'),
    ],
)
def test_a_shard_is_read_on_as_it_was_read(change: dict[str, Any], message: str) -> None:
    """Else samples would be read twice, and others not at all."""

    def interrupted(comm: Communicator) -> tuple[Any, Any]:
        arguments = {"stream": "sharded", "global_batch": 12, "micro_batch": 4}
        loader = make_loader(comm, SplitStream(40), **arguments)
        next(loader.global_batches())
        other = make_loader(comm, SplitStream(40), **arguments | change)
        with pytest.raises(UsageError, match=message):
            other.load_state_dict(loader.state_dict())
        other.load_state_dict(loader.state_dict() | {"epoch_steps": 0, "epoch_samples": 0})
        return other.state_dict()["epoch"], len(other.state_dict()["shares"])

    is_sharded = "stream" not in change
    assert run_ranks(2, interrupted) == [(0, 2 * is_sharded)] * 2


class OwnRandomNumbers(IterableDataset[int]):
    """Shuffled by the seed that torch gives a loader process."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        generator = torch.Generator().manual_seed(info.seed)
        return iter(torch.randperm(24, generator=generator).tolist())


def test_loader_processes_have_other_seeds_in_each_epoch_and_worker() -> None:
    def read(comm: Communicator, epochs: range = range(2)) -> list[list[int]]:
        dataset, batch = OwnRandomNumbers(), 24 * comm.size
        with make_loader(
            comm, dataset, stream="sharded", global_batch=batch, num_workers=1
        ) as loader:
            loader.load_state_dict(loader.state_dict() | {"epoch": epochs.start})
            return [
                [
                    x
                    for batch in loader.global_batches()
                    for m in batch.micro_batches
                    for x in m.data
                ]
                for _ in epochs
            ]

    found = run_ranks(2, read)
    orders = [tuple(map(int, order)) for of_worker in found for order in of_worker]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert run_ranks(2, lambda comm: read(comm, range(1, 2))) == [order[1:] for order in found]
