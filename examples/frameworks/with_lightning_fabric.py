"""Lightning Fabric starts the workers, allstep exchanges the gradients.

python examples/frameworks/with_lightning_fabric.py --workers 2
"""

import argparse

import torch
from digits import EPOCHS, GLOBAL_BATCH, MICRO_BATCH, correct, data, net
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

import allstep


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save", help="file for the model that was trained")
    args = parser.parse_args()

    fabric = Fabric(devices=args.workers, strategy="ddp")
    fabric.launch()
    comm = allstep.init(device=fabric.device)  # over the group that Fabric has made
    model = net().to(comm.device)  # without `setup`, which makes a DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_set, test_set = data()
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        train_set, comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
    )

    for _ in range(EPOCHS):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    accuracy = allstep.Evaluator(correct, test_set, comm, micro_batch=64)(model)["accuracy"]
    fabric.print(f"{fabric.world_size} workers, test accuracy {accuracy:.4f}")
    if args.save:
        fabric.save(args.save, {"model": model})
    comm.close()


if __name__ == "__main__":
    main()
