"""Small trainings in the forms that users write, sound or with one silent bug; which one is told.

    torchrun --nproc-per-node 2 corpus.py NAME

Sound ones and bugs are the same trainings, a `Case` of `cases.py` each. PyTorch's own examples lend
their forms: mnist, word_language_model, dcgan, vae, siamese_network, super_resolution.
"""

import random
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cases import BUGS, LARGE, REFUSED, SOUND, Case
from nets import NETS, TokenNet, Vae, make_samples
from samplers import BATCH, SAMPLERS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep

MICRO = 4
_LARGE_BATCH, _LARGE_MICRO = 128, 32
_STEPS_A_PASS = 4


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

    def loss(self, data: Any) -> Tensor:
        has_autocast = "autocast" in self.does or (
            "autocast_on_several" in self.does and self.comm.size > 1
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            return self.loss_of(data)

    def loss_of(self, data: Any) -> Tensor:
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
        if "nearly_equal_weights" in self.does:
            weights = torch.tensor([1.0, 1.02, 0.98])
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
        is_large = self.case.net == "fashion"
        batch, micro = (_LARGE_BATCH, _LARGE_MICRO) if is_large else (BATCH, MICRO)
        if "micro_by_workers" in self.does:
            micro = batch // self.comm.size
        loader = allstep.data.loader(
            self.samples, self.comm, global_batch=batch, micro_batch=micro, seed=3
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
        num_steps = 100 if "long_epochs" in self.does else _STEPS_A_PASS
        if self.case.schedule in ("cosine", "linear"):
            for _ in range(self.comm.size if "steps_schedule_often" in self.does else 1):
                self.scheduler.step()
        elif self.case.schedule == "epoch" and self.step % num_steps == 0:
            self.scheduler.step()
        elif self.case.schedule == "plateau":
            self.scheduler.step(1.0 if mean_loss is None else mean_loss)


def repackaged(state: Any) -> Any:
    return state.detach() if isinstance(state, Tensor) else tuple(s.detach() for s in state)


def main(name: str) -> None:
    torch.set_num_threads(1)
    bugs = {name: case for name, (_, case) in (BUGS | REFUSED).items()}
    chosen = (SOUND | LARGE | bugs)[name]
    with allstep.init(device="cpu") as comm:
        if chosen.net == "gan":
            from gan import train_gan

            train_gan(chosen, comm, make_samples("gan"))
        training = Training(chosen, comm)
        training.steps() if chosen.loop == "steps" else training.ddp()


if __name__ == "__main__":
    main(sys.argv[1])
