"""Random loops of a user's own, by a seed: model, data, policy, optimizers, and where they stop.

Each is trained by one worker that nobody stops, and by other numbers of workers in several lives,
one of which may crash. What comes of it must be the same: with exact sums bit for bit. With
policies whose outcome depends on the number of workers, it must be that of one life on as many.
"""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import allstep
from allstep import Communicator
from tests.helpers.compare import differing_names
from tests.helpers.random_layers import CHANNELS, LENGTH, NUM_CLASSES, RandomModel
from tests.helpers.ranks import run_ranks

_CLOSE = 1e-7
Optimizers = list[torch.optim.Optimizer]


class CrashError(Exception):
    """The end of a life."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random numbers, with noise that is drawn anew in each epoch if asked for."""

    def __init__(self, num_samples: int, *, has_noise: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(num_samples, CHANNELS, LENGTH, generator=generator)
        self._y = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
        self._has_noise = has_noise

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[index]
        return (x + 0.1 * torch.randn_like(x) if self._has_noise else x), self._y[index]


def _two(model: RandomModel) -> Optimizers:
    head = list(model.head.parameters())
    others = [p for p in model.parameters() if all(p is not own for own in head)]
    return [
        torch.optim.SGD(others, 0.05, momentum=0.9),
        torch.optim.Adam(head, 0.01, eps=1e-3),
    ]


OPTIMIZERS: dict[str, Callable[[RandomModel], Optimizers]] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.01)],
    "nesterov": lambda m: [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)],
    "amsgrad": lambda m: [torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True, eps=1e-3)],
    "lamb": lambda model: [allstep.optim.LAMB(model.parameters(), 0.01, eps=1e-3)],
    "lars": lambda model: [allstep.optim.LARS(model.parameters(), 0.5)],
    "rmsprop": lambda model: [torch.optim.RMSprop(model.parameters(), 0.001, eps=1e-2)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), 0.01, eps=1e-3)],
    "two": _two,
}
POLICIES: dict[str, allstep.ExchangePolicy] = {
    "float32": allstep.Synchronous(),
    "sum": allstep.Synchronous(reduction="sum"),
    "exact": allstep.Synchronous(compression="exact"),
    "stale": allstep.Stale(),
}
BY_NUM_WORKERS: dict[str, allstep.ExchangePolicy] = {
    "fp16": allstep.Synchronous(compression="fp16"),
    "int8": allstep.Synchronous(compression="int8"),
    "topk": allstep.Synchronous(compression="topk"),
    "powersgd": allstep.Synchronous(compression="powersgd", bucket_bytes=256),
    "stale int8": allstep.Stale(compression="int8"),
    "stale powersgd": allstep.Stale(compression="powersgd"),
    "local": allstep.LocalSGD(sync_every=3, average_optimizer_state=True),
}


@dataclass(frozen=True)
class Loop:
    """What is drawn.

    Attributes:
        num_samples, micro_batch, global_batch, drop_last, shuffle, has_noise: of the data.
        policy, optimizer: names of the tables above.
        loss: "mean", "weight", "penalty" of gradients, or "two passes" of a micro-batch.
        updates_every: global batches to an update.
        clip: who clips gradients; None for nobody.
        has_scaler, has_average, set_to_none, evaluates: what the loop does besides.
        schedule: of the rate, "step", "epoch" or None.
        frozen: "at first", "later" or None.
        lives: (epochs by then, workers) of each.
        crash_at: step of the last life in which it ends before its time; None for none.
        workers_after_crash: of the life that goes on then.
        every_steps: between two checkpoints; None for those of the epochs.
        shares: of the workers.
    """

    num_samples: int
    micro_batch: int
    global_batch: int
    drop_last: bool
    shuffle: bool
    has_noise: bool
    policy: str
    optimizer: str
    loss: str
    updates_every: int
    clip: str | None
    has_scaler: bool
    has_average: bool
    set_to_none: bool
    evaluates: bool
    schedule: str | None
    frozen: str | None
    lives: tuple[tuple[int, int], ...]
    crash_at: int | None
    workers_after_crash: int
    every_steps: int | None
    shares: str

    @classmethod
    def draw(cls, draw: random.Random) -> "Loop":
        """One that nothing refuses."""
        micro_batch = draw.randint(2, 6)
        global_batch, num_samples = micro_batch * draw.randint(2, 6), draw.randint(20, 60)
        policy = draw.choice([*POLICIES, "exact"])
        losses = ["mean", "mean", "penalty", "two passes"]
        loss = draw.choice(losses if policy == "stale" else [*losses, "weight"])
        updates_every = 1 if policy == "stale" or loss == "weight" else draw.choice((1, 1, 2))
        ends = draw.choice(((3,), (1, 3), (2, 3), (1, 2, 3)))
        loop = cls(
            num_samples=num_samples,
            micro_batch=micro_batch,
            global_batch=global_batch,
            drop_last=num_samples >= global_batch and draw.random() < 0.3,
            shuffle=draw.random() < 0.7,
            has_noise=draw.random() < 0.5,
            policy=policy,
            optimizer=draw.choice(list(OPTIMIZERS)),
            loss=loss,
            updates_every=updates_every,
            clip=draw.choice((None, None, "torch", "exchange", "value")),
            has_scaler=draw.random() < 0.2,
            has_average=draw.random() < 0.25,
            set_to_none=draw.random() < 0.6,
            evaluates=draw.random() < 0.3,
            schedule=draw.choice((None, "epoch", "step")),
            frozen=draw.choice((None, None, "at first", "later")),
            lives=tuple((end, draw.randint(2, 4)) for end in ends),
            crash_at=draw.choice((None, None, 1, 2, 3)),
            workers_after_crash=0,
            every_steps=draw.choice((None, 1, 2)),
            shares=draw.choice(("equal", "equal", "measured", "fixed")),
        )
        return replace(loop, workers_after_crash=1 + loop.lives[-1][1] % 4)

    def by_num_workers(self, seed: int, model: RandomModel) -> "Loop":
        """With a policy whose outcome depends on the number of workers, and always as many."""
        policy = random.Random(seed).choice(list(BY_NUM_WORKERS))
        if policy == "local" and model.leaves_out_layers:
            policy = "stale int8"  # a momentum that only some workers have is no mean
        num_workers = self.lives[-1][1]
        loop = replace(
            self,
            policy=policy,
            lives=tuple((end, num_workers) for end, _ in self.lives),
            workers_after_crash=num_workers,
            shares="equal" if self.shares == "measured" else self.shares,
        )
        if policy in ("fp16", "int8", "topk", "powersgd"):
            return loop
        # One gradient an update; and local SGD takes one optimizer.
        loss = "mean" if loop.loss == "weight" else loop.loss
        optimizer = "adam" if loop.optimizer == "two" else loop.optimizer
        loop = replace(loop, loss=loss, optimizer=optimizer, updates_every=1)
        if policy != "local":
            return loop
        # Each worker has data in each step. A checkpoint ends a round, so that the end of a life
        # must not be one more, and it has no gradients, not even zeros.
        return replace(
            loop,
            num_samples=loop.num_samples + 4,
            global_batch=loop.micro_batch * num_workers,
            drop_last=True,
            shares="equal",
            every_steps=None,
            set_to_none=True,
        )


class Life:
    """A worker of one life.

    Args:
        loop: what is trained.
        model: as it is at the very beginning.
        comm: the workers.
        policy: of the exchange.
    """

    def __init__(
        self,
        loop: Loop,
        model: RandomModel,
        comm: Communicator,
        policy: allstep.ExchangePolicy,
    ) -> None:
        self._loop, self._comm = loop, comm
        self.model = copy.deepcopy(model)
        self.optimizers = OPTIMIZERS[loop.optimizer](self.model)
        averaged = self.optimizers[0] if isinstance(policy, allstep.LocalSGD) else None
        self.exchange = allstep.attach(self.model, comm, policy, optimizer=averaged)
        self.samples = Samples(loop.num_samples, has_noise=loop.has_noise)
        shares: Any = [1 + rank % 3 for rank in range(comm.size)]
        self.loader = allstep.data.loader(
            self.samples,
            comm,
            global_batch=loop.global_batch,
            micro_batch=loop.micro_batch,
            shuffle=loop.shuffle,
            drop_last=loop.drop_last,
            shares=shares if loop.shares == "fixed" else loop.shares,
            seed=3,
        )
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=3, enabled=loop.has_scaler
        )
        self.schedules = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in self.optimizers
        ]
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.losses: dict[float, float] = {}
        self.state: dict[str, Any] = {"scaler": self.scaler, "average": self.average}
        self.state |= {f"optimizer {n}": x for n, x in enumerate(self.optimizers)}
        self.state |= {f"schedule {n}": x for n, x in enumerate(self.schedules)}

    def train(
        self, run_dir: Path, num_epochs: int, crash_at: int | None = None
    ) -> dict[str, Tensor]:
        """Goes on to the end of so many epochs; returns what has come of it."""
        loader, exchange, every_steps = self.loader, self.exchange, self._loop.every_steps
        with (
            loader,
            allstep.AutoCheckpoint(
                run_dir, loader, exchange, state=self.state, every_steps=every_steps
            ) as checkpoint,
        ):
            self.run(checkpoint, num_epochs, crash_at, checkpoint=checkpoint)
        return self.result()

    def run(
        self,
        keeper: allstep.AutoCheckpoint | allstep.Elastic,
        num_epochs: int,
        crash_at: int | None = None,
        **of_steps: Any,
    ) -> None:
        """Goes on to the end of so many epochs, or to a crash."""
        num_steps = 0
        for epoch in keeper.epochs(num_epochs):
            self._freeze(epoch)
            for batch in allstep.steps(self.loader, self.exchange, **of_steps):
                self._make_step(batch)
                num_steps += 1
                if num_steps == crash_at:
                    raise CrashError
                self._update(batch)
            if self._loop.schedule == "epoch":
                self._step_schedules()

    def _freeze(self, epoch: int) -> None:
        if self._loop.frozen == "at first":
            self.model.body[0].requires_grad_(epoch >= 1)
        if self._loop.frozen == "later":
            self.model.head.requires_grad_(epoch < 1)

    def _make_step(self, batch: allstep.train.Batch) -> None:
        for x, y in batch:
            self._backward(batch, x, y)
        self.losses[batch.step] = batch.global_loss()

    def _backward(self, batch: allstep.train.Batch, x: Tensor, y: Tensor) -> None:
        kind = self._loop.loss
        scaler = self.scaler if self._loop.has_scaler else None
        if kind == "penalty":
            x.requires_grad_()
        output, second = self.model(x)
        if kind == "weight":
            chosen = torch.rand(len(y)) < 0.5
            chosen[0] = True
            loss = cross_entropy(output[chosen], y[chosen], reduction="sum")
            loss = loss + second[chosen].square().sum()
            batch.backward(loss, weight=int(chosen.sum()), scaler=scaler)
            return
        loss = cross_entropy(output, y) + second.square().mean()
        if kind == "penalty":
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + 0.01 * slope.square().sum((1, 2)).mean()
        if kind == "two passes":
            batch.backward(loss / 2, exchange=False, scaler=scaler)
            loss = cross_entropy(self.model(x)[0], y) / 2
        batch.backward(loss, exchange=kind != "two passes", scaler=scaler)

    def _update(self, batch: allstep.train.Batch) -> None:
        loop, parameters = self._loop, list(self.model.parameters())
        if (batch.step + 1) % loop.updates_every or not self.exchange.has_gradients:
            return
        for optimizer in self.optimizers:
            self.exchange.unscale_(self.scaler, optimizer)
        if loop.clip == "torch":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if loop.clip == "exchange":
            self.exchange.clip_grad_norm_(0.5)
        if loop.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.05)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=loop.set_to_none)
        self.scaler.update()
        if loop.has_average:
            self._sync_buffers()
            self.average.update_parameters(self.model)
        if loop.schedule == "step":
            self._step_schedules()
        if loop.evaluates and batch.step % 3 == 1:
            self.losses[batch.step + 0.5] = self._evaluate()

    def _step_schedules(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def _sync_buffers(self) -> None:
        self.exchange.sync_buffers()

    def _evaluate(self) -> float:
        def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
            x, y = batch
            return {"accuracy": ((model(x)[0].argmax(1) == y).sum(), len(y))}

        self._sync_buffers()
        evaluate = allstep.Evaluator(metrics, self.samples, self._comm, micro_batch=7)
        return evaluate(self.model)["accuracy"]

    def result(self) -> dict[str, Tensor]:
        """All that was trained."""
        for _ in self.exchange.flush():
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        moments = {
            f"optimizer {n} {key} {name}": value
            for n, optimizer in enumerate(self.optimizers)
            for key, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        averages = {f"average {n}": x for n, x in self.average.state_dict().items()}
        rates = torch.tensor([x.param_groups[0]["lr"] for x in self.optimizers])
        self.exchange.detach()
        return {**self.model.state_dict(), **averages, **moments, "rates": rates}


def loop_of(seed: int) -> Loop:
    """What a seed draws."""
    return Loop.draw(random.Random(seed))


def differences(seed: int, folder: Path) -> list[str]:
    """What differs between a loop's lives on workers and one worker's life.

    Args:
        seed: of the loop.
        folder: for checkpoints.
    """
    return differences_of(*_draw(seed), folder)


def differences_of(
    loop: Loop, model: RandomModel, folder: Path, life: type[Life] = Life
) -> list[str]:
    """`differences` of what has been drawn already.

    Args:
        loop: the loop.
        model: as it is at the very beginning.
        folder: for checkpoints.
        life: of a worker.
    """
    alone = replace(loop, lives=((loop.lives[-1][0], 1),), crash_at=None)
    expected, (whole,) = _run(alone, model, folder / "alone", life)
    losses, ranks = _run(loop, model, folder / "workers", life)
    parted = {name for rank in ranks for name in differing_names(ranks[0], rank)}
    is_exact = loop.policy == "exact"
    numbers = [(f"loss {n}", torch.tensor(losses[n]), torch.tensor(expected[n])) for n in losses]
    numbers += [(name, x, whole[name]) for name, x in ranks[0].items() if name in whole]
    wrong = [name for name, x, y in numbers if not _is_same(x, y, is_exact=is_exact)]
    wrong += sorted(whole.keys() ^ ranks[0].keys())
    return [*(f"{name} between ranks" for name in sorted(parted)), *wrong]


def changes_by_interruption(seed: int, folder: Path) -> list[str]:
    """What differs between lives of a loop `by_num_workers` and one life on as many workers.

    Args:
        seed: of the loop.
        folder: for checkpoints.
    """
    loop, model = draw_by_num_workers(seed)
    whole = replace(loop, lives=loop.lives[-1:], crash_at=None)
    expected_losses, expected = _run(whole, model, folder / "whole")
    losses, ranks = _run(loop, model, folder / "lives")
    wrong = [f"loss {n}" for n, loss in losses.items() if loss != expected_losses[n]]
    for rank, (found, same) in enumerate(zip(ranks, expected, strict=True)):
        wrong += [f"{name} of rank {rank}" for name in differing_names(found, same)]
    return wrong


def draw_by_num_workers(seed: int) -> tuple[Loop, RandomModel]:
    """The loop and the model of `changes_by_interruption`."""
    loop, model = _draw(seed)
    return loop.by_num_workers(seed, model), model


def _draw(seed: int) -> tuple[Loop, RandomModel]:
    draw = random.Random(seed)
    loop = Loop.draw(draw)
    torch.manual_seed(seed)
    return loop, RandomModel(draw)  # before the ranks, which are threads


def _run(
    loop: Loop, model: RandomModel, run_dir: Path, life: type[Life] = Life
) -> tuple[dict[float, float], list[dict[str, Tensor]]]:
    """Losses by step, evaluations half a step later; and each rank's end of the last life."""
    losses: dict[float, float] = {}
    ranks: list[dict[str, Tensor]] = []
    for number, (num_epochs, num_workers) in enumerate(loop.lives):
        if number == len(loop.lives) - 1 and loop.crash_at is not None:
            with suppress(CrashError):
                _live(loop, model, run_dir, num_epochs, num_workers, life, loop.crash_at)
            num_workers = loop.workers_after_crash
        found = _live(loop, model, run_dir, num_epochs, num_workers, life)
        losses |= found[0][0]
        ranks = [end for _, end in found]
    return losses, ranks


def _live(
    loop: Loop,
    model: RandomModel,
    run_dir: Path,
    num_epochs: int,
    num_workers: int,
    kind: type[Life],
    crash_at: int | None = None,
) -> list[tuple[dict[float, float], dict[str, Tensor]]]:
    def work(comm: Communicator) -> tuple[dict[float, float], dict[str, Tensor]]:
        life = kind(loop, model, comm, {**POLICIES, **BY_NUM_WORKERS}[loop.policy])
        end = life.train(run_dir, num_epochs, crash_at)
        return life.losses, end

    return run_ranks(num_workers, work)


def _is_same(found: Tensor, expected: Tensor, *, is_exact: bool) -> bool:
    if is_exact:
        return torch.equal(found, expected)
    return torch.allclose(found.double(), expected.double(), rtol=_CLOSE, atol=_CLOSE / 100)
