"""A net whose wide layer torch's tensor parallelism divides, trained along the axis of data."""

import argparse

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

import allstep

parser = argparse.ArgumentParser()
parser.add_argument("--copies", type=int, default=1, help="of the net, where there are workers")
parser.add_argument("--inner-dropout", type=float, default=0.0, help="of features that are divided")
options = parser.parse_args()

comm = allstep.init(device="cpu")
copies = min(options.copies, comm.size)
mesh = comm.mesh(data=copies, tensor=comm.size // copies)
torch.manual_seed(0)
model = nn.Sequential(
    nn.LayerNorm(6),
    nn.Linear(6, 8),
    nn.GELU(),
    nn.Dropout(options.inner_dropout),
    nn.Linear(8, 6),
    nn.Dropout(0.3),
)
allstep.nn.tensor_parallel(model, mesh, {"1": ColwiseParallel(), "4": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
exchange = allstep.attach(model, mesh["data"])
torch.manual_seed(1)
samples = TensorDataset(*(torch.randn(44, 6) for _ in range(2)))
with allstep.data.loader(samples, mesh["data"], global_batch=12, micro_batch=4) as loader:
    for batch in allstep.steps(loader, exchange):
        for x, y in batch:
            batch.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
