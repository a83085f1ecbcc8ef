"""Gradients and training equal those of one process on the whole batch."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.exchange import ExchangePolicy, Synchronous, attach
from allstep.exchange.piggyback import note_size
from tests.exchange.nets import (
    MakeOptimizer,
    assert_same,
    clone,
    differs,
    gradients,
    mlp,
    shard,
    states,
)
from tests.helpers.ranks import run_ranks

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_one_process(size: int, name: str, policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(10, 24, 5)

    def train(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
        optimizer = OPTIMIZERS[name](model)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return states(model)

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        attach(model, comm, policy)
        return train(model, [shard(batch, comm) for batch in batches])

    expected = train(copy.deepcopy(start), list(batches))
    for actual in run_ranks(size, worker):
        assert_same(actual, expected)
    unattached = train(copy.deepcopy(start), [batch[:12] for batch in batches])
    assert differs(unattached, expected, by=1e-3)


def test_mean_of_ranks_in_closed_form(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> Tensor:
        model = nn.Linear(1, 1, bias=False)
        attach(model, comm, policy)
        model(torch.full((1, 1), float(comm.rank))).sum().backward()
        return model.weight.grad

    for gradient in run_ranks(4, worker):
        assert gradient.item() == 1.5  # (size - 1) / 2


def test_sum_of_ranks_also_onto_an_exchanged_gradient() -> None:
    def worker(comm: Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        exchange = attach(model, comm, Synchronous(reduction="sum"))
        seen = []
        for factor in (1, 10):
            model(torch.full((1, 1), factor * float(comm.rank))).sum().backward()
            seen.append(model.weight.grad.item())
        exchange.detach()
        return seen

    for seen in run_ranks(3, worker):
        assert seen == [3.0, 33.0]


def test_uneven_shares_weighted_by_samples(policy: ExchangePolicy) -> None:
    start, batch = mlp(), torch.randn(10, 5)

    def worker(comm: Communicator, weighted: bool) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        attach(model, comm, policy)
        mine = batch.tensor_split([7, 9])[comm.rank]
        weight = comm.size * len(mine) / len(batch) if weighted else 1.0
        (weight * model(mine).square().mean()).backward()
        return gradients(model)

    model = copy.deepcopy(start)
    model(batch).square().mean().backward()
    for actual in run_ranks(3, partial(worker, weighted=True)):
        assert_same(actual, gradients(model))
    assert differs(run_ranks(3, partial(worker, weighted=False))[0], gradients(model), by=1e-3)


class Branches(nn.Module):
    """Uses another set of layers for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 1) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return sum(self.layers[i](x) for i in used)


def test_used_parameters_differ_by_rank_and_step(policy: ExchangePolicy) -> None:
    start, batches = Branches(), torch.randn(4, 3, 8, 5)
    used = [[[0], [0], [0]], [[0], [1, 0], [2]], [[1], [1, 2], [2]], [[0, 1, 2], [0], [1]]]

    def worker(comm: Communicator) -> list[dict[str, Tensor | None]]:
        model = clone(start, comm)
        attach(model, comm, policy)
        seen = []
        for step, batch in enumerate(batches):
            model.zero_grad()
            model(batch[comm.rank], used[step][comm.rank]).square().mean().backward()
            seen.append(gradients(model))
        return seen

    expected = []
    model = copy.deepcopy(start)
    for step, batch in enumerate(batches):
        model.zero_grad()
        losses = [model(batch[r], used[step][r]).square().mean() for r in range(3)]
        (sum(losses) / 3).backward()
        expected.append(gradients(model))
    assert expected[3]["layers.3.weight"] is None  # what no worker used stays as it is
    for actual in run_ranks(3, worker):
        for step in range(4):
            assert_same(actual[step], expected[step])


def test_worker_without_backward_synchronizes(policy: ExchangePolicy) -> None:
    start, batch = mlp(), torch.randn(8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        if comm.rank:
            exchange.synchronize()
        else:
            model(batch).square().mean().backward()
        return gradients(model)

    model = copy.deepcopy(start)
    (model(batch).square().mean() / 3).backward()
    for actual in run_ranks(3, worker):
        assert_same(actual, gradients(model))


def test_gradients_keep_their_layout(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> tuple[bool, Tensor]:
        model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            model.weight.fill_(1.0)
        exchange = attach(model, comm, policy)
        x = torch.ones(2, 2, 4, 4) * (comm.rank + 1)
        with exchange.no_sync():
            if comm.rank == 0:  # the others' gradient is made by the exchange
                model(x).mean().backward()
        exchange.synchronize()
        return (
            model.weight.grad.is_contiguous(memory_format=torch.channels_last),
            model.weight.grad,
        )

    for is_channels_last, gradient in run_ranks(2, worker):
        assert is_channels_last
        torch.testing.assert_close(gradient, torch.full((3, 2, 3, 3), 1 / 6))


def test_clipping_sees_the_global_gradient(policy: ExchangePolicy) -> None:
    start, batch = mlp(), torch.randn(12, 5)

    def clipped(model: nn.Module, part: Tensor) -> dict[str, Tensor | None]:
        model(part).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        return gradients(model)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        attach(model, comm, policy)
        return clipped(model, shard(batch, comm))

    expected = clipped(copy.deepcopy(start), batch)
    for actual in run_ranks(3, worker):
        assert_same(actual, expected)


def test_grad_scaler_without_a_gradient() -> None:
    """What no worker has found is a number of the dtype that torch's scaler wants."""
    model = mlp()
    exchange = attach(model, Communicator.single_process())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    assert torch.get_default_dtype() == torch.float64
    exchange.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0


def test_grad_scaler_skips_the_step_on_all_ranks_if_one_overflows(policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(3, 8, 5)

    def train(model: nn.Module, parts: list[Tensor], overflows: bool) -> dict[str, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scales = []
        for step, part in enumerate(parts):
            optimizer.zero_grad()
            loss = model(part).square().mean()
            if overflows and step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return {**states(model), "scales": torch.tensor(scales)}

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        attach(model, comm, policy)
        return train(model, [shard(batch, comm) for batch in batches], comm.rank == 1)

    expected = train(copy.deepcopy(start), list(batches), True)
    assert expected["scales"].tolist() == [64.0, 32.0, 32.0]
    for actual in run_ranks(2, worker):
        assert_same(actual, expected)


def payload_bytes(model: nn.Module, policy: ExchangePolicy, size: int) -> int:
    """What a ring of two sends for one exchange: gradients, and in buckets the tail."""
    num_parameters = len(list(model.parameters()))
    tail = 0 if policy.plain else 4 * size + note_size(size) + 1 + num_parameters
    return 8 * tail + sum(p.nbytes for p in model.parameters())


def test_shared_weights_are_exchanged_once(policy: ExchangePolicy) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x))

    start, batch = Tied(), torch.randint(0, 6, (8,))

    def worker(comm: Communicator) -> tuple[dict[str, Tensor | None], int]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        model(shard(batch, comm)).square().mean().backward()
        return gradients(model), exchange.stats().sent_bytes

    model = copy.deepcopy(start)
    model(batch).square().mean().backward()
    for actual, sent_bytes in run_ranks(2, worker):
        assert_same(actual, gradients(model))
        assert sent_bytes == payload_bytes(model, policy, 2)


def test_stats_count_exchanges_and_bytes(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, policy)
        assert exchange.stats().num_exchanges == 0
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
        stats = exchange.stats()
        assert stats.num_exchanges == exchange.num_exchanges == 3
        assert stats.sent_bytes == 3 * payload_bytes(model, policy, 2)
        assert stats.collective_s > 0 and stats.exposed_s > 0

    run_ranks(2, worker)


def test_lone_worker_exchanges_nothing(policy: ExchangePolicy) -> None:
    model, batch = mlp(), torch.randn(4, 5)
    expected = copy.deepcopy(model)
    expected(batch).mean().backward()
    exchange = attach(model, Communicator.single_process(), policy)
    model(batch).mean().backward()
    exchange.synchronize()
    exchange.sync_buffers()
    exchange.sync_parameters()
    is_exact = policy.wire_format.name == "exact"  # its rounding is part of its meaning
    assert_same(gradients(model), gradients(expected), rtol=1e-12 if is_exact else 0)
    assert exchange.stats().num_exchanges == (2 if is_exact else 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_autograd_grad_is_each_workers_own(policy: ExchangePolicy, reduction: str) -> None:
    """It adds to no `p.grad`: nothing is exchanged, scaled or set aside."""
    policy = replace(policy, reduction=reduction)

    def worker(comm: Communicator) -> tuple[list[float], list[float], int]:
        model = nn.Linear(2, 1, bias=False)
        exchange = attach(model, comm, policy)
        x = torch.tensor([[1.0, 2.0 + 2 * comm.rank]])
        model(x).sum().backward()
        (own,) = torch.autograd.grad(model(x).sum(), [model.weight])
        model(x).sum().backward()
        return own.tolist()[0], model.weight.grad.tolist()[0], exchange.num_exchanges

    factor = 2.0 if reduction == "sum" else 1.0
    for rank, (own, grad, num_exchanges) in enumerate(run_ranks(2, worker)):
        assert own == [1.0, 2.0 + 2 * rank]
        assert grad == [2 * factor, 6 * factor]
        assert num_exchanges == 2


@pytest.mark.parametrize("algorithm", ["native", "ring", "recursive_doubling", "shared_memory"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_mean_of_half_precision_gradients_is_finite(algorithm: str, plain: bool) -> None:
    """Also where their sum is not."""
    policy = Synchronous(plain=True) if plain else Synchronous(algorithm=algorithm)

    def worker(comm: Communicator) -> list[float]:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float16)
        attach(model, comm, policy)
        x = torch.tensor([[1.0, 1.0 + comm.rank]], dtype=torch.float16)
        (model(x) * 20000).sum().backward()
        return model.weight.grad.tolist()[0]

    assert run_ranks(3, worker) == [[20000.0, 40000.0]] * 3
