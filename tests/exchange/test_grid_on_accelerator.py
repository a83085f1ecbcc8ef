"""Exact sums where the device decides what fits the grid: the bits of the CPU, where the host does.

CPU tensors are taken for an accelerator's, as in `test_streams`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, device
from allstep.exchange import Stale, Synchronous, attach
from allstep.exchange.exact_sums import ExactSums
from allstep.nn import MixtureOfExperts
from tests.exchange.test_grid import EXACT, noise, sums_of, train
from tests.helpers.ranks import run_ranks
from tests.helpers.streams import StreamsAsNames


def on_accelerators(size: int, worker: Callable[[Communicator], Any]) -> list[Any]:
    driver = StreamsAsNames()

    def run(comm: Communicator) -> Any:
        with driver.rank(lints=True):
            return worker(comm)

    with device.using_driver(driver):
        return run_ranks(size, run)


def assert_same_on_accelerators(worker: Callable[[Communicator], list[Tensor]]) -> None:
    alone = worker(Communicator.single_process())
    for size in (1, 2, 3):
        for found in on_accelerators(size, worker):
            for x, y in zip(found, alone, strict=True):
                assert torch.equal(x.isnan(), y.isnan()), size
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), size


@pytest.mark.parametrize(
    "policy", [Synchronous(compression="exact", bucket_bytes=256), Stale(compression="exact")]
)
def test_trainings_have_the_same_bits(policy: allstep.exchange.ExchangePolicy) -> None:
    assert_same_on_accelerators(
        lambda comm: list(train(comm, policy, num_epochs=2, clip_norm=0.1).values())
    )


def jumps() -> Tensor:
    """Of some micro-batches only, too."""
    steps = 0.3 + noise(9, 5, 2, 80)
    steps[2, 1] *= 1e6
    steps[3, 4] *= 1e-7
    steps[4] = 0
    steps[5, 2, 0] *= 1e6
    steps[6, :, 1] = 0
    steps[7, 3, 1, 4] = math.nan
    steps[8, 0, 0, 3] = -math.inf
    return steps


def test_gradients_that_leave_the_grid_have_the_same_bits() -> None:
    assert_same_on_accelerators(lambda comm: sums_of(comm, jumps()))


def test_what_leaves_the_grid_would_be_missing_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: the device alone leaves out what does not fit."""
    monkeypatch.setattr(ExactSums, "settle", lambda self, off_grid: self._unread.clear())
    alone = sums_of(Communicator.single_process(), jumps())
    (found,) = on_accelerators(1, lambda comm: sums_of(comm, jumps()))
    is_same = [torch.equal(x, y) for x, y in zip(found, alone, strict=True)]
    assert is_same[:3] == [True, True, False]


class Parts(nn.Module):
    """Layers that some micro-batches do without, of two passes each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float32) for _ in range(3))
        for number, p in enumerate(self.parameters()):
            nn.init.constant_(p, 0.1 * (number + 1))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(self.layers[number % 3](x)) + self.layers[0](x)


def test_parameters_without_gradients_and_with_several_have_the_same_bits() -> None:
    def worker(comm: Communicator) -> list[Tensor]:
        models = [Parts(), Parts()]
        exchanges = [attach(model, comm, EXACT) for model in models]
        data = TensorDataset(noise(8, 4), torch.arange(0, 16, 2))
        loader = allstep.data.loader(data, comm, global_batch=4, micro_batch=1, shuffle=False)
        found = []
        for batch in allstep.steps(loader, *exchanges):
            for x, number in batch:
                for scale in (1.0, 1e5, 3.0, 1.0, 2.0):
                    used = int(number) // 4 if scale < 3 else int(number)
                    sums = [scale * model(x, used).square().sum() for model in models]
                    batch.backward(sums[0] + 2 * sums[1])
            for model in models:
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
        return found

    assert_same_on_accelerators(worker)


def test_local_gradients_hold_what_was_not_looked_at_yet() -> None:
    def worker(comm: Communicator) -> list[Tensor]:
        model = nn.Linear(3, 1, bias=False, dtype=torch.float32)
        nn.init.constant_(model.weight, 0.3)
        exchange = attach(model, comm, EXACT)
        found = []
        for step, scale in enumerate((1.0, 1e9)):
            with exchange.global_batch(step, num_micro_batches=comm.size):
                with exchange.no_sync():
                    (scale * model(noise(2, 3)).sum()).backward()
                found.append(exchange.local_gradients()["weight"].clone())
                exchange.synchronize()
            model.zero_grad()
        return found

    alone = worker(Communicator.single_process())
    assert alone[1].abs().max() > 1e8
    assert all(map(torch.equal, on_accelerators(1, worker)[0], alone))


@pytest.mark.slow
def test_experts_on_other_workers_have_the_same_bits() -> None:
    """Which come to an expert's worker in one pass; some leave the grid."""

    def worker(comm: Communicator) -> list[Tensor]:
        layer = MixtureOfExperts(lambda: nn.Linear(5, 5), comm, 5, 6, top_k=2, seed=0).float()
        with torch.no_grad():
            for name, p in layer.named_parameters():
                number = int(name.split(".")[1]) if name.startswith("experts") else 0
                p.copy_(torch.linspace(-1, 1 + number, p.numel()).sin().view_as(p))
        exchange = attach(layer, comm, EXACT)
        data = TensorDataset(noise(20, 4, 5), torch.tensor([1.0] * 11 + [1e6, 1e-7, 0.0] * 3))
        loader = allstep.data.loader(data, comm, global_batch=5, micro_batch=1, shuffle=False)
        found = []
        for batch in allstep.steps(loader, exchange):
            for x, factor in batch:
                y, balance = layer(x)
                batch.backward((y.square().mean() + balance) * factor.mean())
            own = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
            whole = {name: x for part in comm.all_gather_object(own) for name, x in part.items()}
            found += [whole[name] for name in sorted(whole)]
            found.append(exchange.clip_grad_norm_(1.0))
            layer.zero_grad()
        return found

    assert_same_on_accelerators(worker)
