"""Steps timed without an exchange on all workers, under a policy, and asleep."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from allstep.comm import Communicator
from allstep.doctor.trial import (
    Training,
    exchange_policy,
    forward_share,
    measure_policy,
    measure_workload,
    sleeping_training,
    slowest_step,
    steps_under,
)
from allstep.doctor.workload import (
    TimedStep,
)
from allstep.plan import POLICIES, PolicySpec, Workload
from tests.doctor.trainings import small_training
from tests.helpers.ranks import run_ranks

ASLEEP = Workload(
    num_params=60,
    forward_s=0.004,
    backward_s=0.008,
    gradients=(10, 20, 30),
    ready=((0.0, 0.0), (1 / 6, 0.25), (0.5, 0.5), (1.0, 1.0)),
)


def test_slowest_step_takes_the_last_worker_at_each_point():
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


def test_forward_share_is_of_the_layers_and_leaves_no_hooks():
    training = small_training()
    assert forward_share(training, []) == 0
    assert 0 < forward_share(training, [training.model]) <= 1
    for module in training.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_measure_workload_leaves_no_hooks():
    def found(comm):
        training = small_training()
        workload = measure_workload(comm, training, num_samples=4, num_steps=3)
        assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
        return workload

    first, second = run_ranks(2, found)
    assert (first.num_params, first.ready) == (128 + 16 + 32 + 2, second.ready)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.name != "DDP"])
def test_measure_policy_runs_every_policy(policy):
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


def test_steps_under_does_nothing_between_repeats():
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


def test_exchange_policy_of_a_policy_spec():
    made = exchange_policy(
        PolicySpec(name="", compression="fp16", staleness=1, algorithm="ring", bucket_bytes=4 << 20)
    )
    assert (made.compression, made.staleness, made.algorithm) == ("fp16", 1, "ring")
    assert (made.bucket_bytes, made.overlap) == (4 << 20, True)
    whole = exchange_policy(PolicySpec(name="", algorithm="ring", bucket_bytes=None))
    assert not whole.overlap
    assert whole.bucket_bytes > 1 << 40


def test_measure_policy_on_a_single_worker():
    policy = PolicySpec(name="fp16", compression="fp16", algorithm="ring", bucket_bytes=64)
    make = partial(sleeping_training, ASLEEP)
    seconds = measure_policy(
        Communicator.single_process(), make, policy, num_repeats=1, seconds=0.01
    )
    assert seconds[0] >= ASLEEP.compute_s


def test_sleeping_training_has_the_workloads_gradients():
    model = sleeping_training(ASLEEP).model
    assert [p.numel() for p in model.parameters()] == [30, 20, 10]  # ready first is last here
    evenly = sleeping_training(Workload.from_step(num_params=1000, step_s=0.01)).model
    assert sum(p.numel() for p in evenly.parameters()) == 1000
    assert len(list(evenly.parameters())) == 8


@pytest.mark.parametrize(
    ("element_bytes", "dtype"), [(2, torch.bfloat16), (4, torch.float32), (8, torch.float64)]
)
def test_sleeping_training_has_the_workloads_dtype(element_bytes, dtype):
    asleep = replace(ASLEEP, element_bytes=element_bytes)
    training = sleeping_training(asleep)
    assert {p.dtype for p in training.model.parameters()} == {dtype}
    found = measure_workload(Communicator.single_process(), training, num_samples=1, num_steps=2)
    assert found.element_bytes == element_bytes
    whole = replace(asleep, num_params=1000, gradients=(), ready=((0, 0), (1, 1)))
    sizes = [p.numel() for p in sleeping_training(whole).model.parameters()]
    assert sizes == [125] * 8
