"""A user's script, right unless asked for a bug: in a loop as for DDP, or with `allstep.steps`.

torchrun --nproc-per-node 2 train.py --loop steps --bug batch_norm
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import allstep

EPOCHS = 4
BATCH = 12
BUGS = [
    "none",
    "learning_rate",
    "learning_rate_and_dropout",
    "sum",
    "sum_of_means",
    "random_state",
    "augmentation",
    "unequal_shards",
    "batch_norm",
    "batch_norm_and_dropout",
    "scheduler",
    "not_sharded",
    "own_shuffle",
    "same_batch",
    "per_worker_batch",
    "int8_wire",
    "weight_decay",
    "init",
    "padded",
]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x @ torch.randn(8, 3, generator=generator)).argmax(1))


def make_model(bug: str, loop: str, comm: allstep.Communicator) -> nn.Module:
    torch.manual_seed(0)
    has_norm = bug.startswith("batch_norm") or (loop == "steps" and bug == "none")
    has_dropout = bug in ("random_state", "learning_rate_and_dropout", "batch_norm_and_dropout")
    has_dropout = (has_dropout and loop == "ddp") or (loop == "steps" and bug == "none")
    first = nn.Linear(8, 16)
    if bug == "init":
        nn.init.constant_(first.bias, comm.size)
    return nn.Sequential(
        first,
        nn.BatchNorm1d(16) if has_norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(0.3) if has_dropout else nn.Identity(),
        nn.Linear(16, 3),
    )


def make_optimizer(
    model: nn.Module, bug: str, comm: allstep.Communicator
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    rate = 0.1 * (comm.size if bug.startswith("learning_rate") else 1)
    decay = 1e-4 * (comm.size if bug == "weight_decay" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def policy(bug: str) -> allstep.ExchangePolicy:
    return allstep.Synchronous(
        reduction="sum" if bug == "sum_of_means" else "mean",
        compression="int8" if bug == "int8_wire" else "fp32",
    )


def shards(bug: str, comm: allstep.Communicator) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of each global batch."""
    train_set: Dataset[tuple[Tensor, Tensor]] = data()
    if bug == "padded":  # DistributedSampler repeats two samples, so that all parts are equal
        train_set = Subset(train_set, range(90))
    if bug == "unequal_shards":  # parts of 5 and 4 samples
        for order in torch.arange(96)[:90].split(9):
            yield train_set[order[comm.rank :: comm.size]]
        return
    batch = BATCH if bug in ("same_batch", "per_worker_batch") else BATCH // comm.size
    sampler: DistributedSampler[tuple[Tensor, Tensor]] | None = DistributedSampler(
        train_set, num_replicas=comm.size, rank=comm.rank, seed=3
    )
    if bug in ("not_sharded", "same_batch"):
        sampler = None
    if bug == "own_shuffle":
        order = torch.Generator().manual_seed(comm.rank)
        yield from DataLoader(train_set, batch_size=batch, shuffle=True, generator=order)
        return
    yield from DataLoader(train_set, batch_size=batch, sampler=sampler)


def ddp_loop(bug: str, comm: allstep.Communicator) -> None:
    model = make_model(bug, "ddp", comm)
    optimizer, scheduler = make_optimizer(model, bug, comm)
    allstep.attach(model, comm, policy(bug))
    noise = torch.Generator().manual_seed(comm.rank)
    for _ in range(EPOCHS):
        for x, y in shards(bug, comm):
            if bug == "augmentation":
                x = x + 0.5 * torch.randn(x.shape, generator=noise)
            cross_entropy(model(x), y, reduction="sum" if bug == "sum" else "mean").backward()
            finish_step(bug, comm, optimizer, scheduler)


def steps_loop(bug: str, comm: allstep.Communicator) -> None:
    model = make_model(bug, "steps", comm)
    optimizer, scheduler = make_optimizer(model, bug, comm)
    exchange = allstep.attach(model, comm, policy(bug))
    noise = torch.Generator().manual_seed(comm.rank)
    is_cut_by_workers = bug in ("sum", "batch_norm", "batch_norm_and_dropout")
    loader = allstep.data.loader(
        data(),
        allstep.Communicator.single_process() if bug in ("not_sharded", "same_batch") else comm,
        global_batch=BATCH * (comm.size if bug == "per_worker_batch" else 1),
        micro_batch=BATCH // comm.size if is_cut_by_workers else BATCH // 3,
        seed=3,
    )
    for _ in range(EPOCHS):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                if bug in ("random_state", "augmentation"):
                    x = x + 0.5 * torch.randn(x.shape, generator=noise)
                loss = cross_entropy(model(x), y, reduction="sum" if bug == "sum" else "mean")
                if bug == "unequal_shards":  # the mean of the workers' means
                    num_local = (comm.rank + 1) * 3 // comm.size - comm.rank * 3 // comm.size
                    batch.backward(loss * batch.num_samples / len(x) / num_local / comm.size)
                elif bug == "sum_of_means":
                    batch.backward(loss * comm.size)
                else:
                    batch.backward(loss)
            finish_step(bug, comm, optimizer, scheduler)


def finish_step(
    bug: str,
    comm: allstep.Communicator,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(comm.size if bug == "scheduler" else 1):
        scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=["ddp", "steps"], default="ddp")
    parser.add_argument("--bug", choices=BUGS, default="none")
    known = parser.parse_args()
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm:
        (ddp_loop if known.loop == "ddp" else steps_loop)(known.bug, comm)


if __name__ == "__main__":
    main()
