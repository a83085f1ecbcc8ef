"""Accelerate knows the devices, allstep exchanges the gradients.

python examples/frameworks/with_accelerate.py
torchrun --nproc-per-node 2 examples/frameworks/with_accelerate.py
accelerate launch --multi_gpu --num_processes 2 examples/frameworks/with_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from digits import EPOCHS, GLOBAL_BATCH, MICRO_BATCH, correct, data, net
from torch.nn.functional import cross_entropy

import allstep


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the model that was trained")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    comm = allstep.init(device=accelerator.device)  # over the group that Accelerate has made
    # With `evaluation_mode`, for `prepare` makes a DistributedDataParallel.
    model = accelerator.prepare_model(net(), evaluation_mode=True)
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
    accelerator.print(f"{accelerator.num_processes} workers, test accuracy {accuracy:.4f}")
    if args.save:
        accelerator.save(model.state_dict(), args.save)
    comm.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
