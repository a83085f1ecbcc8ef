"""A DCGAN that draws clothes, on any number of workers: two nets, two optimizers, two exchanges.

python examples/dcgan.py --pictures clothes.png
torchrun --nproc-per-node 2 examples/dcgan.py --pictures clothes.png
torchrun --nproc-per-node 2 examples/dcgan.py --staleness 1

Both nets learn from the same global batch at once, each from the other as it was before it. So each
exchange has one gradient a step, and gradients may be a step late, of both nets alike.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import allstep
from allstep.recipes.fashion import Fashion
from allstep.train import Batch

NUM_COMPONENTS = 32  # of the real pictures, in which the drawn ones are compared with them
NUM_COMPARED = 2000


@dataclass(frozen=True)
class Options:
    """The flags; pictures, batches and widths."""

    folder: Path = Fashion.folder
    pictures: Path | None = None
    run_dir: Path | None = None
    epochs: int = 4
    samples: int = 10_000
    global_batch: int = 64
    micro_batch: int = 32
    width: int = 32
    noise: int = 64
    lr: float = 1e-3
    staleness: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32


def generator(width: int, noise: int) -> nn.Sequential:
    """[sample, noise] -> pictures in -1 to 1, [sample, 1, 28, 28]."""
    return nn.Sequential(
        nn.Linear(noise, 2 * width * 49, bias=False), nn.Unflatten(1, (2 * width, 7, 7)),
        nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width), nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic(width: int) -> nn.Sequential:
    """Pictures -> how real each looks, [sample, 1]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(2 * width * 49, 1),
    )  # fmt: skip


def initialise(net: nn.Module, seed: int) -> None:
    """Normal weights of 0.02, as Radford et al., 2016 (arXiv:1511.06434)."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=random)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class Gan:
    """The two nets, with how each is optimized and exchanged."""

    def __init__(self, comm: allstep.Communicator, options: Options) -> None:
        self.draw = generator(options.width, options.noise)
        self.judge = critic(options.width)
        self.nets = (self.draw, self.judge)
        for net in self.nets:
            initialise(net, options.seed)
            net.to(comm.device, options.dtype)
        self.optimizers = [
            torch.optim.Adam(net.parameters(), options.lr, betas=(0.5, 0.999)) for net in self.nets
        ]
        late = options.staleness
        policy = allstep.Stale(steps=late) if late else allstep.Synchronous()
        self.exchanges = [
            allstep.attach(net, comm, policy, optimizer=optimizer)
            for net, optimizer in zip(self.nets, self.optimizers, strict=True)
        ]

    def update(self) -> None:
        """One step of both; none where the first gradients are still on their way."""
        for optimizer, exchange in zip(self.optimizers, self.exchanges, strict=True):
            if exchange.has_gradients:
                optimizer.step()
            optimizer.zero_grad()


def train(comm: allstep.Communicator, images: Tensor, options: Options) -> Gan:
    """The nets after `epochs` passes over the pictures, uint8 [sample, 1, 28, 28]."""
    gan = Gan(comm, options)
    loader = allstep.data.loader(
        TensorDataset(images), comm, global_batch=options.global_batch,
        micro_batch=options.micro_batch, seed=options.seed, drop_last=True,
    )  # fmt: skip
    state = dict(zip(("draw", "judge"), gan.optimizers, strict=True))
    with allstep.AutoCheckpoint(options.run_dir, loader, *gan.exchanges, state=state) as checkpoint:
        for _ in checkpoint.epochs(options.epochs):
            for batch in allstep.steps(loader, *gan.exchanges, checkpoint=checkpoint):
                for (pictures,) in batch:
                    add_gradients(gan, batch, pictures, options)
                gan.update()
    if checkpoint.interrupted:
        sys.exit(128 + checkpoint.interrupted)
    for _ in zip(*(exchange.flush() for exchange in gan.exchanges), strict=True):
        gan.update()
    return gan


def add_gradients(gan: Gan, batch: Batch, pictures: Tensor, options: Options) -> None:
    """The critic's, of real pictures and drawn ones, and the generator's, of the drawn ones."""
    real = pictures.to(options.dtype) / 127.5 - 1
    noise = torch.randn(len(real), options.noise, dtype=real.dtype, device=real.device)
    drawn = gan.draw(noise)
    judged = softplus(-gan.judge(real)) + softplus(gan.judge(drawn.detach()))
    batch.backward(judged.mean())
    gan.judge.requires_grad_(False)
    batch.backward(softplus(-gan.judge(drawn)).mean())
    gan.judge.requires_grad_(True)


def sample(gan: Gan, num: int, options: Options) -> Tensor:
    """Pictures that the generator draws, [num, 1, 28, 28]; always the same noise."""
    noise = torch.randn(num, options.noise, generator=torch.Generator().manual_seed(7))
    parameter = next(gan.draw.parameters())
    gan.draw.eval()
    with torch.no_grad():
        drawn: Tensor = gan.draw(noise.to(parameter)).cpu().double()
    gan.draw.train()
    return drawn


def distance(real: Tensor, others: Tensor) -> float:
    """Frechet distance of two sets of pictures in the first principal components of the real ones.

    |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)), as a share of the real ones' trace(C1)
    """
    x, y = real.double().flatten(1), others.double().flatten(1)
    _, _, directions = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    x, y = (z @ directions[:NUM_COMPONENTS].T for z in (x, y))
    cx, cy = x.T.cov(), y.T.cov()
    # C1 C2 has the eigenvalues of a symmetric matrix that is not negative.
    roots = torch.linalg.eigvals(cx @ cy).real.clamp(min=0).sqrt().sum()
    total = (x.mean(0) - y.mean(0)).square().sum() + cx.trace() + cy.trace() - 2 * roots
    return float(total / cx.trace())


def save(pictures: Tensor, path: Path, columns: int = 10) -> None:
    """Writes pictures in -1 to 1 as one PNG, row by row."""
    tiles = ((pictures[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    rows = [torch.cat(list(row), 1) for row in tiles.unflatten(0, (-1, columns))]
    Image.fromarray(torch.cat(rows).numpy()).save(path)


def read_flags() -> Options:
    parser = argparse.ArgumentParser()
    for name in ("epochs", "samples", "global-batch", "micro-batch", "width", "staleness", "seed"):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--folder", type=Path, default=Options.folder, help="of the IDX files")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    parser.add_argument("--pictures", type=Path, help="PNG to write what is drawn to")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = read_flags()
    with allstep.init() as comm:
        fashion = Fashion(folder=options.folder).task(comm)  # for its pictures
        (images, _), (test_images, _) = fashion.train_set.tensors, fashion.test_set.tensors
        gan = train(comm, images[: options.samples], options)
        if comm.rank == 0:
            real = test_images[:NUM_COMPARED].double() / 127.5 - 1
            other_real = images[-NUM_COMPARED:].double() / 127.5 - 1
            drawn = sample(gan, NUM_COMPARED, options)
            found, floor = distance(real, drawn), distance(real, other_real)
            print(f"distance to real pictures {found:.3f}, of other real ones {floor:.3f}")
            if options.pictures is not None:
                save(drawn[:60], options.pictures)


if __name__ == "__main__":
    main()
