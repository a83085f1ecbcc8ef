"""Fashion-MNIST by asynchronous SGD with a parameter server, to compare with a synchronous run.

torchrun --nproc-per-node 4 examples/parameter_server.py
torchrun --nproc-per-node 4 examples/parameter_server.py --staleness-aware
torchrun --nproc-per-node 4 examples/parameter_server.py --in-turn    # the control: nobody is late

Each worker trains on samples of its own, as in Downpour SGD, and every update is of one worker's
batch: as many updates of as many samples as `allstep train fashion` makes, with the same rates.
What differs is that a gradient is of parameters that the others have changed since.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Subset

import allstep
from allstep import Communicator
from allstep.exchange import ParameterServer
from allstep.recipes import Recipe
from allstep.recipes.fashion import Fashion


def train(
    comm: Communicator,
    recipe: Recipe,
    *,
    staleness_aware: bool = False,
    arrivals: Sequence[int] | None = None,
) -> tuple[allstep.Task, dict[int, int]]:
    """The recipe's task, its model trained, and the staleness of updates."""
    task = recipe.task(comm)
    model = task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert isinstance(model, nn.Module)
    alone = Communicator.single_process()
    exchange = allstep.attach(model, alone)  # adds up the worker's own micro-batches
    num_samples = len(task.train_set)  # type: ignore[arg-type]
    loader = allstep.data.loader(
        Subset(task.train_set, range(comm.rank, num_samples, comm.size)),
        alone,
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        seed=recipe.seed * comm.size + comm.rank,
    )
    num_updates = recipe.epochs * recipe.steps_per_epoch(num_samples)  # each part ends short
    with ParameterServer(
        model,
        comm,
        task.optimizer(model),
        schedule=allstep.optim.hold(task.schedule, num_updates),
        staleness_aware=staleness_aware,
        arrivals=arrivals,
    ) as server:
        for _ in range(recipe.epochs):
            for batch in allstep.steps(loader, exchange):
                server.pull()
                for data in batch:
                    batch.backward(task.mean_loss(model, data))
                server.push()
    return task, server.staleness


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("epochs", "seed", "global-batch", "micro-batch"):
        default = getattr(Fashion, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--folder", type=Path, default=Fashion.folder, help="of the IDX files")
    parser.add_argument("--train-share", type=float, default=1.0, help="of the training set")
    parser.add_argument("--staleness-aware", action="store_true", help="rate / staleness")
    parser.add_argument("--in-turn", action="store_true", help="pull, push, then the next worker")
    parser.add_argument("--report", type=Path, help="JSON file to write the results to")
    flags = vars(parser.parse_args())
    staleness_aware, in_turn = flags.pop("staleness_aware"), flags.pop("in_turn")
    report = flags.pop("report")
    recipe = Fashion(**flags)
    with allstep.init(device="cpu") as comm:
        in_pairs = [rank for rank in range(comm.size) for _ in ("pull", "push")]
        arrivals = in_pairs if in_turn else None
        task, staleness = train(comm, recipe, staleness_aware=staleness_aware, arrivals=arrivals)
        evaluate = allstep.Evaluator(task.metrics, task.test_set, comm, micro_batch=100)
        accuracy = evaluate(task.model)["accuracy"]
        mean = sum(s * count for s, count in staleness.items()) / sum(staleness.values())
        if comm.rank == 0:
            print(f"test accuracy {accuracy:.4f}, mean staleness {mean:.2f}")
            if report is not None:
                report.write_text(json.dumps({"accuracy": accuracy, "staleness": staleness}))


if __name__ == "__main__":
    main()
