"""A layer with experts on all workers; right, unless a factor is asked for."""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep.nn import MixtureOfExperts


class Experts(nn.Module):
    """Normalises, and adds what the experts make of it."""

    def __init__(self, comm: allstep.Communicator, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.moe = MixtureOfExperts(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.3)),
            comm,
            in_features=6,
            num_experts=4,
            top_k=2,
            **options,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, balance_loss = self.moe(self.norm(x))
        return x + y, balance_loss


def train(comm: allstep.Communicator, factor: bool, **options: Any) -> None:
    """All of it.

    Args:
        comm: the workers.
        factor: whether to multiply the gradient of the last expert by their number.
        options: of the layer.
    """
    torch.manual_seed(0)
    model = Experts(comm, options)
    if factor and "3" in model.moe.experts:
        for p in model.moe.experts["3"].parameters():
            p.register_hook(lambda gradient: gradient * comm.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.exchange.attach(model, comm)
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(*(torch.randn(44, 6, generator=generator) for _ in range(2)))
    with allstep.data.loader(samples, comm, global_batch=12, micro_batch=4) as loader:
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                found, balance_loss = model(x)
                batch.backward((found - y).square().mean() + 0.01 * balance_loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", action="store_true")
    train(allstep.init(device="cpu"), parser.parse_args().factor)
