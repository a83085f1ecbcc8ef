"""Whatever is done to `p.grad` between backward passes, all formats make of it what plain does.

The formats are set so that they lose next to nothing; what they may lose is tested elsewhere.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.exchange import Exchange, ExchangePolicy, Synchronous, attach
from allstep.exchange.wires import Int8, PowerSGD, TopK, WireFormat
from tests.helpers.ranks import run_ranks

FORMATS: dict[str, tuple[str | WireFormat, float]] = {
    "fp32": ("fp32", 1e-12),
    "bf16": ("bf16", 5e-2),
    "fp16": ("fp16", 1e-2),
    "int8": (Int8(block=1), 1e-5),
    "powersgd": (PowerSGD(), 1e-12),
    "topk": (TopK(fraction=1.0), 1e-12),
    "exact": ("exact", 1e-10),
}


def policy(name: str) -> ExchangePolicy:
    return Synchronous(algorithm="native", compression=FORMATS[name][0], bucket_bytes=16)


class Parts(nn.Module):
    """Parameters of which each pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in (1, (2, 3), 2))

    def forward(self, factors: list[float]) -> Tensor:
        used = [p.sum() * f for p, f in zip(self.parts, factors, strict=True) if f]
        return sum(used, torch.zeros(()))


Action = Callable[[Parts, Exchange, list[float]], None]


def backward(model: Parts, exchange: Exchange, factors: list[float]) -> None:
    if any(factors):
        model(factors).backward()
    else:
        exchange.synchronize()


def accumulate(model: Parts, exchange: Exchange, factors: list[float]) -> None:
    with exchange.no_sync():
        if any(factors):
            model(factors).backward()


def zero(model: Parts, *_: object) -> None:
    model.zero_grad(set_to_none=False)


def forget(model: Parts, *_: object) -> None:
    model.zero_grad()


def forget_one(model: Parts, *_: object) -> None:
    model.parts[1].grad = None


def clip(model: Parts, *_: object) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def replace(model: Parts, *_: object) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else 0.5 * p.grad


ACTIONS: dict[Action, int] = {
    backward: 6, accumulate: 5, zero: 2, forget: 2, forget_one: 1, clip: 2, replace: 1
}  # fmt: skip


def follow(seed: int, comm: Communicator, *policies: ExchangePolicy) -> list[list[list[float]]]:
    """[policy, time, element]: p.grad after each of some random actions."""
    shared, own = random.Random(seed), random.Random(1000 * seed + comm.rank)
    pairs = [(m := Parts().to(comm.device), attach(m, comm, each)) for each in policies]
    seen: list[list[list[float]]] = [[] for _ in policies]
    for _ in range(14):
        (action,) = shared.choices(list(ACTIONS), list(ACTIONS.values()))
        factors = [own.choice([0.0, 0.0, 1.0, 2.0, 3.0]) for _ in range(3)]
        for (model, exchange), found in zip(pairs, seen, strict=True):
            action(model, exchange, factors)
            absent = [torch.nan]
            found.append([
                x for p in model.parameters()
                for x in (absent if p.grad is None else p.grad.flatten().tolist())
            ])  # fmt: skip
    return seen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", FORMATS)
def test_random_actions_equal_the_plain_exchange(name: str, seed: int) -> None:
    plain = Synchronous(plain=True)
    for expected, found in run_ranks(
        2 + seed % 2, lambda comm: follow(seed, comm, plain, policy(name))
    ):
        for one, other in zip(expected, found, strict=True):
            one, other = torch.tensor(one), torch.tensor(other)
            atol = FORMATS[name][1] * max(1.0, float(one.nan_to_num().abs().max()))
            torch.testing.assert_close(other, one, rtol=0, atol=atol, equal_nan=True)


def train(comm: Communicator, policy: ExchangePolicy, between: Action | None) -> list[Tensor]:
    """Gradients after each of several global batches, of which two go into an update."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    exchange = attach(model.to(comm.device), comm, policy)
    samples = TensorDataset(torch.randn(22, 3, generator=generator))
    loader = allstep.data.loader(samples, comm, global_batch=6, micro_batch=1, seed=0)
    seen = []
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
        seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]).cpu())
        if batch.step % 2:
            model.zero_grad(set_to_none=batch.step % 4 == 1)
        elif between is not None:
            between(model, exchange, [])
    return seen


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("between", [None, clip], ids=["untouched", "clipped"])
@pytest.mark.parametrize("name", FORMATS)
def test_two_global_batches_an_update(name: str, between: Action | None, reduction: str) -> None:
    expected = train(Communicator.single_process(), Synchronous(), between)
    assert not torch.allclose(expected[1], 2 * expected[0], rtol=0.1)
    wire, bound = FORMATS[name]
    policy = Synchronous(algorithm="native", compression=wire, bucket_bytes=16, reduction=reduction)
    for size in (1, 3):
        for found in run_ranks(size, lambda comm: train(comm, policy, between)):
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=bound * float(one.abs().max()))


@pytest.mark.parametrize("between", [None, clip], ids=["untouched", "clipped"])
def test_two_global_batches_have_the_same_bits_on_any_number_of_workers(
    between: Action | None,
) -> None:
    torch.set_default_dtype(torch.float32)
    bits = {
        wire: {
            torch.stack(gradients).numpy().tobytes()
            for size in (1, 2, 3, 4)
            for gradients in run_ranks(
                size, lambda comm, wire=wire: train(comm, Synchronous(compression=wire), between)
            )
        }
        for wire in ("exact", "fp32")
    }
    assert len(bits["exact"]) == 1
    assert len(bits["fp32"]) > 1
