"""The digits as the frameworks' own pages train them: in DistributedDataParallel, a loader each.

python -m tests.helpers.plain_ddp fabric FILE

Two workers. FILE gets the models, and what `attach` said to a wrapped one. Samples come in order
and without dropout, and all batches are full, so that only what a batch's samples share is left to
differ from one worker.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, Subset

import allstep

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 1440, 120, 2
WORKERS = 2


def nets() -> dict[str, nn.Module]:
    def net(norm: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        ).double()

    return {"batch norm": net(nn.BatchNorm2d(8)), "no norm": net(nn.Identity())}


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def samples() -> Subset[Any]:
    from examples.frameworks import digits

    train_set, _ = digits.data()
    return Subset(train_set, range(NUM_SAMPLES))


def loader(workers: int) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=GLOBAL_BATCH // workers)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[list[Tensor]],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> dict[str, Tensor]:
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            backward(cross_entropy(model(x), y))
            optimizer.step()
    return {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}


def refusal(model: nn.Module) -> str:
    """What `attach` says to a model that a framework has wrapped."""
    try:
        allstep.attach(model, allstep.init())
    except allstep.UsageError as error:
        return str(error)
    return "attached"


def alone() -> dict[str, dict[str, Tensor]]:
    return {name: train(net, sgd(net), loader(1)) for name, net in nets().items()}


def with_fabric(save: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(devices=WORKERS, strategy="ddp")
    fabric.launch()
    found: dict[str, Any] = {}
    for name, net in nets().items():
        model, optimizer = fabric.setup(net, sgd(net))
        found["refusal"] = refusal(model)
        batches = fabric.setup_dataloaders(loader(WORKERS))
        found[name] = train(model, optimizer, batches, fabric.backward)
    if fabric.is_global_zero:
        torch.save(found, save)


def with_accelerate(save: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for name, net in nets().items():
        model, optimizer, batches = accelerator.prepare(net, sgd(net), loader(WORKERS))
        found["refusal"] = refusal(model)
        found[name] = train(model, optimizer, batches, accelerator.backward)
    if accelerator.is_main_process:
        torch.save(found, save)
    accelerator.end_training()  # without it torch may abort as the process ends


def with_lightning(save: Path) -> None:
    import lightning

    class Digits(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def on_fit_start(self) -> None:
            self.refusal = refusal(self.trainer.model)

        def train_dataloader(self) -> DataLoader[Any]:
            # Lightning's own sampler shuffles whatever it is given.
            sampler = DistributedSampler(samples(), shuffle=False)
            return DataLoader(samples(), batch_size=GLOBAL_BATCH // WORKERS, sampler=sampler)

        def configure_optimizers(self) -> Optimizer:
            return sgd(self.net)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.net(x), y)

    found: dict[str, Any] = {}
    for name, net in nets().items():
        trainer = lightning.Trainer(
            devices=WORKERS, strategy="ddp", max_epochs=EPOCHS, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
        )  # fmt: skip
        module = Digits(net)
        trainer.fit(module)
        found |= {name: net.state_dict(), "refusal": module.refusal}
    if trainer.is_global_zero:
        torch.save(found, save)


def with_ray(save: Path) -> None:
    import ray
    from ray.train import ScalingConfig, get_context
    from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

    def work() -> None:
        found: dict[str, Any] = {}
        for name, net in nets().items():
            model = prepare_model(net)
            found["refusal"] = refusal(model)
            found[name] = train(model, sgd(model), prepare_data_loader(loader(WORKERS)))
        if get_context().get_world_rank() == 0:
            torch.save(found, save)

    ray.init(num_cpus=WORKERS)
    run_config = ray.train.RunConfig(storage_path=str(save.parent))
    TorchTrainer(
        work, scaling_config=ScalingConfig(num_workers=WORKERS), run_config=run_config
    ).fit()


if __name__ == "__main__":
    {
        "fabric": with_fabric,
        "accelerate": with_accelerate,
        "lightning": with_lightning,
        "ray": with_ray,
    }[sys.argv[1]](Path(sys.argv[2]))
