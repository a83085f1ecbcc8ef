"""The digits by Ray Train, whose second worker is killed once; Ray starts both again.

python -m tests.helpers.ray_restarted FOLDER
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from digits import EPOCHS, GLOBAL_BATCH, MICRO_BATCH, data, net
from ray import train
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy

import allstep

KILL_AT = 35  # a step between two checkpoints, in the middle of an epoch


def train_loop_per_worker(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    comm = allstep.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        data()[0], comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
    )
    state = {"optimizer": optimizer}
    saved = allstep.AutoCheckpoint(folder / "run", loader, exchange, state=state, every_steps=10)
    with saved as checkpoint:
        for _ in checkpoint.epochs(EPOCHS):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                if batch.step == KILL_AT and comm.rank == 1 and not (folder / "killed").exists():
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                for x, y in batch:
                    batch.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    if comm.rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    comm.close()


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=2)
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"folder": folder},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=folder, failure_config=train.FailureConfig(max_failures=1)
        ),
    ).fit()
