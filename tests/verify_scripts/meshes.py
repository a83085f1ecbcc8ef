"""A net that is divided over the axis `tensor` of a mesh and trained along `data`; right, unless
asked for a bug. By `tensor_parallel`, or by hand as with `allstep.comm.autograd`.

torchrun --nproc-per-node 2 meshes.py --tensor 2 --by hand --bug norm_not_summed
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

import allstep
from allstep.comm.autograd import all_reduce
from allstep.nn import replicated

WIDTH, HIDDEN = 6, 8
BUGS = {
    "none": ("tensor_parallel", "hand"),
    "norm_not_summed": ("hand",),
    "norm_summed_twice": ("tensor_parallel",),
    "whole_loss_each": ("hand",),
    "loss_divided_twice": ("tensor_parallel", "hand"),
    "other_slice": ("tensor_parallel", "hand"),
    "same_slice": ("hand",),
    "bias_of_each": ("hand",),
    "mask_of_each": ("tensor_parallel", "hand"),
    "update_of_each": ("tensor_parallel", "hand"),
}


class Mask(nn.Module):
    """Dropout that draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self._generator) > 0.3)


class DividedMLP(nn.Module):
    """Some hidden units of a normalised MLP on each worker along an axis."""

    def __init__(self, whole: nn.Sequential, comm: allstep.Communicator, bug: str) -> None:
        super().__init__()
        self.norm, self.first, self.second = whole[0], whole[1], whole[3]
        self._comm, self._bug = comm, bug
        units = torch.arange(HIDDEN).chunk(comm.size)[_part(comm, bug)]
        self.first.weight = nn.Parameter(self.first.weight[units].detach())
        self.first.bias = nn.Parameter(self.first.bias[units].detach())
        self.second.weight = nn.Parameter(self.second.weight[:, units].detach())

    def forward(self, x: Tensor) -> Tensor:
        norm, bias = [self.norm.weight, self.norm.bias], self.second.bias
        if self._bug != "norm_not_summed":
            norm = replicated(self._comm, norm)
        hidden = torch.layer_norm(x, (WIDTH,), *norm)
        hidden = nn.functional.gelu(self.first(hidden))
        if self._bug == "bias_of_each":
            return all_reduce(self._comm, self.second(hidden))
        (bias,) = replicated(self._comm, [bias])
        return all_reduce(self._comm, hidden @ self.second.weight.t()) + bias


def _part(comm: allstep.Communicator, bug: str) -> int:
    place = {"other_slice": (comm.rank + 1) % comm.size, "same_slice": 0}
    return place.get(bug, comm.rank)


def make_model(mesh: "allstep.Mesh", by: str, bug: str) -> nn.Module:
    """Three layers and dropout; the same values for any mesh."""
    comm = mesh["tensor"]
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    )
    mask = Mask(comm.rank) if bug == "mask_of_each" else nn.Dropout(0.3)
    if by == "hand":
        return nn.Sequential(DividedMLP(whole, comm, bug), mask)
    if bug == "other_slice" and comm.size > 1:
        with torch.no_grad():
            whole[1].weight.copy_(whole[1].weight.roll(HIDDEN // comm.size, 0))
    if bug == "norm_summed_twice":
        whole[0].weight.register_hook(lambda gradient: gradient * comm.size)
    allstep.nn.tensor_parallel(whole, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return nn.Sequential(whole, mask)


def train(comm: "allstep.Communicator", tensor: int, by: str, bug: str) -> None:
    """All of it, on workers of which `tensor` share a copy."""
    mesh = comm.mesh(data=comm.size // tensor, tensor=tensor)
    model = make_model(mesh, by, bug)
    divisor = 1 if by == "tensor_parallel" or bug == "whole_loss_each" else tensor
    if bug == "loss_divided_twice":
        divisor *= tensor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.exchange.attach(model, mesh["data"])
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(*(torch.randn(44, WIDTH, generator=generator) for _ in range(2)))
    with allstep.data.loader(samples, mesh["data"], global_batch=12, micro_batch=4) as loader:
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward((model(x) - y).square().mean() / divisor)
            optimizer.step()
            if bug == "update_of_each":
                with torch.no_grad():
                    next(model.parameters()).add_(1e-3 * mesh.coordinates["tensor"])
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1, help="workers that share a copy")
    parser.add_argument("--by", choices=["tensor_parallel", "hand"], default="tensor_parallel")
    parser.add_argument("--bug", choices=BUGS, default="none")
    known = parser.parse_args()
    train(allstep.init(device="cpu"), known.tensor, known.by, known.bug)


if __name__ == "__main__":
    main()
