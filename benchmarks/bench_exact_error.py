"""The error of exact sums against float64, beside that of float32's own sums, layer by layer.

    python benchmarks/bench_exact_error.py [--quick]

Gradients of one worker's micro-batches while a net is trained with exact sums: the conv net of the
recipe `digits`, and a transformer on the bytes of Python's standard library, at a rate that its
first steps hardly bear. A step's error is the largest over a parameter's elements, as a share of
the largest element of the float64 sum; the table has its median and its worst over the steps after
the first ten of three seeds, in powers of two. Writes docs/tables/exact_error.md and
benchmarks/results/bench_exact_error.json (`--quick`: prints only), and ends with one line of JSON:
for each net the median, what one in a hundred exceeds, and the worst of all parameters and steps.
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from common import print_headline, write_results
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import allstep
from allstep import Communicator, Synchronous
from allstep.recipes.digits import digits_net, load_digits
from allstep.recipes.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).parent.parent
SEEDS = range(3)
DOCS = ROOT / "docs" / "tables" / "exact_error.md"
FIRST_STEPS = 10
SEQUENCE = 64

Errors = dict[str, dict[str, list[float]]]  # parameter -> sums -> of each step
Summary = dict[str, dict[str, dict[str, float]]]  # parameter -> sums -> median and worst
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def conv_net() -> tuple[nn.Module, Dataset[tuple[Tensor, ...]], Loss]:
    images, labels = load_digits()[0].tensors
    data = TensorDataset((images.float() - 4.88) / 6.02, labels)
    return digits_net(), data, lambda model, x, y: F.cross_entropy(model(x), y)


def transformer() -> tuple[nn.Module, Dataset[tuple[Tensor, ...]], Loss]:
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    num = len(text) // (SEQUENCE + 1)
    tokens = torch.tensor(list(text[: num * (SEQUENCE + 1)])).view(num, SEQUENCE + 1)
    config = TransformerConfig(
        vocab_size=256, sequence_length=SEQUENCE, width=64, depth=2, heads=4, dropout=0.0,
        causal=True,
    )  # fmt: skip
    model = Transformer(config)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, TensorDataset(tokens[:, :-1], tokens[:, 1:]), loss


NETS = {
    "conv net, SGD": (conv_net, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 96, 16),
    "transformer, AdamW": (transformer, lambda p: torch.optim.AdamW(p, lr=3e-3), 32, 4),
}


def measure(name: str, num_steps: int, seed: int) -> Errors:
    """The errors of each step's sums after the first ten."""
    make, make_optimizer, global_batch, micro_batch = NETS[name]
    torch.manual_seed(seed)
    model, data, loss = make()
    comm = Communicator.single_process()
    exchange = allstep.attach(model, comm, Synchronous(compression="exact"))
    loader = allstep.data.loader(
        data, comm, global_batch=global_batch, micro_batch=micro_batch, seed=seed
    )
    optimizer = make_optimizer(model.parameters())
    terms: dict[str, list[Tensor]] = {}
    for key, p in model.named_parameters():  # before they are rounded
        p.register_hook(lambda g, key=key: terms.setdefault(key, []).append(g.clone()))
    errors: Errors = {key: {"exact": [], "float32": []} for key in exchange.trained}
    while loader.step < num_steps:
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(loss(model, x, y))
            if batch.step >= FIRST_STEPS:
                for key, p in model.named_parameters():
                    _add_errors(errors[key], terms[key], p.grad)
            terms.clear()
            optimizer.step()
            optimizer.zero_grad()
            if loader.step == num_steps:
                break
    return errors


def _add_errors(errors: dict[str, list[float]], terms: list[Tensor], exact: Tensor | None) -> None:
    assert exact is not None
    oracle = torch.stack([term.double() for term in terms]).sum(0)
    plain = terms[0].clone()
    for term in terms[1:]:
        plain += term
    largest = float(oracle.abs().max())
    if largest > 0:
        for name, found in (("exact", exact), ("float32", plain)):
            errors[name].append(float((found.double() - oracle).abs().max()) / largest)


def measure_all(name: str, num_steps: int) -> Errors:
    """Of all seeds."""
    found = measure(name, num_steps, SEEDS[0])
    for seed in SEEDS[1:]:
        for key, of_seed in measure(name, num_steps, seed).items():
            for sums, errors in of_seed.items():
                found[key][sums] += errors
    return found


def summary(errors: Errors) -> Summary:
    return {
        key: {sums: {"median": statistics.median(x), "worst": max(x)} for sums, x in found.items()}
        for key, found in errors.items()
    }


def table(summaries: dict[str, Summary]) -> str:
    lines = [
        "| net | parameter | exact, median | exact, worst | float32, median | float32, worst |",
        "|---|---|---|---|---|---|",
    ]
    for net, of_net in summaries.items():
        for parameter, found in of_net.items():
            cells = [
                _power(found[sums][pick])
                for sums in ("exact", "float32")
                for pick in ("median", "worst")
            ]
            lines.append(f"| {net} | `{parameter}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _power(error: float) -> str:
    return "0" if error == 0 else f"2^{math.log2(error):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 steps, prints only")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    measured = {name: measure_all(name, 20 if is_quick else 100) for name in NETS}
    summaries = {name: summary(errors) for name, errors in measured.items()}
    text = table(summaries)
    print(text)
    if not is_quick:
        write_results("bench_exact_error", {"errors": summaries})
        DOCS.write_text(text)
    keys = {}
    for short, errors in zip(("conv", "transformer"), measured.values(), strict=True):
        of_all = sorted(x for found in errors.values() for x in found["exact"])
        keys[f"{short}_median"] = statistics.median(of_all)
        keys[f"{short}_p99"] = of_all[int(0.99 * len(of_all))]
        keys[f"{short}_worst"] = of_all[-1]
    print_headline(**keys)


if __name__ == "__main__":
    main()
