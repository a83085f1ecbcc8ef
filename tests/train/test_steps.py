"""`steps`: weights, exchange on the last micro-batch, empty shares, replay, wrong turns."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import allstep
from allstep import Communicator
from allstep.errors import UsageError
from tests.helpers.generators import ThreadGenerator, thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

NUM_SAMPLES = 22


def make_model() -> nn.Linear:
    model = nn.Linear(3, 2).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    return model


def make_set() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.randn(3, 2, generator=generator, dtype=torch.float64))


def make_loader(comm: Communicator, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "shuffle": False} | changes
    return allstep.data.loader(make_set(), comm, **arguments)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def gradients(comm: Communicator, **changes: Any) -> list[Tensor]:
    """The global gradient at each step of an epoch, without updates."""
    model = make_model()
    exchange = allstep.attach(model, comm)
    found = []
    for batch in allstep.steps(make_loader(comm, **changes), exchange):
        for x, y in batch:
            batch.backward(loss_of(model, x, y))
        assert model.weight.grad is not None
        found.append(model.weight.grad.clone())
        model.zero_grad()
    return found


def whole_batch_gradients() -> list[Tensor]:
    """The closed form: the gradient of the mean over each whole global batch."""
    x, y = make_set().tensors
    found = []
    for start in range(0, NUM_SAMPLES, 8):
        model = make_model()
        loss_of(model, x[start : start + 8], y[start : start + 8]).backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])  # 7 workers share 4 micro-batches: some none
def test_steps_gradient_is_that_of_the_mean_over_the_global_batch(size: int) -> None:
    expected = whole_batch_gradients()
    for found in run_ranks(size, gradients):
        assert len(found) == len(expected) == 3
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_steps_exchange_once_a_step() -> None:
    def count(comm: Communicator) -> int:
        model = make_model()
        exchange = allstep.attach(model, comm)
        for batch in allstep.steps(make_loader(comm), exchange):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
        return exchange.stats().num_exchanges

    assert run_ranks(3, count) == [3, 3, 3]


def test_steps_with_a_loss_without_the_models_parameters() -> None:
    def train(comm: Communicator) -> bool:
        model, other = make_model(), make_model()
        exchange = allstep.attach(model, comm)
        for batch in allstep.steps(make_loader(comm), exchange):
            for x, y in batch:  # rank 1 never touches the attached model
                batch.backward(loss_of(other if comm.rank == 1 else model, x, y))
        return model.weight.grad is not None

    assert all(run_ranks(2, train))


def test_steps_of_several_models() -> None:
    def train(comm: Communicator) -> list[Tensor]:
        first, second = make_model(), make_model()
        exchanges = allstep.attach(first, comm), allstep.attach(second, comm)
        found = []
        for batch in allstep.steps(make_loader(comm), *exchanges):
            for x, y in batch:
                batch.backward(loss_of(first, x, y))
                batch.backward(loss_of(second, x, y))
            assert first.weight.grad is not None
            assert second.weight.grad is not None
            assert torch.equal(first.weight.grad, second.weight.grad)
            found.append(first.weight.grad.clone())
            first.zero_grad()
            second.zero_grad()
        return found

    expected = whole_batch_gradients()
    for found in run_ranks(3, train):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_steps_with_a_critic_frozen_in_every_micro_batch() -> None:
    """Workers have different numbers of them, so nothing may be collective there."""

    start = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    def train(comm: Communicator) -> list[Tensor]:
        generator, critic = copy.deepcopy(start)
        exchanges = [allstep.attach(net, comm) for net in (generator, critic)]
        found = []
        for batch in allstep.steps(make_loader(comm), *exchanges):
            for x, _ in batch:
                fake = generator(x)
                batch.backward((critic(fake.detach()) - critic(x)).mean())
                critic.requires_grad_(False)
                batch.backward(-critic(fake).mean())
                critic.requires_grad_(True)
            for net in (generator, critic):
                found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
                net.zero_grad()
        return found

    (expected,) = run_ranks(1, train)
    assert len(expected) % 4 == 0
    for size in (2, 3):
        for found in run_ranks(size, train):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_steps_random_state_of_a_micro_batch() -> None:
    def draws(seed: int, replay: bool = False) -> list[float]:
        comm = Communicator.single_process()
        exchange = allstep.attach(make_model(), comm)
        found = []
        for batch in allstep.steps(make_loader(comm, seed=seed), exchange, replay=replay):
            for _ in range(2 if replay else 1):
                found += [torch.rand(()).item() for _ in batch]
        return found

    assert draws(1) == draws(1)
    assert len(set(draws(1))) == NUM_SAMPLES // 2
    assert not set(draws(1)) & set(draws(2))
    replayed = draws(1, replay=True)
    assert len(set(replayed)) == NUM_SAMPLES  # a second pass draws other numbers


def test_steps_random_state_of_the_update_is_the_same_on_all_workers(
    thread_generators: type[ThreadGenerator],  # noqa: F811
) -> None:
    """Noise that an optimizer draws must not make parameters differ between workers."""

    def draws(comm: Communicator) -> tuple[list[float], list[float]]:
        exchange = allstep.attach(make_model(), comm)
        inside, after = [], []
        with thread_generators():
            for batch in allstep.steps(make_loader(comm), exchange):
                number = math.nan  # the control: what goes on from the last micro-batch
                for _ in batch:
                    number = torch.rand(()).item()
                inside.append(number)
                after.append(torch.rand(()).item())
        return inside, after

    ((_, expected),) = run_ranks(1, draws)
    assert len(set(expected)) == len(expected) == 3
    for size in (2, 3):
        found = run_ranks(size, draws)
        assert [after for _, after in found] == [expected] * size
        assert len({str(inside) for inside, _ in found}) == size


def test_steps_replay_gives_the_same_data() -> None:
    comm = Communicator.single_process()
    exchange = allstep.attach(make_model(), comm)
    for batch in allstep.steps(make_loader(comm), exchange, replay=True):
        first = [x for x, _ in batch]
        second = [x for x, _ in batch]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_steps_with_a_sum_policy() -> None:
    def train(comm: Communicator) -> Tensor:
        model = make_model()
        exchange = allstep.attach(model, comm, allstep.Synchronous(reduction="sum"))
        batch = next(allstep.steps(make_loader(comm), exchange))
        for x, y in batch:
            batch.backward(loss_of(model, x, y))
        assert model.weight.grad is not None
        return model.weight.grad

    for found in run_ranks(3, train):
        torch.testing.assert_close(found, whole_batch_gradients()[0], rtol=1e-12, atol=1e-14)


def first_batch(**arguments: Any) -> tuple[nn.Linear, Any]:
    comm = Communicator.single_process()
    model = make_model()
    exchange = allstep.attach(model, comm)
    return model, next(allstep.steps(make_loader(comm), exchange, **arguments))


def test_steps_refuse_backward_outside_of_the_loop() -> None:
    model, batch = first_batch()
    with pytest.raises(UsageError, match="inside the loop"):
        batch.backward(model.weight.sum())


def test_steps_refuse_a_second_backward_of_the_last_micro_batch() -> None:
    model, batch = first_batch()
    with pytest.raises(UsageError, match="Add the losses"):
        for x, y in batch:
            batch.backward(loss_of(model, x, y))
            batch.backward(loss_of(model, x, y))


def test_steps_refuse_to_iterate_a_batch_twice() -> None:
    _, batch = first_batch()
    list(batch)
    with pytest.raises(UsageError, match="replay=True"):
        list(batch)


def test_steps_refuse_to_leave_the_inner_loop_early() -> None:
    comm = Communicator.single_process()
    exchange = allstep.attach(make_model(), comm)
    with pytest.raises(UsageError, match="left before its last micro-batch"):
        for batch in allstep.steps(make_loader(comm), exchange):
            for _ in batch:
                break


def test_steps_skipping_whole_batches() -> None:
    comm = Communicator.single_process()
    loader = make_loader(comm)
    assert len(list(allstep.steps(loader, allstep.attach(make_model(), comm)))) == 3
    assert loader.epoch == 1


def test_steps_refuse_wrong_arguments() -> None:
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match="`exchanges` is empty"):
        allstep.steps(make_loader(comm))
    with pytest.raises(UsageError, match=r"DataLoader.*allstep\.data\.loader"):
        allstep.steps(DataLoader(make_set()), allstep.attach(make_model(), comm))  # type: ignore[arg-type]


def test_loss_backward_in_the_loop_is_an_error() -> None:
    """Its gradient would count as often as there are workers."""

    def worker(comm: Communicator) -> None:
        model = make_model()
        exchange = allstep.attach(model, comm)
        loader = make_loader(comm)
        with pytest.raises(UsageError, match=r"call `batch.backward\(loss\)`"):
            for batch in allstep.steps(loader, exchange):
                for x, _ in batch:
                    model(x).sum().backward()

    run_ranks(2, worker)
