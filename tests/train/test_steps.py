"""`steps`: weights, exchange on the last micro-batch, empty shares, replay, wrong turns."""

import copy
import math
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import allstep
from allstep import Communicator
from allstep.data.random import seed_all
from allstep.errors import UsageError
from allstep.nn import Chain, ChainPart
from tests.helpers.generators import thread_generators  # noqa: F401
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


def test_steps_refuse_gradients_of_an_attached_model_that_was_left_out() -> None:
    def train(comm: Communicator) -> None:
        model, other = make_model(), make_model()
        exchange, left_out = allstep.attach(model, comm), allstep.attach(other, comm)
        for batch in allstep.steps(make_loader(comm), exchange):
            other(torch.ones(2, 3).double()).sum().backward()  # outside it is as ever
            for x, y in batch:
                with left_out.no_sync():
                    loss_of(other, x, y).backward()
                words = r"of the Linear got a gradient in the loop .* `steps\(loader, exchange, o"
                with pytest.raises(UsageError, match=words):
                    batch.backward(loss_of(model, x, y) + loss_of(other, x, y))
                return

    run_ranks(2, train)


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
    thread_generators: None,  # noqa: F811
) -> None:
    """Noise that an optimizer draws must not make parameters differ between workers."""

    def draws(comm: Communicator) -> tuple[list[float], list[float]]:
        exchange = allstep.attach(make_model(), comm)
        inside, after = [], []
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


@pytest.mark.parametrize("how", ["attach", "unscale_"])
def test_a_scaler_steps_on_a_worker_without_a_micro_batch(how: str) -> None:
    def train(comm: Communicator) -> tuple[Tensor, float]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        exchange = allstep.attach(model, comm, scaler=scaler if how == "attach" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in allstep.steps(make_loader(comm, global_batch=2), exchange):  # one micro-batch
            for x, y in batch:
                batch.backward(scaler.scale(loss_of(model, x, y)))
            if how == "unscale_":
                exchange.unscale_(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.weight.detach(), scaler.get_scale()

    ((expected, scale),) = run_ranks(1, train)
    for found, found_scale in run_ranks(2, train):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert found_scale == scale > 64


def test_loss_without_the_scale_of_a_scaler() -> None:
    comm = Communicator.single_process()
    found = []
    for scale in (None, 64.0):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        model = make_model()
        exchange = allstep.attach(model, comm)
        batch = next(allstep.steps(make_loader(comm), exchange))
        for x, y in batch:
            batch.backward(loss_of(model, x, y), scaler=scaler)
        assert model.weight.grad is not None
        found.append((batch.global_loss(), model.weight.grad / (scale or 1)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


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


@pytest.mark.parametrize("replay", [False, True])
def test_steps_refuse_a_batch_after_the_next_was_asked_for(replay: bool) -> None:
    """Its micro-batches are gone: a loop that reads ahead would train on nothing."""
    comm = Communicator.single_process()
    exchange = allstep.attach(make_model(), comm)
    ahead = list(allstep.steps(make_loader(comm), exchange, replay=replay))
    for batch in ahead:
        with pytest.raises(UsageError, match=f"Global batch {batch.step} .* reads ahead"):
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
    exchange = allstep.attach(make_model(), comm)
    for given, kinds in (
        ([], "none"),
        ([make_model()], "Linear"),
        ([[exchange]], "list"),
        ([exchange, None], r"\w+Exchange, NoneType"),
    ):
        with pytest.raises(UsageError, match=rf"`exchanges` \({kinds}\): give what `allstep"):
            allstep.steps(make_loader(comm), *given)
    with pytest.raises(UsageError, match=r"DataLoader.*allstep\.data\.loader"):
        allstep.steps(DataLoader(make_set()), allstep.attach(make_model(), comm))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_loss", "words"),
    [
        (lambda loss: loss.item(), r"`loss` \(float \d\.\d+\) must be a tensor of one number"),
        (lambda loss: loss.expand(4), r"`loss` \(Tensor of shape \[4\]\) must be a tensor of one"),
    ],
)
def test_steps_refuse_a_loss_that_is_no_number(
    make_loss: Callable[[Tensor], Any], words: str
) -> None:
    model, batch = first_batch()
    with pytest.raises(UsageError, match=words):
        for x, y in batch:
            batch.backward(make_loss(loss_of(model, x, y)))


def test_steps_refuse_batch_norm_that_is_synchronized_in_each_micro_batch() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(5, 2), nn.SyncBatchNorm(2))
        exchange = allstep.attach(model, comm)
        allstep.steps(make_loader(comm), exchange)

    run_ranks(1, worker)
    with pytest.raises(UsageError, match=r"`1` is a SyncBatchNorm, .* all 2 workers at once"):
        run_ranks(2, worker)


def zero(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor) -> None:
    batch.backward(loss)
    optimizer.zero_grad()


def zero_first(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor
) -> None:
    optimizer.zero_grad()
    batch.backward(loss)


def zero_in_place(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor
) -> None:
    batch.backward(loss)
    model.zero_grad(set_to_none=False)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor) -> None:
    batch.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def plain_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor
) -> None:
    loss.backward()


def step_and_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor
) -> None:
    batch.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def edit(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Tensor) -> None:
    batch.backward(loss)
    with torch.no_grad():
        next(model.parameters()).clamp_(-1, 1)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (zero, r"`weight` was dropped, as by `zero_grad\(\)`, in the loop over global batch 0"),
        (zero_first, r"`weight` was dropped, .* global batch [01]'s"),
        (zero_in_place, r"`weight` was changed, as .*`zero_grad\(set_to_none=False\)`"),
        (clip, r"`weight` was changed, as .* clipping, in the loop"),
        (
            plain_backward,
            r"`weight` was changed, as by `loss\.backward\(\)`.*`batch\.backward\(los",
        ),
        (edit, r"Parameter `weight` was changed in the loop over global batch 0's micro-batches"),
        (step_and_zero, r"`SGD\.step\(\)` was called in the loop over global batch 0's micro-batc"),
    ],
)
def test_habits_of_plain_loops_in_the_inner_loop_are_errors(
    habit: Callable[..., None], words: str, size: int
) -> None:
    """The same ones on one worker, where some would be right by chance, and on several."""

    def worker(comm: Communicator) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = allstep.attach(model, comm)
        for batch in allstep.steps(make_loader(comm), exchange):
            for x, y in batch:
                habit(model, optimizer, batch, loss_of(model, x, y))
            optimizer.step()

    with pytest.raises(UsageError, match=words):
        run_ranks(size, worker, timeout_s=20)


@pytest.mark.parametrize("size", [1, 2])
def test_a_module_that_changes_its_parameter_in_forward_is_an_error(size: int) -> None:
    """It does so for each micro-batch, and then workers have different parameters."""
    samples = TensorDataset(torch.arange(8))

    def worker(comm: Communicator) -> None:
        model = nn.Embedding(8, 3, max_norm=0.1)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                batch.backward(model(x).sum())

    with pytest.raises(UsageError, match=r"Parameter `weight` was changed .*`max_norm`"):
        run_ranks(size, worker, timeout_s=20)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_learning_rate_that_changes_in_the_inner_loop_is_an_error(
    as_tensor: bool, size: int
) -> None:
    """A scheduler that steps with each micro-batch makes fewer steps on more workers."""

    def worker(comm: Communicator) -> None:
        model = make_model()
        rate = torch.tensor(0.1) if as_tensor else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        exchange = allstep.attach(model, comm)
        batches = allstep.steps(make_loader(comm), exchange)
        for batch in islice(batches, 2):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            optimizer.step()
            scheduler.step()
        with pytest.raises(UsageError, match=r"rate of the SGD was .* batch 2's .* Change it when"):
            for x, y in (batch := next(batches)):
                batch.backward(loss_of(model, x, y))
                scheduler.step()

    run_ranks(size, worker, timeout_s=20)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_pass_without_weight_beside_the_weighted_is_an_error(size: int) -> None:
    def worker(comm: Communicator) -> None:
        model = make_model()
        exchange = allstep.attach(model, comm)
        with pytest.raises(UsageError, match=r"`weight` was changed, as by `loss.backward"):
            for batch in allstep.steps(make_loader(comm), exchange):
                for x, y in batch:
                    with exchange.no_sync():
                        model(x).square().mean().backward()  # a penalty
                    batch.backward(loss_of(model, x, y))

    run_ranks(size, worker)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_may_be_changed_where_the_exchange_is_left_to_the_end(size: int) -> None:
    """A micro-batch's gradient is clipped by itself, as in DP-SGD: the same on any workers."""
    limit = 0.3

    def clipped(model: nn.Module) -> list[Tensor]:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return gradients

    def train(comm: Communicator) -> Tensor:
        model = make_model()
        exchange = allstep.attach(model, comm)
        batch = next(allstep.steps(make_loader(comm), exchange))
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in batch:
            batch.backward(loss_of(model, x, y), exchange=False)
            torch._foreach_add_(totals, clipped(model))
            for p, total in zip(model.parameters(), totals, strict=True):
                p.grad = total.clone() if batch.micro_batch.is_last else None
        assert model.weight.grad is not None
        return model.weight.grad

    expected = torch.zeros(2, 3, dtype=torch.float64)
    for x, y in zip(*(part[:8].split(2) for part in make_set().tensors), strict=True):
        model = make_model()
        (loss_of(model, x, y) / 4).backward()
        expected += clipped(model)[0]
    for found in run_ranks(size, train):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 1), (2, 2)])
def test_global_loss_of_a_chain_is_the_same_on_its_workers(
    data: int, model: int, weighs: bool
) -> None:
    """Only those with the last part have a loss."""
    samples = TensorDataset(torch.arange(30.0).view(10, 3) / 30)

    def worker(comm: Communicator) -> list[float]:
        along = min(model, comm.size)
        mesh = comm.mesh(data=comm.size // along, model=along)
        layers = [nn.Linear(3, 2), nn.Linear(2, 1)]
        for layer in layers:
            nn.init.constant_(layer.weight, 0.3)
            nn.init.constant_(layer.bias, 0.1)
        parts = [
            ChainPart("first", layers[0], 0, ("x",), ("hidden",)),
            ChainPart("second", layers[1], mesh["model"].size - 1, ("hidden",), ("y",)),
        ]
        chain = Chain(parts, mesh, inputs=("x",), outputs=("y",))
        exchange = allstep.attach(chain, mesh["data"])
        optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
        loader = allstep.data.loader(samples, mesh["data"], global_batch=4, micro_batch=2, seed=0)
        found = []
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                values, delegate = chain(x=x)
                losses = values["y"].square().sum(1) if "y" in values else torch.zeros(len(x))
                loss = losses.sum() if weighs else losses.mean()
                batch.backward(loss + delegate, weight=len(x) if weighs else None)
            optimizer.step()
            optimizer.zero_grad()
            found.append(batch.global_loss())
        return found

    (expected,) = run_ranks(1, worker)
    for found in run_ranks(data * model, worker):
        assert found == pytest.approx(expected, rel=1e-12)
    assert expected[0] > 0.1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_global_loss_is_that_of_the_whole_batch(size: int) -> None:
    def train(comm: Communicator) -> list[float]:
        model = make_model()
        exchange = allstep.attach(model, comm)
        found = []
        for batch in allstep.steps(make_loader(comm), exchange):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            found.append(batch.global_loss())
        return found

    x, y = make_set().tensors
    expected = [
        loss_of(make_model(), x[start : start + 8], y[start : start + 8]).item()
        for start in range(0, NUM_SAMPLES, 8)
    ]
    for found in run_ranks(size, train):
        assert found == pytest.approx(expected, rel=1e-12)


def test_global_loss_belongs_behind_the_loop_over_the_batch() -> None:
    """Also with one worker: several would wait for each other with unlike numbers of calls."""
    model = make_model()
    comm = Communicator.single_process()
    for batch in allstep.steps(make_loader(comm), allstep.attach(model, comm)):
        for x, y in batch:
            batch.backward(loss_of(model, x, y))
            with pytest.raises(UsageError, match=r"`global_loss` was called in the loop over"):
                batch.global_loss()
        batch.global_loss()


@pytest.mark.parametrize("size", [1, 2])
def test_no_update_after_a_batch_that_was_left(size: int) -> None:
    """The loop over `steps`, left too, would never say that each worker has another gradient."""

    def worker(comm: Communicator) -> bool:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        for batch in allstep.steps(make_loader(comm), allstep.attach(model, comm)):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
                break
            with pytest.raises(UsageError, match=r"SGD.step\(\)` was called after the loop over"):
                optimizer.step()
            break
        is_as_before = torch.equal(model.weight, before)
        optimizer.zero_grad()
        optimizer.step()  # outside of `steps` it may
        return is_as_before

    assert run_ranks(size, worker) == size * [True]


def test_a_loss_may_have_dims() -> None:
    model = make_model()
    exchange = allstep.attach(model, Communicator.single_process())
    found = []
    for batch in allstep.steps(make_loader(exchange.comm, global_batch=NUM_SAMPLES), exchange):
        for x, y in batch:
            batch.backward(loss_of(model, x, y).reshape(1, 1))
        found.append(batch.global_loss())
    assert found == pytest.approx([loss_of(model, *make_set().tensors).item()], rel=1e-12)


class SGLD(torch.optim.SGD):
    """Langevin dynamics: noise in each step; and a third of the weights is drawn anew at times."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=0.1)


def train_with_noise(
    comm: Communicator,
    end: int,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps until `end`, from a state or the start; draws before, in and after the inner loop."""
    model = nn.Sequential(make_model(), nn.Dropout(0.3), nn.Linear(2, 2).double())
    nn.init.constant_(model[2].weight, 0.25)
    nn.init.zeros_(model[2].bias)
    optimizer = SGLD(model.parameters(), lr=0.05, momentum=0.9)
    exchange = allstep.attach(model, comm)
    loader = make_loader(comm, shuffle=True)
    if state is not None:
        for name, part in (("model", model), ("optimizer", optimizer), ("loader", loader)):
            part.load_state_dict(state[name])
    while loader.step < end:
        for batch in allstep.steps(loader, exchange):
            with torch.no_grad():
                model[2].bias.add_(0.1 * torch.rand(2, dtype=torch.float64))
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
            if batch.step == 2:
                with torch.no_grad():
                    model[2].weight.copy_(torch.randn(2, 2, dtype=torch.float64))
            if loader.step == end:
                break
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def test_noise_in_the_update_is_the_same_on_any_number_of_workers_and_on_resume(
    thread_generators: None,  # noqa: F811
) -> None:
    def train(comm: Communicator, end: int = 7, state: Any = None) -> Any:
        return train_with_noise(comm, end, state)

    (expected,) = run_ranks(1, train, seed=1)
    for size in (2, 4):
        for found in run_ranks(size, train, seed=size):
            torch.testing.assert_close(found["model"], expected["model"], rtol=1e-12, atol=1e-13)
    for before, after in ((2, 4), (4, 1)):
        state = run_ranks(before, lambda comm: train(comm, 4), seed=5)[0]
        resumed = run_ranks(after, lambda comm, s=state: train(comm, 7, copy.deepcopy(s)), seed=6)
        for found in resumed:
            torch.testing.assert_close(found["model"], expected["model"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_left_early", [False, True])
def test_steps_give_the_random_states_back(is_left_early: bool) -> None:
    comm = Communicator.single_process()
    model = make_model()
    optimizer = SGLD(model.parameters(), lr=0.1)
    exchange = allstep.attach(model, comm)
    loader = make_loader(comm)

    def numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.random()

    seed_all(4)
    first = [numbers(), numbers()]
    seed_all(4)
    found = [numbers()]
    for batch in allstep.steps(loader, exchange):
        for x, y in batch:
            batch.backward(loss_of(model, x, y))
        optimizer.step()
        if is_left_early:
            break
    found.append(numbers())
    assert found == first


class MovingMean(nn.Module):
    """Takes off a mean of its inputs that each training forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = make_model()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.linear(x - self.mean)
        return y


class LateMean(MovingMean):
    """Begins with it later, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("ones", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.ones.fill_(1)  # always the same
        if self.num_calls > 2:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        y: Tensor = self.linear(x - self.mean * self.ones)
        return y


def test_buffers_that_each_worker_changes_for_itself_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model is another one on other numbers of workers then."""

    def weight(comm: Communicator, model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = allstep.attach(model, comm)
        for batch in allstep.steps(make_loader(comm), exchange):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    def plain() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), make_model())

    for make, kind in ((MovingMean, "MovingMean"), (LateMean, "LateMean"), (plain, None)):
        caplog.clear()
        one, two = (run_ranks(n, lambda comm, make=make: weight(comm, make()))[0] for n in (1, 2))
        assert torch.allclose(one, two, rtol=1e-12) == (kind is None)
        assert caplog.text.count("the buffer") == (kind is not None)
        assert f"the buffer `mean` of a {kind} was changed" in caplog.text or kind is None


def test_workers_of_local_sgd_without_a_micro_batch_are_refused() -> None:
    def worker(comm: Communicator) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = allstep.LocalSGD(sync_every=2)
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
        with pytest.raises(UsageError, match=r"in 1 micro-batches, .* each of the 2 workers takes"):
            allstep.steps(make_loader(comm, global_batch=2), exchange)

    run_ranks(2, worker)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layer_is_unfrozen_while_gradients_of_batches_add_up(size: int) -> None:
    """Its parameters are taken up in the loop, beside gradients that lie in buckets."""

    def found(comm: Communicator) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(make_model(), nn.Linear(2, 2, dtype=torch.float64))
        model[1].requires_grad_(False)
        exchange = allstep.attach(model, comm)
        for batch in allstep.steps(make_loader(comm, global_batch=6, drop_last=True), exchange):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            model[1].requires_grad_(batch.step == 1)
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(make_model(), nn.Linear(2, 2, dtype=torch.float64))
    x, y = make_set().tensors
    for start, is_trained in ((0, False), (6, False), (12, True)):
        model[1].requires_grad_(is_trained)
        loss_of(model, x[start : start + 6], y[start : start + 6]).backward()
    for gradients_of_rank in run_ranks(size, found):
        expected = [p.grad for p in model.parameters()]
        torch.testing.assert_close(gradients_of_rank, expected, rtol=1e-12, atol=1e-14)


def test_a_local_step_that_one_worker_leaves_out() -> None:
    """As a GradScaler does; the worker joins the average before the next batch."""
    policy = allstep.LocalSGD(sync_every=1)

    def weight(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
        for batch in allstep.steps(make_loader(comm, drop_last=True), exchange):
            for x, y in batch:
                batch.backward(loss_of(model, x, y))
            if (batch.step, comm.rank) != (0, 1):
                optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    x, y = make_set().tensors
    model = make_model()
    for step in range(2):
        updated = []
        for rank in range(2):
            own = copy.deepcopy(model)
            start = 8 * step + 4 * rank
            loss_of(own, x[start : start + 4], y[start : start + 4]).backward()
            if (step, rank) != (0, 1):
                torch.optim.SGD(own.parameters(), lr=0.1).step()
            updated.append(own.state_dict())
        model.load_state_dict(
            {name: (updated[0][name] + updated[1][name]) / 2 for name in own.state_dict()}
        )
    for found in run_ranks(2, weight):
        torch.testing.assert_close(found, model.weight.detach(), rtol=1e-12, atol=1e-14)
