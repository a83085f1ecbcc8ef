"""A user's own script with an elastic loop: `elastic_script.py OUT HELD_AT NUM_EPOCHS [FAILS]`.

At each step of HELD_AT, such as 5,8, it waits for the file OUT/goes_on-STEP. Those that FAILS
names, `rank 0` or `all`, fail behind the training.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import allstep
from tests.helpers.elastic_workers import wait_for_a_look


def main(out: Path, held_at: list[int], num_epochs: int, fails: str = "") -> None:
    comm = allstep.init(device="cpu", timeout_s=600.0)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
    loader = allstep.data.loader(samples, comm, global_batch=16, micro_batch=4)
    with allstep.Elastic(loader, exchange, state={"optimizer": optimizer}) as elastic:
        for _ in elastic.epochs(num_epochs):
            for batch in allstep.steps(loader, exchange, elastic=elastic):
                if batch.step in held_at:
                    (out / f"held-{batch.step}-{os.getpid()}").touch()
                    while not (out / f"goes_on-{batch.step}").exists():
                        time.sleep(0.01)
                    wait_for_a_look()
                for x, y in batch:
                    batch.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    if fails in ("all", f"rank {comm.rank}"):
        raise OSError("no room for the model")
    torch.save(model.state_dict(), out / f"model-{os.getpid()}.pt")
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2].split(","))), int(sys.argv[3]), *sys.argv[4:])
