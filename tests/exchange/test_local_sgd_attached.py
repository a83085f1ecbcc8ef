"""Local SGD through `attach`, against a simulation of the workers in one process."""

import copy
import logging
import time

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange import LocalSGD, Nesterov, attach, make_policy
from tests.exchange.measured import favouring
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks

SIZE, NUM_BATCHES = 3, 9


def simulate(start: nn.Module, batches: Tensor, every: int, after: int) -> list[Tensor]:
    """Every worker's SGD in turn; the mean of gradients first, then of parameters."""
    models = [copy.deepcopy(start) for _ in range(SIZE)]
    for number, of_ranks in enumerate(batches):
        parameters = [list(model.parameters()) for model in models]
        made = [
            torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for model, x in zip(models, of_ranks, strict=True)
        ]
        with torch.no_grad():
            for index in range(len(parameters[0])):
                mean = torch.stack([gradients[index] for gradients in made]).mean(0)
                for rank in range(SIZE):
                    is_local = number >= after
                    parameters[rank][index] -= 0.1 * (made[rank][index] if is_local else mean)
                if number >= after and (number + 1 - after) % every == 0:
                    average = torch.stack([own[index] for own in parameters]).mean(0)
                    for own in parameters:
                        own[index].copy_(average)
    return list(models[0].parameters())


@pytest.mark.parametrize(("every", "after"), [(3, 0), (2, 3), (3, 6)])
def test_local_steps_equal_the_simulation(every: int, after: int) -> None:
    start, batches = mlp(), torch.randn(NUM_BATCHES, SIZE, 4, 5)

    def worker(comm: Communicator) -> tuple[list[Tensor], int]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = LocalSGD(algorithm="ring", sync_every=every, local_after_step=after)
        exchange = attach(model, comm, policy, optimizer=optimizer)
        for of_ranks in batches:
            model(of_ranks[comm.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), exchange.stats().sent_bytes

    expected = simulate(start, batches, every, after)
    exchanged = simulate(start, batches, every, NUM_BATCHES)
    assert not torch.allclose(expected[0], exchanged[0], rtol=1e-3)
    for found, sent_bytes in run_ranks(SIZE, worker):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert bool(sent_bytes) == bool(after)


@pytest.mark.parametrize(
    ("algorithm", "are_equal"), [(None, True), ("ring", True), ("dummy", False)]
)
def test_parameters_are_averaged_by_the_policys_algorithm(algorithm, are_equal) -> None:
    """`dummy` adds nothing up, so with it workers stay apart."""

    def worker(comm: Communicator) -> Tensor:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, comm, LocalSGD(algorithm=algorithm, sync_every=2), optimizer=optimizer)
        for _ in range(2):
            model(torch.full((2, 4), comm.rank + 1.0)).mean().backward()
            optimizer.step()
        return model.weight.detach().clone()

    first, second = run_ranks(2, worker)
    assert torch.equal(first, second) == are_equal


def test_parameters_are_averaged_in_shared_memory_by_default() -> None:
    def worker(comm: Communicator) -> str:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = attach(model, comm, LocalSGD(sync_every=2), optimizer=optimizer)
        assert exchange.averaging is not None
        return exchange.averaging.algorithm_for(4)

    assert run_ranks(2, worker) == ["shared_memory"] * 2
    assert run_ranks(2, worker, local_size=1) == ["native"] * 2


def test_parameters_are_averaged_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, at `attach`, or by the run that wrote the checkpoint."""
    reduce, names = Communicator.all_reduce, []

    def spy(self: Communicator, x: object, *args: object, **kwargs: object) -> object:
        names.append(kwargs.get("algorithm"))
        return reduce(self, x, *args, **kwargs)

    def worker(comm: Communicator) -> None:
        state: dict[str, object] = {}
        for favourite in ("ring", "recursive_doubling"):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            policy = LocalSGD(algorithm=favouring(favourite), sync_every=2)
            exchange = attach(model, comm, policy, optimizer=optimizer)
            if state:
                exchange.load_state_dict(state)
            monkeypatch.setattr(Communicator, "all_reduce", spy)
            for _ in range(2):
                model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
            state = exchange.state_dict()
            comm.barrier()
            monkeypatch.setattr(Communicator, "all_reduce", reduce)
            exchange.detach()

    run_ranks(2, worker)
    assert set(names) == {"ring"}


def test_local_steps_need_their_optimizer() -> None:
    with pytest.raises(UsageError, match=r"`optimizer` \(=None\) must be given.*sync_every` is 4"):
        attach(mlp(), Communicator.single_process(), LocalSGD(sync_every=4))
    with pytest.raises(UsageError, match="exclude each other"):
        make_policy(sync_every=4, staleness=1)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_optimizer_is_refused(size: int) -> None:
    """After its step nobody would take the mean, and workers would go on with different layers."""
    start = mlp()

    def worker(comm: Communicator) -> None:
        model = copy.deepcopy(start)
        first, *others = (
            torch.optim.SGD(x.parameters(), 0.1) for x in model if list(x.parameters())
        )
        attach(model, comm, LocalSGD(sync_every=2), optimizer=first)
        model(torch.ones(2, 5)).square().mean().backward()
        first.step()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(UsageError, match="A SGD that `attach` was not given updates the model"):
            others[0].step()
        assert all(map(torch.equal, model.parameters(), before))

    run_ranks(size, worker)


@pytest.mark.parametrize("name", ["scaler", "optimizer", "policy"])
def test_arguments_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"`{name}` \(=3\) must be an? "):
        attach(mlp(), Communicator.single_process(), **{name: 3})


def test_no_wire_format_without_gradients_that_travel() -> None:
    for outer in (None, Nesterov()):
        with pytest.raises(
            UsageError, match=r"`compression` \(='int8'\) is for gradients.*full precision"
        ):
            LocalSGD(compression="int8", sync_every=4, outer_optimizer=outer)
        LocalSGD(compression="int8", sync_every=4, outer_optimizer=outer, local_after_step=100)


@pytest.mark.parametrize(
    ("wire", "after", "said"),
    [
        ("fp32", 0, "mean over 1 worker, parameters every 4 batches; "),
        ("fp32", 9, "mean over 1 worker for the first 9 batches, then parameters every 4 batch"),
        ("int8", 9, "mean over 1 worker, int8 compression for the first 9 batches, then par"),
    ],
)
def test_says_what_travels_when(
    wire: str, after: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = LocalSGD(compression=wire, sync_every=4, local_after_step=after)
    with caplog.at_level(logging.INFO, "allstep"):
        attach(model, Communicator.single_process(), policy, optimizer=optimizer)
    assert caplog.messages[0].startswith(said)


@pytest.mark.parametrize("outer", [None, Nesterov()])
@pytest.mark.parametrize("frozen_at", [4, 6])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_that_are_frozen_stay_equal(
    outer: Nesterov | None, frozen_at: int, set_to_none: bool
) -> None:
    """At the end of a round of four steps, and in the middle of one.

    Where their gradients are left, as zeros, momentum moves them on, each worker's by its own.
    """
    start, batches = mlp(), torch.randn(NUM_BATCHES, SIZE, 4, 5)

    def worker(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        policy = LocalSGD(sync_every=4, outer_optimizer=outer)
        exchange = attach(model, comm, policy, optimizer=optimizer)
        for step, of_ranks in enumerate(batches):
            if step == frozen_at:
                model[0].requires_grad_(False)
            model(of_ranks[comm.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        exchange.sync_buffers()
        return list(model.parameters())

    first, *others = run_ranks(SIZE, worker, timeout_s=20)
    assert not torch.equal(first[0], next(start.parameters()))
    for other in others:
        for p, q in zip(first, other, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("use", ["state_dict", "copy", "average", "evaluate", "detach"])
@pytest.mark.parametrize("num_steps", [4, 5])
def test_using_parameters_amid_a_round_warns(num_steps: int, use: str) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = attach(model, comm, LocalSGD(sync_every=4), optimizer=optimizer)
        for _ in range(num_steps):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        uses = {
            "state_dict": model.state_dict,
            "copy": lambda: copy.deepcopy(model),
            "average": lambda: AveragedModel(mlp()).update_parameters(model),
            "evaluate": lambda: model.eval()(torch.randn(4, 5)),
            "detach": exchange.detach,
        }
        uses[use]()

    if num_steps == 4:
        run_ranks(2, worker)  # the round has ended: a warning would be an error
    else:
        with pytest.warns(UserWarning, match=r"amid a round of local SGD, .*sync_buffers\(\)`"):
            run_ranks(2, worker)


def test_the_first_timeout_is_not_that_of_later_rounds() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = LocalSGD(sync_every=2, first_timeout_s=4.0)
        exchange = attach(model, comm, policy, optimizer=optimizer)
        for _ in range(2):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        exchange.sync_buffers()
        if comm.rank == 0:
            time.sleep(6)  # evaluates alone
        exchange.sync_buffers()

    run_ranks(2, worker, timeout_s=20)


def test_training_layers_in_turn_loses_nobodys_work() -> None:
    """As a GAN's critic is frozen in the generator's step, and trained again in its own."""

    def worker(comm: Communicator) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = attach(model, comm, LocalSGD(sync_every=4), optimizer=optimizer)
        for step in range(4):
            for number, layer in enumerate(model):
                layer.requires_grad_(number == step % 2)
            exchange.sync_parameters()
            optimizer.zero_grad()
            model[step % 2](torch.full((1, 1), -1.0 * comm.rank)).sum().backward()
            optimizer.step()
        return [p.item() for p in model.parameters()]

    assert run_ranks(3, worker) == [[2.0, 2.0]] * 3  # each layer's two steps, of 0, 1 and 2
