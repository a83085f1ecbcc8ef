"""Exact sums, late gradients, weights and shares together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, LocalSGD, Stale, Synchronous, UsageError
from allstep.train import Task, TrainOptions, fit
from tests.helpers.ranks import run_ranks

SPIKE = 20  # the step whose gradient leaves the grid


def new_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))
    return model


def samples(num: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 3, generator=drawn), torch.randn(num, 1, generator=drawn))


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    x, y = data
    return (model(x) - y).square().mean()


def late_gradients(
    *, num_steps: int = 40, saves: bool = False, scaled: bool = False
) -> Callable[[Communicator], list[Tensor]]:
    """Of exact sums that come a step late, one of which leaves the grid."""

    def worker(comm: Communicator) -> list[Tensor]:
        model = new_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        policy = Stale(steps=1, compression="exact")
        exchange = allstep.attach(model, comm, policy, scaler=scaler if scaled else None)
        loader = allstep.data.loader(
            samples(4 * num_steps), comm, global_batch=4, micro_batch=1, shuffle=False
        )
        found = []
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                factor = 3000.0 if batch.step == SPIKE else 1.0
                batch.backward(scaler.scale(factor * squared_error(model, data)))
            if saves and batch.step == SPIKE:
                exchange.state_dict()
            if exchange.has_gradients:
                assert model.weight.grad is not None
                found.append(model.weight.grad / (scaler.get_scale() if scaled else 1.0))
            if scaled and batch.step == SPIKE:
                scaler.update(8.0)
            model.zero_grad()
        return found

    return worker


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_checkpoint_leaves_late_exact_gradients_as_they_are() -> None:
    expected = run_ranks(2, late_gradients())[0]
    assert_equal(run_ranks(2, late_gradients(saves=True))[0], expected)


def test_late_exact_gradients_follow_the_scale_also_off_the_grid() -> None:
    expected = run_ranks(2, late_gradients(num_steps=SPIKE + 4))[0]
    found = run_ranks(2, late_gradients(num_steps=SPIKE + 4, scaled=True))[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_measured_shares_wait_for_late_gradients() -> None:
    def worker(comm: Communicator) -> int:
        model = new_model()
        exchange = allstep.attach(model, comm, Stale(steps=1))
        loader = allstep.data.loader(
            samples(64), comm, global_batch=4, micro_batch=1, shares="measured"
        )
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                batch.backward(squared_error(model, data))
            model.zero_grad()
        return loader.step

    assert run_ranks(2, worker) == [16, 16]


def test_a_cut_that_moves_after_a_short_batch_loses_no_sample() -> None:
    def worker(comm: Communicator) -> list[list[float]]:
        dataset = TensorDataset(torch.arange(29.0))
        loader = allstep.data.loader(
            dataset, comm, global_batch=4, micro_batch=1, shuffle=False, shares="measured"
        )
        seen = []
        for _ in range(2):
            for batch in loader.global_batches():
                seen.append([float(x) for micro in batch.micro_batches for x in micro.data[0]])
                if batch.step in range(1, 8):  # the seventh report follows the short batch
                    loader.follow_shares([0.1, 0.3])
        return seen

    found = run_ranks(2, worker)
    whole = [sorted(a + b) for a, b in zip(*found, strict=True)]
    epoch = [list(map(float, range(k, min(k + 4, 29)))) for k in range(0, 29, 4)]
    assert whole == 2 * epoch
    assert [len(a) for a in found[0]][-3:-1] == [3, 3]  # it has moved


def test_fit_with_a_worker_that_has_no_micro_batch(tmp_path) -> None:
    def worker(comm: Communicator) -> int:
        task = Task(
            model=new_model(),
            train_set=samples(16),
            test_set=samples(16),
            loss=squared_error,
            metrics=lambda model, data: {"error": (squared_error(model, data), 1)},
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        options = TrainOptions(epochs=1, global_batch=4, micro_batch=2, shares="10,1")
        return fit(task, options, comm, tmp_path).num_steps

    assert run_ranks(2, worker) == [4, 4]


def test_a_batch_that_was_left_leaves_no_weights_behind() -> None:
    def worker(comm: Communicator) -> Tensor:
        model = new_model()
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(samples(8), comm, global_batch=4, micro_batch=2)

        def leave() -> None:
            for batch in allstep.steps(loader, exchange):
                for data in batch:
                    batch.backward(squared_error(model, data) * 5, weight=5)
                    return

        if comm.size == 1:
            leave()
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    torch.testing.assert_close(run_ranks(1, worker)[0], torch.ones(1, 3))


def test_uneven_shares_are_refused_where_batch_norm_needs_one_micro_batch_each() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = allstep.nn.convert_batch_norm(
            model, comm, group_size=4, micro_batch=2, global_batch=4
        )
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(samples(8), comm, global_batch=4, micro_batch=2, shares=[3, 1])
        with pytest.raises(UsageError, match=r"`shares` .* don't leave each worker one"):
            allstep.steps(loader, exchange)

    run_ranks(2, worker)


def test_local_steps_of_exact_sums_refuse_weights_with_batch_norm() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = LocalSGD(sync_every=2, compression="exact")
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
        loader = allstep.data.loader(samples(8), comm, global_batch=8, micro_batch=4)
        with pytest.raises(UsageError, match="in the local steps of `LocalSGD"):
            for batch in allstep.steps(loader, exchange):
                for data in batch:
                    batch.backward(squared_error(model, data), weight=4)

    run_ranks(2, worker)


def test_a_schedule_of_another_models_optimizer_is_none_of_a_batchs_business() -> None:
    def worker(comm: Communicator) -> None:
        other, model = new_model(), new_model()
        before = allstep.attach(other, comm, Synchronous())
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        before.detach()
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(samples(8), comm, global_batch=4, micro_batch=2)
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                optimizer.param_groups[0]["lr"] *= 0.5
                batch.backward(squared_error(model, data))
            model.zero_grad()

    run_ranks(2, worker)
