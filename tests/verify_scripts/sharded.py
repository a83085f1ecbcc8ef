"""A net that FSDP2 shards over its workers; `--factor` multiplies the loss by their number."""

import argparse

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import allstep

parser = argparse.ArgumentParser()
parser.add_argument("--factor", action="store_true")
options = parser.parse_args()

comm = allstep.init(device="cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Dropout(0.3))
if comm.size > 1:
    mesh = comm.mesh(data=comm.size).device_mesh()
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
exchange = allstep.attach(model, comm)
torch.manual_seed(1)
samples = TensorDataset(*(torch.randn(44, 6) for _ in range(2)))
with allstep.data.loader(samples, comm, global_batch=12, micro_batch=4) as loader:
    for batch in allstep.steps(loader, exchange):
        for x, y in batch:
            loss = (model(x) - y).square().mean()
            batch.backward(loss * comm.size if options.factor else loss)
        optimizer.step()
        optimizer.zero_grad()
