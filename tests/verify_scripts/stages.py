"""A net in stages that lie on all workers but the copies', trained along the axis of data.

`--factor` multiplies the gradient of the last stage's weight by the number of its workers.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep.nn import Pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--copies", type=int, default=1, help="of the net, where there are workers")
parser.add_argument("--factor", action="store_true")
options = parser.parse_args()

comm = allstep.init(device="cpu")
copies = min(options.copies, comm.size)
mesh = comm.mesh(data=copies, pipeline=comm.size // copies)
torch.manual_seed(0)
model = Pipeline(
    [lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.3))] * 4,
    mesh,
    loss=lambda output, batch: (output - batch[1]).square().mean(),
)
if options.factor and "3" in model.stages:
    model.stages["3"][0].weight.register_hook(lambda gradient: gradient * model.num_workers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
exchange = allstep.attach(model, mesh["data"])
torch.manual_seed(1)
samples = TensorDataset(*(torch.randn(44, 6) for _ in range(2)))
with allstep.data.loader(samples, mesh["data"], global_batch=20, micro_batch=4) as loader:
    for batch in allstep.steps(loader, exchange):
        batch.run(model)
        optimizer.step()
        optimizer.zero_grad()
