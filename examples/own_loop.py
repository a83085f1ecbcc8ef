"""Your own loop, on any number of workers: the digits by a small conv net.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
mpirun -n 2 python examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import allstep

EPOCHS = 6


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64)[:, None] / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def correct(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


def main() -> None:
    comm = allstep.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10),
    ).to(comm.device, torch.float64)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_set, test_set = data()
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(train_set, comm, global_batch=96, micro_batch=16, seed=0)

    for _ in range(EPOCHS):
        for batch in allstep.steps(loader, exchange):  # one global batch
            for x, y in batch:  # this worker's micro-batches, random state set
                batch.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    evaluate = allstep.Evaluator(correct, test_set, comm, micro_batch=64)
    accuracy = evaluate(model)["accuracy"]
    norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
    if comm.rank == 0:
        print(f"test accuracy {accuracy:.4f}, parameters' norm {norm:.9f}")
    comm.close()


if __name__ == "__main__":
    main()
