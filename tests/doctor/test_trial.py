"""Steps that are timed: without an exchange, and under a policy."""

import os
from dataclasses import replace
from functools import partial
from time import perf_counter, process_time, sleep

import pytest
import torch
from torch import nn

from allstep.comm import Communicator
from allstep.doctor.timing import runnable_s
from allstep.doctor.trial import (
    Training,
    exchange_policy,
    measure_policy,
    measure_workload,
    sleeping_training,
    slowest_step,
    steps_under,
)
from allstep.doctor.workload import (
    TimedStep,
    element_bytes_of,
    make_workload,
    num_elements_of,
    time_step,
)
from allstep.plan import POLICIES, PolicySpec, Workload
from tests.helpers.processes import start_processes
from tests.helpers.ranks import run_ranks

KINDS = (torch.float32, torch.complex128, torch.bfloat16)
ASLEEP = Workload(
    num_params=60,
    forward_s=0.004,
    backward_s=0.008,
    gradients=(10, 20, 30),
    ready=((0.0, 0.0), (1 / 6, 0.25), (0.5, 0.5), (1.0, 1.0)),
)


def small_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, lambda net: net(torch.ones(4, 8)).mean(), optimizer)


def test_gradients_are_noted_in_the_order_of_the_backward_pass():
    training = small_training()
    timed = time_step(
        training.model, lambda: training.loss_of(training.model), training.optimizer.step
    )
    assert sorted(size for size, _ in timed.gradients) == sorted([128, 16, 32, 2])
    assert {size for size, _ in timed.gradients[:2]} == {32, 2}  # the last layer comes first
    ready_s = [seconds for _, seconds in timed.gradients]
    assert ready_s == sorted(ready_s)
    assert ready_s[-1] <= timed.backward_s
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
    assert all(p.grad is None for p in training.model.parameters())


def test_a_workload_is_what_steps_take_without_a_hiccup():
    steps = [
        TimedStep(0.1 * k, 0.2 * k, 0.3 * k, 0.6 * k, [(30, 0.05 * k), (10, 0.2 * k)])
        for k in (1, 2, 9)
    ]
    found = make_workload(steps, 32)
    assert (found.forward_s, found.backward_s, found.optimizer_s) == (0.2, 0.4, 0.6)
    assert found.ready == ((0.0, 0.0), (0.75, 0.25), (1.0, 1.0))
    assert found.gradients == (30, 10)
    assert found.num_samples == 32
    assert found.core_share == pytest.approx(1.0 / torch.get_num_threads())


@pytest.mark.process
def test_workers_that_share_a_core_need_all_of_it():
    """Each of three busy workers of one core uses it for a third of the time."""
    with start_processes(3, shares_of_a_core) as workers:
        for used, needed in workers.results():
            assert used < 0.6
            assert needed > 0.9


def shares_of_a_core(comm):
    """The shares of a second or so in which this worker uses a core, and needs one."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    a = torch.ones(256, 256)
    comm.barrier()
    start_s, used_s, needed_s = perf_counter(), process_time(), runnable_s()
    while perf_counter() < start_s + 1.0:
        a @ a
    seconds = perf_counter() - start_s
    return (process_time() - used_s) / seconds, (runnable_s() - needed_s) / seconds


@pytest.mark.process
def test_a_worker_that_sleeps_needs_no_core():
    """In a process of its own: threads that other tests have left behind would count."""
    with start_processes(1, seconds_of_a_core_in_sleep) as workers:
        assert workers.results()[0] < 0.25


def seconds_of_a_core_in_sleep(comm):
    start_s = runnable_s()
    sleep(0.5)
    return runnable_s() - start_s


def test_small_hiccups_count_and_large_ones_do_not():
    """Every other step takes twice as long, and one a hundred times."""
    factors = [1, 2, 1, 2, 1, 2, 1, 2, 1, 100]
    steps = [TimedStep(0.1 * k, 0.2 * k, 0.3 * k, 0.6 * k, [(30, 0.2 * k)]) for k in factors]
    found = make_workload(steps, 32)
    parts = (found.forward_s, found.backward_s, found.optimizer_s)
    assert parts == pytest.approx((0.15, 0.3, 0.45))


def test_the_last_worker_counts():
    """Rank 1 is slow in its forward pass, rank 0 in its backward pass and its update."""

    def slowest(comm):
        own = [
            TimedStep(1.0, 4.0, 3.0, 5.0, [(8, 3.0), (8, 4.0)]),
            TimedStep(2.0, 2.5, 1.0, 6.0, [(8, 1.0), (8, 2.0)]),
        ]
        return slowest_step(comm, own[comm.rank])

    # By the clock that started with the step: forward ends at 2, gradients are ready at 4 and 5.
    expected = TimedStep(2.0, 3.0, 3.0, 6.0, [(8, 2.0), (8, 3.0)])
    assert run_ranks(2, slowest) == [expected] * 2


def test_steps_without_an_exchange_leave_no_trace():
    def found(comm):
        training = small_training()
        workload = measure_workload(comm, training, num_samples=4, num_steps=3)
        assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
        return workload

    first, second = run_ranks(2, found)
    assert (first.num_params, first.ready) == (128 + 16 + 32 + 2, second.ready)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.name != "DDP"])
def test_every_policy_runs(policy):
    policy = policy.with_choice("ring", None if policy.sync_every > 1 else 64)
    make = partial(sleeping_training, ASLEEP)
    seconds = run_ranks(
        2,
        lambda comm: measure_policy(
            comm, make, policy, num_micro_batches=2, num_repeats=2, seconds=0.01
        ),
    )
    assert seconds[0] == seconds[1]
    assert len(seconds[0]) == 2
    assert min(seconds[0]) >= 2 * ASLEEP.compute_s


def test_nothing_happens_between_repeats():
    """Late gradients would travel while no clock runs."""
    events = []
    comm = Communicator.single_process()
    all_reduce = comm.all_reduce

    def noted(*args):
        events.append("compare")
        return all_reduce(*args)

    comm.all_reduce = noted

    def loss_of(model):
        events.append("step")
        return model(torch.ones(2, 3)).sum()

    model = nn.Linear(3, 2)
    training = Training(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    policy = PolicySpec(name="fp16", compression="fp16", staleness=1, bucket_bytes=64)
    with steps_under(comm, training, policy) as run:
        assert len(run(2, 3)) == 3
    assert events == ["step"] * 6 + ["compare"] * 3


def test_a_policy_of_the_planner_becomes_one_of_the_exchange():
    made = exchange_policy(
        PolicySpec(name="", compression="fp16", staleness=1, algorithm="ring", bucket_bytes=4 << 20)
    )
    assert (made.compression, made.staleness, made.algorithm) == ("fp16", 1, "ring")
    assert (made.bucket_bytes, made.overlap) == (4 << 20, True)
    whole = exchange_policy(PolicySpec(name="", algorithm="ring", bucket_bytes=None))
    assert not whole.overlap
    assert whole.bucket_bytes > 1 << 40


def test_a_lone_worker_needs_no_exchange():
    policy = PolicySpec(name="fp16", compression="fp16", algorithm="ring", bucket_bytes=64)
    make = partial(sleeping_training, ASLEEP)
    seconds = measure_policy(
        Communicator.single_process(), make, policy, num_repeats=1, seconds=0.01
    )
    assert seconds[0] >= ASLEEP.compute_s


def test_a_sleeping_model_has_the_same_gradients():
    model = sleeping_training(ASLEEP).model
    assert [p.numel() for p in model.parameters()] == [30, 20, 10]  # ready first is last here
    evenly = sleeping_training(Workload.from_step(num_params=1000, step_s=0.01)).model
    assert sum(p.numel() for p in evenly.parameters()) == 1000
    assert len(list(evenly.parameters())) == 8


@pytest.mark.parametrize(
    ("element_bytes", "dtype"), [(2, torch.bfloat16), (4, torch.float32), (8, torch.float64)]
)
def test_it_sleeps_in_the_models_own_dtype(element_bytes, dtype):
    asleep = replace(ASLEEP, element_bytes=element_bytes)
    training = sleeping_training(asleep)
    assert {p.dtype for p in training.model.parameters()} == {dtype}
    found = measure_workload(Communicator.single_process(), training, num_samples=1, num_steps=2)
    assert found.element_bytes == element_bytes
    whole = replace(asleep, num_params=1000, gradients=(), ready=((0, 0), (1, 1)))
    sizes = [p.numel() for p in sleeping_training(whole).model.parameters()]
    assert sizes == [125] * 8


def test_a_complex_gradient_is_two_real_ones():
    model = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=dtype) for dtype in KINDS)
    assert [num_elements_of(p) for p in model.parameters()] == [9, 18, 9]
    assert element_bytes_of(model.parameters()) == 8
