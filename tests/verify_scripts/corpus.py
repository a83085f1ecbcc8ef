"""Small trainings in the forms that users write, sound or with one silent bug; which one is told.

    torchrun --nproc-per-node 2 corpus.py NAME

Sound ones and bugs are the same trainings: a bug is one option of `Case`. PyTorch's own examples
lend their forms: mnist, word_language_model, dcgan, vae, siamese_network, super_resolution.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nets import NETS, TokenNet, Vae, make_samples
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import allstep

BATCH, MICRO = 24, 4
_STEPS_A_PASS = 4


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        net: which model and data; one of `NETS`.
        loop: "ddp", each worker runs its part of a batch, or "steps".
        optimizer: its class in `torch.optim`.
        options: of the optimizer.
        schedule: None, "epoch" (StepLR), "cosine" (each step), "plateau".
        sampler: how workers share samples; a key of `_SAMPLERS`.
        does: whatever else the loop does, or does wrongly.
    """

    net: str = "mlp"
    loop: str = "ddp"
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    schedule: str | None = None
    sampler: str = "shared"
    does: frozenset[str] = frozenset()


def case(*does: str, **fields: Any) -> Case:
    return Case(does=frozenset(does), **fields)


_ADAM = {"optimizer": "AdamW", "options": {"lr": 1e-3}}
_ADADELTA = {"optimizer": "Adadelta", "options": {"lr": 1.0}, "schedule": "epoch"}
_MOMENTUM = {"options": {"lr": 0.05, "momentum": 0.9}}

SOUND = {
    "mlp": case(**_MOMENTUM, schedule="cosine"),
    "mlp_float64": case("float64", **_MOMENTUM),
    "mlp_clip": case("clip"),
    "mlp_accumulation": case("accumulation"),
    "mlp_autocast": case("autocast"),
    "mlp_gradscaler": case("scaler"),
    "mlp_plateau": case("plateau_of_mean", schedule="plateau"),
    "mlp_frozen_layer": case("freeze", **_ADAM),
    "mlp_two_groups": case("two_groups", **_ADAM),
    "mlp_weighed_shards": case("weighs", sampler="unequal"),
    "mlp_seeds_alike": case("seed", **_ADAM),
    "mlp_high_rate": case(options={"lr": 1.5}),
    "cnn_adadelta": case(net="cnn", **_ADADELTA),
    "lstm_with_state": case(net="lstm", options={"lr": 1.0}, sampler="columns"),
    "gru_with_state_clip": case("clip", net="gru", options={"lr": 1.0}, sampler="columns"),
    "transformer": case(net="transformer", **_ADAM),
    "siamese": case(net="siamese", **_ADADELTA),
    "super_resolution": case(net="super_resolution", **_ADAM),
    "gan_noise_of_step": case("noise_of_step", net="gan", **_ADAM),
    "mlp_steps": case(loop="steps", **_MOMENTUM, schedule="cosine"),
    "mlp_steps_exact": case("exact", loop="steps", **_MOMENTUM),
    "mlp_steps_epochs": case(loop="steps", schedule="epoch"),
    "mlp_steps_autocast": case("autocast", loop="steps"),
    "mlp_steps_augmented": case("augment_each", loop="steps"),
    "mlp_steps_rmsprop": case(loop="steps", optimizer="RMSprop", options={"lr": 0.01}),
    "mlp_steps_plateau": case("plateau_of_mean", loop="steps", schedule="plateau"),
    "mlp_steps_class_weights": case("class_weights", loop="steps"),
    "dropnet_steps": case(net="dropnet", loop="steps"),
    "bnnet_steps": case(net="bnnet", loop="steps", **_MOMENTUM),
    "mnist_steps": case(net="mnist", loop="steps", **_ADADELTA),
    "cnn_steps_clip": case("clip", net="cnn", loop="steps", **_ADADELTA),
    "transformer_steps": case(net="transformer", loop="steps", **_ADAM),
    "vae_steps": case(net="vae", loop="steps", **_ADAM),
    "gan_steps": case(net="gan", loop="steps", **_ADAM),
    "siamese_steps": case(net="siamese", loop="steps", **_ADADELTA),
    "padded_steps": case(net="tokens", loop="steps"),
}

BUGS = {
    "rate_by_workers": ("learning rate scaled", case("scales_rate")),
    "rate_by_root_of_workers": ("learning rate scaled", case("scales_rate_by_root", **_ADAM)),
    "rate_of_one_group": ("learning rate scaled", case("two_groups", "scales_one_rate", **_ADAM)),
    "rate_by_workers_in_steps": ("learning rate scaled", case("scales_rate", loop="steps")),
    "schedule_in_samples": ("scheduler", case("steps_schedule_often", schedule="cosine")),
    "schedule_over_parts": ("scheduler", case("short_schedule", schedule="linear")),
    "sum_of_losses": ("loss summed", case("sum")),
    "divided_twice": ("loss summed", case("divides_loss")),
    "accumulation_undivided": ("loss summed", case("accumulation", "undivided")),
    "sum_in_steps": ("loss summed", case("multiplies_loss", loop="steps")),
    "dropout": ("random state", case(net="dropnet")),
    "dropout_seeds_by_rank": ("random state", case("seed_by_rank", net="dropnet")),
    "mnist_in_plain_loop": ("random state", case(net="mnist", **_ADADELTA)),
    "augmentation_of_torch": ("random state", case("augment")),
    "augmentation_of_numpy": ("random state", case("augment_numpy")),
    "augmentation_of_python": ("random state", case("augment_python")),
    "augmentation_by_rank": ("random state", case("augment_by_rank", loop="steps")),
    "vae_in_plain_loop": ("random state", case(net="vae", **_ADAM)),
    "gan_noise_of_worker": ("random state", case(net="gan", **_ADAM)),
    "unequal_parts": ("unequal shards", case(sampler="unequal")),
    "short_last_batch": ("unequal shards", case(sampler="short_last")),
    "means_of_tokens": ("unequal amounts", case(net="tokens")),
    "class_weights": ("unequal amounts", case("class_weights")),
    "batch_norm": ("batch norm", case(net="bnnet")),
    "batch_norm_in_steps": ("batch norm", case("micro_by_workers", net="bnnet", loop="steps")),
    "no_sampler": ("data not sharded", case(sampler="none")),
    "same_rank_everywhere": ("data not sharded", case(sampler="rank_0")),
    "own_shuffle": ("data not sharded", case(sampler="seed_by_rank")),
    "batch_a_worker": ("global batch", case(sampler="whole_batch")),
    "batch_rounded_down": ("global batch", case(sampler="rounded_down")),
    "padded_sampler": ("samples repeated", case(sampler="padded")),
    "blocks_of_the_data": ("other batches", case(sampler="blocks")),
    "seed_by_rank": ("seed depends on rank", case("seed_by_rank", sampler="drawn")),
    "seed_by_rank_of_numpy": (
        "seed depends on rank",
        case("numpy_seed_by_rank", sampler="drawn_by_numpy"),
    ),
    "seed_by_rank_made_data": ("seed depends on rank", case("seed_by_rank", sampler="made")),
    "int8": ("exchange policy", case("int8")),
    "stale": ("exchange policy", case("stale", loop="steps")),
    "local_sgd": ("exchange policy", case("local_sgd")),
    "weight_decay": ("optimizer options", case("scales_decay")),
    "momentum": ("optimizer options", case("changes_momentum")),
    "other_optimizer": ("optimizer options", case("adam_on_several")),
    "initial_scale": ("initial parameters", case("scales_init")),
    "seed_of_init_by_size": ("initial parameters", case("seeds_init_by_size")),
    "averages_again": ("gradient changed", case("averages_again")),
    "clips_by_workers": ("gradient changed", case("clip", "clips_by_workers")),
    "autocast_on_several": ("number format", case("autocast_on_several")),
    "never_exchanged": ("workers apart", case("no_sync", "steps_once")),
    "noise_in_parameters": ("workers apart", case("noise_by_rank", "steps_once")),
}


class Training:
    """One case on one worker."""

    def __init__(self, case: Case, comm: allstep.Communicator) -> None:
        self.case, self.comm, self.does = case, comm, case.does
        self.seed_all()
        samples = make_samples(case.net)
        torch.manual_seed(comm.size if "seeds_init_by_size" in self.does else 1)
        self.model = NETS[case.net]()
        if "float64" in self.does:
            self.model.double()
            samples = tuple(t.double() if t.is_floating_point() else t for t in samples)
        self.samples = TensorDataset(*samples)
        self.change_init()
        self.seed_all()
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler()
        self.exchange = allstep.attach(self.model, comm, self.policy(), **self.attach_options())
        self.state: Any = None
        self.noise = torch.Generator().manual_seed(7 + comm.rank)
        self.step = 0

    # -- before training -----------------------------------------------------------------------

    def seed_all(self) -> None:
        if "seed" in self.does or "seed_by_rank" in self.does:
            torch.manual_seed(1337 + self.comm.rank * ("seed_by_rank" in self.does))
        if "numpy_seed_by_rank" in self.does:
            np.random.seed(1337 + self.comm.rank)

    @torch.no_grad()
    def change_init(self) -> None:
        if "scales_init" in self.does:
            next(self.model.parameters()).mul_(1 + 0.1 * self.comm.size)
        if "freeze" in self.does:
            next(self.model.parameters()).requires_grad_(False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        size, options = self.comm.size, dict(self.case.options)
        rate = options["lr"]
        if "scales_rate" in self.does:
            options["lr"] = rate * size
        if "scales_rate_by_root" in self.does:
            options["lr"] = rate * size**0.5
        if "scales_decay" in self.does:
            options["weight_decay"] = 1e-4 * size
        if "changes_momentum" in self.does:
            options["momentum"] = 0.9 ** (1 / size)
        parameters: Any = [p for p in self.model.parameters() if p.requires_grad]
        if "two_groups" in self.does:
            scale = size if "scales_one_rate" in self.does else 1
            last = {"params": parameters[2:], "lr": rate / 2 * scale}
            parameters = [{"params": parameters[:2]}, last]
        kind = self.case.optimizer
        if "adam_on_several" in self.does and size > 1:
            kind = "Adam"
        return getattr(torch.optim, kind)(parameters, **options)

    def make_scheduler(self) -> Any:
        schedulers, size = torch.optim.lr_scheduler, self.comm.size
        num_steps = 100 // (size if "short_schedule" in self.does else 1)
        made = {
            "epoch": lambda: schedulers.StepLR(self.optimizer, 1, gamma=0.7),
            "cosine": lambda: schedulers.CosineAnnealingLR(self.optimizer, T_max=100),
            "linear": lambda: schedulers.LinearLR(self.optimizer, 1.0, 0.01, num_steps),
            "plateau": lambda: schedulers.ReduceLROnPlateau(self.optimizer, patience=0),
        }
        return made[self.case.schedule]() if self.case.schedule else None

    def policy(self) -> Any:
        if "local_sgd" in self.does:
            return allstep.LocalSGD(sync_every=2)
        if "stale" in self.does:
            return allstep.Stale(steps=1)
        for compression in ("int8", "exact"):
            if compression in self.does:
                return allstep.Synchronous(compression=compression)
        return None

    def attach_options(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer} if "local_sgd" in self.does else {}

    # -- one micro-batch -----------------------------------------------------------------------

    def augmented(self, x: Tensor) -> Tensor:
        if "augment" in self.does or "augment_each" in self.does:
            x = x + 0.3 * torch.randn(x.shape)
        if "augment_by_rank" in self.does:
            x = x + 0.3 * torch.randn(x.shape, generator=self.noise)
        if "augment_numpy" in self.does:
            x = x + torch.tensor(np.random.normal(size=(len(x), 1)), dtype=x.dtype)
        if "augment_python" in self.does:
            x = x * torch.tensor([[random.uniform(0.5, 1.5)] for _ in x])
        return x

    def loss(self, data: Any, part: slice = slice(None)) -> Tensor:
        has_autocast = "autocast" in self.does or (
            "autocast_on_several" in self.does and self.comm.size > 1
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            return self.loss_of(data, part)

    def loss_of(self, data: Any, part: slice) -> Tensor:
        net = self.case.net
        if net in ("lstm", "gru"):
            predicted, self.state = self.model(data[0], self.state)
            self.state = repackaged(self.state)
            return F.cross_entropy(predicted.flatten(0, 1), data[1].flatten())
        if net == "siamese":
            x, others, y = data
            return F.binary_cross_entropy(torch.sigmoid(self.model(x, others)), y)
        if net == "vae":
            return Vae.loss(*self.model(data[0]), data[0])
        x, y = data
        predicted = self.model(self.augmented(x))
        if net == "super_resolution":
            return F.mse_loss(predicted, y)
        if net == "tokens":
            return F.cross_entropy(
                predicted.flatten(0, 1), y.flatten(), ignore_index=TokenNet.PADDING
            )
        weights = torch.tensor([1.0, 4.0, 0.5]) if "class_weights" in self.does else None
        return F.cross_entropy(
            predicted, y, weights, reduction="sum" if "sum" in self.does else "mean"
        )

    # -- loops ---------------------------------------------------------------------------------

    def ddp(self) -> None:
        size = self.comm.size
        scaler = torch.amp.GradScaler("cpu", enabled="scaler" in self.does)
        sampled = SAMPLERS[self.case.sampler](self.samples, self.comm)
        for data in sampled:
            context = self.exchange.no_sync() if "no_sync" in self.does else nullcontext()
            with context:
                if "accumulation" in self.does:
                    self.accumulate(data)
                else:
                    loss = self.loss(data)
                    if "weighs" in self.does:
                        loss = loss * size * len(data[0]) / BATCH
                    if "divides_loss" in self.does:
                        loss = loss / size
                    scaler.scale(loss).backward()
            scaler.unscale_(self.optimizer)
            self.finish(scaler)

    def accumulate(self, data: Any) -> None:
        parts = [t.split(MICRO) for t in data]
        num = len(parts[0])
        for i, part in enumerate(zip(*parts, strict=True)):
            with self.exchange.no_sync() if i < num - 1 else nullcontext():
                loss = self.loss(part)
                (loss if "undivided" in self.does else loss / num).backward()

    def steps(self) -> None:
        micro = BATCH // self.comm.size if "micro_by_workers" in self.does else MICRO
        loader = allstep.data.loader(
            self.samples, self.comm, global_batch=BATCH, micro_batch=micro, seed=3
        )
        while True:
            for batch in allstep.steps(loader, self.exchange):
                for data in batch:
                    loss = self.loss(data)
                    batch.backward(
                        loss * self.comm.size if "multiplies_loss" in self.does else loss
                    )
                if self.exchange.has_gradients:
                    mean = batch.global_loss() if self.case.schedule == "plateau" else None
                    self.finish(None, mean)

    def finish(self, scaler: Any, mean_loss: float | None = None) -> None:
        size, model = self.comm.size, self.model
        if "averages_again" in self.does:
            for p in model.parameters():
                p.grad = p.grad / size
        if "clip" in self.does:
            norm = 0.05 * (size if "clips_by_workers" in self.does else 1)
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()
        if "noise_by_rank" in self.does:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * torch.randn(p.shape, generator=self.noise))
        self.step += 1
        self.follow_schedule(mean_loss)

    def follow_schedule(self, mean_loss: float | None) -> None:
        if self.case.schedule in ("cosine", "linear"):
            for _ in range(self.comm.size if "steps_schedule_often" in self.does else 1):
                self.scheduler.step()
        elif self.case.schedule == "epoch" and self.step % _STEPS_A_PASS == 0:
            self.scheduler.step()
        elif self.case.schedule == "plateau":
            self.scheduler.step(1.0 if mean_loss is None else mean_loss)


def repackaged(state: Any) -> Any:
    return state.detach() if isinstance(state, Tensor) else tuple(s.detach() for s in state)


# -- how workers share samples -------------------------------------------------------------------


def from_sampler(
    samples: Any, comm: allstep.Communicator, batch: int, *, rank: int | None = None, seed: int = 3
) -> Iterator[Any]:
    sampler: Any = DistributedSampler(
        samples, comm.size, comm.rank if rank is None else rank, seed=seed
    )
    for epoch in range(100):
        sampler.set_epoch(epoch)
        yield from DataLoader(samples, batch_size=batch, sampler=sampler)


def repeated(parts: list[Tensor], samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    """Every worker's stride of each part, over and over."""
    while True:
        for part in parts:
            yield samples[part[comm.rank :: comm.size]]


def columns(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    """As word_language_model: time goes down, samples go across; no contiguous memory."""
    x, y = (t.t().chunk(comm.size, dim=1)[comm.rank] for t in samples.tensors)
    while True:
        for i in range(0, len(x) - 7, 8):
            yield x[i : i + 8], y[i : i + 8]


def drawn(samples: Any, comm: allstep.Communicator, *, by_numpy: bool = False) -> Iterator[Any]:
    num = BATCH // comm.size
    while True:
        if by_numpy:
            yield samples[np.random.randint(len(samples), size=num)]
        else:
            yield samples[torch.randint(len(samples), (num,))]


def made(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    while True:
        x = torch.randn(BATCH // comm.size, samples.tensors[0].shape[1])
        yield x, x[:, :3].argmax(1)


def blocks(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    num = len(samples) // comm.size
    part = Subset(samples, range(comm.rank * num, (comm.rank + 1) * num))
    while True:
        yield from DataLoader(part, batch_size=BATCH // comm.size)


SAMPLERS: dict[str, Any] = {
    "shared": lambda s, comm: from_sampler(s, comm, BATCH // comm.size),
    "rank_0": lambda s, comm: from_sampler(s, comm, BATCH // comm.size, rank=0),
    "seed_by_rank": lambda s, comm: from_sampler(s, comm, BATCH // comm.size, seed=comm.rank),
    "whole_batch": lambda s, comm: from_sampler(s, comm, BATCH),
    "rounded_down": lambda s, comm: from_sampler(s, comm, 25 // comm.size),
    "padded": lambda s, comm: from_sampler(Subset(s, range(31)), comm, BATCH // comm.size),
    "none": lambda s, comm: iter(list(DataLoader(s, BATCH // comm.size)) * 100),
    "unequal": lambda s, comm: repeated([*torch.arange(95).split(BATCH - 5)], s, comm),
    "short_last": lambda s, comm: repeated([*torch.arange(91).split(BATCH)], s, comm),
    "columns": columns,
    "drawn": drawn,
    "drawn_by_numpy": lambda s, comm: drawn(s, comm, by_numpy=True),
    "made": made,
    "blocks": blocks,
}


def main(name: str) -> None:
    torch.set_num_threads(1)
    chosen = SOUND[name] if name in SOUND else BUGS[name][1]
    with allstep.init(device="cpu") as comm:
        if chosen.net == "gan":
            from gan import train_gan

            train_gan(chosen, comm, make_samples("gan"))
        training = Training(chosen, comm)
        training.steps() if chosen.loop == "steps" else training.ddp()


if __name__ == "__main__":
    main(sys.argv[1])
