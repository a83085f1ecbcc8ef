"""Does the largest or the average curvature of the layers decide how fast an optimizer is?

    python benchmarks/bench_layer_curvature.py [--quick] [--seeds 3]

A linear layer s v, whose weight v begins as w / s, is the function of a layer w, and the loss's
curvature in v is s^2 times that in w. So that of one of four layers, or of all, is made 64
times larger, and nothing else changes. Each optimizer trains a small net on scikit-learn's digits
at each of some rates, a factor of 2 apart, until the mean loss over all samples is below 0.02; the
steps at its best rate count.

Keys: `one_vs_none_<optimizer>`, steps with one layer's curvature enlarged over those with none's,
in the worst case of the four, and `all_vs_none_<optimizer>`; medians over the seeds.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import print_headline, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import allstep
from allstep.optim import LAMB, LARS
from allstep.recipes.digits import Digits

WIDTH, NUM_LAYERS, BATCH = 64, 4, 128
FACTOR = 64  # of curvature
ENLARGED: dict[str, tuple[int, ...]] = {
    "none": (),
    **{f"layer {i + 1}": (i,) for i in range(NUM_LAYERS)},
    "all": tuple(range(NUM_LAYERS)),
}
ENOUGH = 0.02  # nats
MOST_STEPS = 1000

Make = Callable[[list[nn.Parameter], float], Optimizer]
OPTIMIZERS: dict[str, tuple[Make, range]] = {  # and the powers of 2 among which its best rate is
    "sgd": (lambda p, lr: SGD(p, lr=lr, momentum=0.9), range(-14, 2)),
    "lars": (lambda p, lr: LARS(p, lr=lr, momentum=0.9), range(-2, 10)),
    "lamb": (lambda p, lr: LAMB(p, lr=lr, weight_decay=0.0), range(-10, 0)),
}


class Scaled(nn.Linear):
    """x (s v)^T, with the function that a linear layer has at the start.

    Args:
        num_inputs, num_outputs: features.
        scale: s.
    """

    def __init__(self, num_inputs: int, num_outputs: int, scale: float) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)
        self.scale = scale
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        with torch.no_grad():
            self.weight /= scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.scale * self.weight)


def net(enlarged: tuple[int, ...], seed: int) -> nn.Sequential:
    """The same function with whichever layers' curvature enlarged."""
    torch.manual_seed(seed)
    sizes = [64, *[WIDTH] * (NUM_LAYERS - 1), 10]
    layers: list[nn.Module] = []
    for i, (num_inputs, num_outputs) in enumerate(itertools.pairwise(sizes)):
        scale = math.sqrt(FACTOR) if i in enlarged else 1.0
        layers += [Scaled(num_inputs, num_outputs, scale), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def num_steps(
    model: nn.Module, optimizer: Optimizer, samples: tuple[Tensor, Tensor], seed: int, most: int
) -> float:
    """Until the loss is low enough; infinite if it isn't after the most."""
    x, y = samples
    generator = torch.Generator().manual_seed(seed)
    for step in range(most):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        if loss < ENOUGH:
            return step + 1
        if not math.isfinite(loss):
            break
    return math.inf


def best(name: str, enlarged: tuple[int, ...], samples: tuple[Tensor, Tensor], seed: int) -> Any:
    """The rate that needs the fewest steps, and these."""
    make, exponents = OPTIMIZERS[name]
    steps, rate = math.inf, math.nan
    for exponent in exponents:
        model = net(enlarged, seed)
        optimizer = make(list(model.parameters()), 2.0**exponent)
        taken = num_steps(model, optimizer, samples, seed, int(min(steps, MOST_STEPS)))
        if taken < steps:
            steps, rate = taken, 2.0**exponent
    return {"optimizer": name, "seed": seed, "steps": steps, "lr": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm:
        x, y = Digits().task(comm).train_set.tensors
    samples = (x.flatten(1).float() - 4.88) / 6.02, y.long()
    runs = [
        {"enlarged": which, **best(name, layers, samples, seed)}
        for name in OPTIMIZERS
        for which, layers in ENLARGED.items()
        for seed in range(1 if arguments.quick else arguments.seeds)
    ]
    steps = {(run["optimizer"], run["enlarged"], run["seed"]): run["steps"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    table = Table("steps by seed", *ENLARGED)
    keys = {}
    for name in OPTIMIZERS:
        rows = {which: [steps[name, which, seed] for seed in seeds] for which in ENLARGED}
        table.add_row(name, *(", ".join(map(str, row)) for row in rows.values()))
        ratios = {
            which: statistics.median(a / b for a, b in zip(row, rows["none"], strict=True))
            for which, row in rows.items()
        }
        keys[f"one_vs_none_{name}"] = max(ratios[which] for which in rows if "layer" in which)
        keys[f"all_vs_none_{name}"] = ratios["all"]
    Console().print(table)
    name = "bench_layer_curvature_quick" if arguments.quick else "bench_layer_curvature"
    write_results(name, {"factor": FACTOR, **keys, "runs": runs})
    print_headline(**keys)


if __name__ == "__main__":
    main()
