"""A model that is larger than one worker: each has some of the layers, the next one the next.

python examples/parallel_mlp.py
torchrun --nproc-per-node 2 examples/parallel_mlp.py
mpirun -n 3 python examples/parallel_mlp.py

Activations go forward from worker to worker, gradients come back the same way. The numbers are
the same on any number of workers.
"""

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import allstep
from allstep.comm.autograd import recv, send

EPOCHS = 12
BATCH = 50
WIDTHS = (64, 96, 64, 48, 10)


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data) / 16, torch.tensor(digits.target)


def layers() -> list[nn.Module]:
    """All layers, the same on every worker."""
    torch.manual_seed(0)
    linear = [nn.Linear(*widths, dtype=torch.float64) for widths in pairwise(WIDTHS)]
    return [nn.Sequential(layer, nn.ReLU()) for layer in linear[:-1]] + linear[-1:]


class Stage:
    """This worker's layers, between those of the worker before and those of the one after."""

    def __init__(self, comm: allstep.Communicator) -> None:
        all_layers = layers()
        begin, end = (len(all_layers) * (comm.rank + i) // comm.size for i in (0, 1))
        self.model = nn.Sequential(*all_layers[begin:end]).to(comm.device)
        self.comm = comm
        self.is_last = comm.rank == comm.size - 1

    def __call__(self, x: Tensor) -> Tensor:
        """Logits on the last worker; elsewhere what `backward` must be called on."""
        if self.comm.rank > 0:
            x = recv(self.comm, self.comm.rank - 1)
        y = self.model(x)
        return y if self.is_last else send(self.comm, y, self.comm.rank + 1)


def train(comm: allstep.Communicator) -> tuple[float, float]:
    """Test accuracy and the norm of all workers' parameters."""
    x, y = (tensor.to(comm.device) for tensor in data())
    stage = Stage(comm)
    optimizer = torch.optim.Adam(stage.model.parameters(), lr=0.003)
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)  # the same order on every worker
        for batch in torch.randperm(1500, generator=generator).split(BATCH):
            out = stage(x[batch])
            loss = cross_entropy(out, y[batch]) if stage.is_last else out
            loss.backward()  # waits for the gradient that the next worker sends back
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        out = stage(x[1500:])
    correct = (out.argmax(1) == y[1500:]).double().mean() if stage.is_last else torch.zeros(())
    squares = sum(p.detach().square().sum() for p in stage.model.parameters())
    accuracy, norm = comm.all_reduce(torch.stack([correct.double(), squares]).cpu()).tolist()
    return accuracy, norm**0.5


def main() -> None:
    with allstep.init() as comm:
        accuracy, norm = train(comm)
        if comm.rank == 0:
            print(f"test accuracy {accuracy:.4f}, parameters' norm {norm:.9f}")


if __name__ == "__main__":
    main()
