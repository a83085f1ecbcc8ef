"""One worker's step: its parts, its gradients, and the cores that it needs."""

import os
from time import perf_counter, process_time, sleep

import pytest
import torch
from torch import nn

from allstep.doctor.timing import runnable_s
from allstep.doctor.workload import (
    TimedStep,
    element_bytes_of,
    make_workload,
    num_elements_of,
    time_step,
)
from tests.doctor.trainings import small_training
from tests.helpers.processes import start_processes

KINDS = (torch.float32, torch.complex128, torch.bfloat16)


def test_time_step_notes_gradients_in_backward_order():
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


def test_make_workload_leaves_out_a_slow_step():
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
def test_runnable_s_of_workers_that_share_a_core():
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
def test_runnable_s_of_a_worker_that_sleeps():
    """In a process of its own: threads that other tests have left behind would count."""
    with start_processes(1, least_share_of_a_core_in_sleep) as workers:
        assert workers.results()[0] < 0.5


def least_share_of_a_core_in_sleep(comm):
    """Over many sleeps: on a busy machine one that is over may wait for a core."""
    shares = []
    for _ in range(40):
        start_s, needed_s = perf_counter(), runnable_s()
        sleep(0.05)
        shares.append((runnable_s() - needed_s) / (perf_counter() - start_s))
    return min(shares)


def test_make_workload_counts_small_delays_only():
    """Every other step takes twice as long, and one a hundred times."""
    factors = [1, 2, 1, 2, 1, 2, 1, 2, 1, 100]
    steps = [TimedStep(0.1 * k, 0.2 * k, 0.3 * k, 0.6 * k, [(30, 0.2 * k)]) for k in factors]
    found = make_workload(steps, 32)
    parts = (found.forward_s, found.backward_s, found.optimizer_s)
    assert parts == pytest.approx((0.15, 0.3, 0.45))


def test_num_elements_of_a_complex_gradient():
    model = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=dtype) for dtype in KINDS)
    assert [num_elements_of(p) for p in model.parameters()] == [9, 18, 9]
    assert element_bytes_of(model.parameters()) == 8
