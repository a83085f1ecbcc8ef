"""Ray Train starts the workers, allstep exchanges the gradients.

python examples/frameworks/with_ray.py --workers 2
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import ray
import torch
from digits import EPOCHS, GLOBAL_BATCH, MICRO_BATCH, correct, data, net
from ray import train
from ray.train.torch import TorchTrainer, get_device
from torch.nn.functional import cross_entropy

import allstep


def train_loop_per_worker(config):
    comm = allstep.init(device=get_device())  # over the group that Ray Train has made
    model = net().to(comm.device)  # without `prepare_model`, which makes a DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train_set, test_set = data()
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        train_set, comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
    )
    evaluate = allstep.Evaluator(correct, test_set, comm, micro_batch=64)

    for _ in range(EPOCHS):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        report(model, evaluate(model))
    comm.close()


def report(model, metrics):
    with TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report(metrics, checkpoint=checkpoint)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--storage", help="folder for Ray's results; ~/ray_results if not given")
    args = parser.parse_args()

    ray.init(num_cpus=args.workers)  # on this machine, whose cores Ray would count
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 0.1},
        scaling_config=train.ScalingConfig(
            num_workers=args.workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=train.RunConfig(name="digits", storage_path=args.storage),
    )
    result = trainer.fit()
    print(f"{args.workers} workers, test accuracy {result.metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
