"""Early exit: a net of which each sample takes as many blocks as it needs, on any workers.

python examples/dynamic_net.py
torchrun --nproc-per-node 2 examples/dynamic_net.py

A sample leaves at the first block whose answer is sure enough, in training too. So the graph
differs from worker to worker and from step to step: deep blocks may have no sample on a worker, and
then its parameters have no gradient there. Nothing has to be told; `attach` waits for no hook.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import allstep
from allstep.recipes.digits import load_digits


@dataclass(frozen=True)
class Options:
    """The flags and what is fixed."""

    epochs: int = 15
    global_batch: int = 96
    micro_batch: int = 8
    width: int = 32
    blocks: int = 4
    sure: float = 0.9  # probability of the best class from which a sample leaves
    lr: float = 3e-3
    seed: int = 0
    run_dir: Path | None = None


Answers = list[tuple[Tensor, Tensor, Tensor]]
"""For each block that ran: which samples it had, their logits, and which of them left there."""


class EarlyExit(nn.Module):
    """Blocks of a linear layer and ReLU, with an answer after each."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        widths = [64] + [options.width] * options.blocks
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.exits = nn.ModuleList(nn.Linear(width, 10) for width in widths[1:])
        self.sure = options.sure
        random = torch.Generator().manual_seed(options.seed)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.kaiming_normal_(weight, generator=random)
            else:
                nn.init.zeros_(weight)
        self.double()

    def forward(self, x: Tensor) -> Answers:
        """The answers about pixels [sample, 64]."""
        answers = []
        samples = torch.arange(len(x), device=x.device)
        for block, exit_ in zip(self.blocks, self.exits, strict=True):
            x = block(x).relu()
            logits = exit_(x)
            leaves = logits.detach().softmax(1).amax(1) >= self.sure
            if block is self.blocks[-1]:
                leaves = torch.ones_like(leaves)
            answers.append((samples, logits, leaves))
            if leaves.all():
                break
            x, samples = x[~leaves], samples[~leaves]
        return answers


def loss_of(answers: Answers, labels: Tensor) -> Tensor:
    """The mean over samples of the sum of cross-entropies at all the exits that each came to."""
    losses = [cross_entropy(z, labels[i], reduction="sum") for i, z, _ in answers]
    return torch.stack(losses).sum() / len(labels)


def metrics(model: EarlyExit, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Right answers, and blocks that were run, of each sample."""
    images, labels = batch
    right, blocks = torch.zeros(()), torch.zeros(())
    for depth, (samples, logits, leaves) in enumerate(model(images), 1):
        right = right + (logits.argmax(1) == labels[samples])[leaves].sum()
        blocks = blocks + depth * leaves.sum()
    return {"accuracy": (right, len(labels)), "blocks": (blocks, len(labels))}


def flat(digits: TensorDataset) -> TensorDataset:
    images, labels = digits.tensors
    return TensorDataset(images.flatten(1).double() / 16, labels)


def train(comm: allstep.Communicator, options: Options) -> tuple[EarlyExit, list[int]]:
    """The model, and how many blocks each of this worker's micro-batches took."""
    model = EarlyExit(options).to(comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        flat(load_digits()[0]), comm, global_batch=options.global_batch,
        micro_batch=options.micro_batch, seed=options.seed,
    )  # fmt: skip
    depths = []
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(options.run_dir, loader, exchange, state=state) as checkpoint:
        for _ in checkpoint.epochs(options.epochs):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for images, labels in batch:
                    answers = model(images)
                    depths.append(len(answers))
                    batch.backward(loss_of(answers, labels))
                optimizer.step()
                optimizer.zero_grad()
    if checkpoint.interrupted:
        sys.exit(128 + checkpoint.interrupted)
    exchange.detach()
    return model, depths


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("epochs", "blocks", "seed"):
        default = getattr(Options, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    options = Options(**vars(parser.parse_args()))
    with allstep.init() as comm:
        model, _ = train(comm, options)
        evaluate = allstep.Evaluator(metrics, flat(load_digits()[1]), comm, micro_batch=60)
        found = evaluate(model)
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        if comm.rank == 0:
            print(
                f"test accuracy {found['accuracy']:.4f} with {found['blocks']:.2f} of"
                f" {options.blocks} blocks, parameters' norm {norm:.9f}"
            )


if __name__ == "__main__":
    main()
