"""As dcgan: a generator and a discriminator, an optimizer and an attached model each."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy
from torch.utils.data import TensorDataset

import allstep

BATCH, MICRO, NOISE = 24, 4, 4


def train_gan(case: Any, comm: allstep.Communicator, samples: tuple[Tensor, ...]) -> None:
    """Never ends by itself."""
    torch.manual_seed(1)
    fake_of = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    exchanges = [allstep.attach(model, comm) for model in (judge, fake_of)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3) for m in (judge, fake_of)]

    def losses(real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        fake = fake_of(noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_judge = binary_cross_entropy(judge(real), ones)
        of_judge = of_judge + binary_cross_entropy(judge(fake.detach()), zeros)
        judge.requires_grad_(False)
        of_fake = binary_cross_entropy(judge(fake), ones)
        judge.requires_grad_(True)
        return of_judge, of_fake

    def finish() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    x = samples[0]
    if case.loop == "steps":
        loader = allstep.data.loader(
            TensorDataset(x), comm, global_batch=BATCH, micro_batch=MICRO, seed=3
        )
        while True:
            for batch in allstep.steps(loader, *exchanges):
                for (real,) in batch:
                    for loss in losses(real, torch.randn(len(real), NOISE)):
                        batch.backward(loss)
                finish()
    own = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for step in range(1000):
        noise = torch.randn(BATCH // comm.size, NOISE)
        if "noise_of_step" in case.does:  # of the whole batch, of which each takes its part
            made = torch.Generator().manual_seed(step)
            noise = torch.randn(BATCH, NOISE, generator=made)[own]
        start = step * BATCH % len(x)
        for loss in losses(x[start : start + BATCH][own], noise):
            loss.backward()
        finish()
