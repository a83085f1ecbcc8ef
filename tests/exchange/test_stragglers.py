"""Workers that keep the others waiting are named, and nobody else is."""

import logging
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import allstep
from allstep import Communicator
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.stragglers import COMPUTE_CURE, Stragglers, WorkerTimes
from tests.helpers.ranks import run_ranks

USUAL = WorkerTimes(data_s=0.01, compute_s=0.1, wait_s=0.02, num_micro_batches=2)


def told(times: list[WorkerTimes]) -> Tensor:
    return torch.tensor([own.digits() for own in times])


def said(times_of_step: Callable[[int], list[WorkerTimes]], num_steps: int = 60) -> dict[int, str]:
    """Step -> what was said after it."""
    stragglers = Stragglers()
    words = {step: stragglers.see(told(times_of_step(step))) for step in range(num_steps)}
    return {step: word for step, word in words.items() if word}


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("cause", ["data", "compute"])
def test_a_slow_worker_is_named_once_within_twenty_steps(size: int, cause: str) -> None:
    slow = {"data": USUAL._replace(data_s=0.054), "compute": USUAL._replace(compute_s=0.144)}[cause]
    found = said(lambda step: [*[USUAL] * (size - 1), slow])
    assert len(found) == 1
    ((step, words),) = found.items()
    assert step < 20
    assert words.startswith(f"rank {size - 1} is 1.4x slower than the median: {cause}, ")
    assert ("loader processes" in words) == (cause == "data")
    assert ("what else runs" in words) == (cause == "compute")


def test_no_word_when_all_is_well() -> None:
    """Noise of a tenth, a pause now and then, waits for each other, short steps, one worker."""
    drawn = torch.Generator().manual_seed(1)

    def noisy(step: int) -> list[WorkerTimes]:
        factors = (1 + 0.1 * torch.rand(4, generator=drawn)).tolist()
        times = [USUAL._replace(compute_s=0.1 * factor, wait_s=0.1) for factor in factors]
        if step % 6 == 0:
            times[step % 4] = USUAL._replace(data_s=0.9)
        return times

    assert not said(noisy, 200)
    assert not said(lambda step: [WorkerTimes(0.0, 1e-4), WorkerTimes(0.0, 9e-4)])
    assert not said(lambda step: [WorkerTimes(), WorkerTimes()])
    assert not said(lambda step: [USUAL])


def test_no_word_of_a_worker_that_has_more_to_do() -> None:
    """Of three micro-batches, or of one, that two workers have; but it may be slow with it."""
    two = USUAL._replace(num_micro_batches=2)
    one = WorkerTimes(two.data_s / 2, two.compute_s / 2, 0.1, 1)
    assert not said(lambda step: [two, one])
    assert not said(lambda step: [one, WorkerTimes(data_s=1e-6, wait_s=0.1)])
    assert not said(lambda step: [WorkerTimes(wait_s=0.1), one, WorkerTimes(wait_s=0.1)])
    slow = two._replace(compute_s=0.2)
    assert list(said(lambda step: [slow, one]).values()) == [
        f"rank 0 is 3.8x slower than the median: compute, 200 ms a step, not 50 ({COMPUTE_CURE})"
    ]


def test_another_worker_and_a_relapse_are_new_words() -> None:
    slow = USUAL._replace(compute_s=0.3)
    by_phase = [[slow, USUAL, USUAL], [USUAL, slow, USUAL], [USUAL] * 3, [USUAL, slow, USUAL]]
    found = said(lambda step: by_phase[step // 30], 120)
    assert [words[:6] for words in found.values()] == ["rank 0", "rank 1", "rank 1"]


def test_who_is_slow_stays_known_after_it_was_said() -> None:
    slow = USUAL._replace(compute_s=0.3)
    stragglers = Stragglers()
    known = []
    for step in range(60):
        stragglers.see(told([slow, USUAL, USUAL] if step < 30 else [USUAL] * 3))
        known.append(stragglers.words[:6])
    assert known[:9] == [""] * 9
    assert known[9:30] == ["rank 0"] * 21
    assert known[45:] == [""] * 15


def test_a_busy_machine_is_named_ever_more_rarely() -> None:
    """Now one is slow, now another; the control counts how often that changes."""
    slow = USUAL._replace(compute_s=0.3)

    def times(step: int) -> list[WorkerTimes]:
        return [slow if step // 20 % 3 == rank else USUAL for rank in range(3)]

    found = list(said(times, 1000))
    assert 3 <= len(found) <= 7
    assert 1000 // 20 == 50  # times that another is the slowest
    pauses = [later - step for step, later in pairwise(found)]
    assert all(pause >= 20 * 2**number for number, pause in enumerate(pauses))


def test_looking_at_many_workers_takes_as_many_calls_as_at_few() -> None:
    """Each worker looks at all others' times: a loop over them would take longer than a step."""

    def count_calls(num_workers: int) -> int:
        times, stragglers, events = told([USUAL] * num_workers), Stragglers(), []
        profile = sys.getprofile()
        sys.setprofile(lambda _, event, argument: events.append(event))
        try:
            for _ in range(20):
                stragglers.see(times)
        finally:
            sys.setprofile(profile)
        return events.count("call") + events.count("c_call")

    assert count_calls(512) == count_calls(4) > 0


class Rows(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((row,) for row in torch.arange(8.0)[:, None])


@pytest.mark.parametrize(
    ("policy", "options", "cure"),
    [
        (allstep.Synchronous(), {}, 'try `shares="measured"`'),
        (
            allstep.Synchronous(),
            {"dataset": Rows()},
            "try `shares`, such as [3, 1]",
        ),
        (allstep.Synchronous(), {"shares": "measured"}, COMPUTE_CURE),
        (allstep.Synchronous(), {"shares": [2, 1]}, COMPUTE_CURE),
        (allstep.Synchronous(), {"micro_batch": 4}, COMPUTE_CURE),  # one for each worker
        (allstep.LocalSGD(sync_every=2), {}, COMPUTE_CURE),
    ],
)
def test_shares_are_a_cure_only_where_they_can_be_set(
    policy: allstep.ExchangePolicy, options: dict[str, Any], cure: str
) -> None:
    samples = TensorDataset(torch.arange(8.0)[:, None])
    given = {"dataset": samples, "global_batch": 8, "micro_batch": 2} | options

    def run(comm: Communicator) -> str:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
        for batch in allstep.steps(allstep.data.loader(comm=comm, **given), exchange):
            for (x,) in batch:
                batch.backward(model(x).square().mean())
            optimizer.step()
        return exchange.stragglers.compute_cure

    assert run_ranks(2, run) == [cure] * 2


@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("kind", ["", "plain", "fp16", "stale"])
def test_times_ride_behind_the_gradients(
    kind: str, is_read_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every worker learns all others' times, and rank 0 says who is slow; by a clock handed in."""
    policy: allstep.ExchangePolicy = {
        "": allstep.Synchronous(),
        "plain": allstep.Synchronous(plain=True),
        "fp16": allstep.Synchronous(compression="fp16"),
        "stale": allstep.Stale(steps=1),
    }[kind]
    samples = TensorDataset(torch.randn(96, 3, generator=torch.Generator().manual_seed(2)))

    def run(comm: Communicator) -> list[WorkerTimes]:
        now_s = [0.0]
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        exchange = (
            OverlappedExchange(model, comm, policy, is_read_late=True)
            if is_read_late and kind != "plain"
            else allstep.attach(model, comm, policy)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = allstep.data.loader(samples, comm, global_batch=6, micro_batch=1)
        for batch in allstep.steps(loader, exchange, clock=lambda: now_s[0]):
            for (x,) in batch:
                now_s[0] += 0.5 if comm.rank == 2 else 0.125
                batch.backward(model(x).square().mean())
            if exchange.has_gradients:
                optimizer.step()
            optimizer.zero_grad()
        own = comm.activity.times_s  # the means of equal steps
        assert own == pytest.approx((0.0, 1.0 if comm.rank == 2 else 0.25, 0.0))
        assert comm.activity.straggler.startswith("rank 2 is 4.0x slower than the median: compute")
        return exchange.stragglers.worker_times

    with caplog.at_level(logging.WARNING, "allstep"):
        for times in run_ranks(3, run):
            assert [t.compute_s for t in times] == [0.25, 0.25, 1.0]
            assert [t.num_micro_batches for t in times] == [2, 2, 2]
            assert [t.micro_batch_s for t in times] == [0.125, 0.125, 0.5]
    named = [record.message for record in caplog.records if "slower" in record.message]
    assert len(named) == 1
    assert named[0].startswith("rank 2 is 4.0x slower than the median: compute, 1000 ms a step")
