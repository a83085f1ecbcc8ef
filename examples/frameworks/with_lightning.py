"""Lightning's Trainer runs the loop, allstep exchanges the gradients.

python examples/frameworks/with_lightning.py --workers 2
"""

import argparse

import lightning
import torch
from digits import EPOCHS, GLOBAL_BATCH, MICRO_BATCH, correct, data, net
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy

import allstep


class AllstepStrategy(DDPStrategy):
    """The processes and the group of "ddp", without DistributedDataParallel around the model."""

    def configure_ddp(self):
        self.comm = allstep.init(device=self.root_device)  # over the group that Lightning has made
        self.exchange = allstep.attach(self.model, self.comm)

    def lightning_module_state_dict(self):
        self.exchange.sync_buffers()  # within an epoch, batch norm's are each worker's own
        return super().lightning_module_state_dict()


class Steps:
    """The global batches of an epoch, as the Trainer wants them.

    It reads ahead where there is no length, and warns where there is no state.
    """

    def __init__(self, loader, exchange):
        self.loader, self.exchange = loader, exchange
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.running = allstep.steps(self.loader, self.exchange)
        return self.running

    def end_epoch(self):
        """The Trainer counts, and does not ask `steps` for the end, where it would do this."""
        self.running.close()
        self.exchange.sync_buffers()


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # a global batch has several micro-batches
        self.net = net()
        self.train_set, self.test_set = data()
        self.position = None  # in the data, where `train_dataloader` begins

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        strategy = self.trainer.strategy
        loader = allstep.data.loader(
            self.train_set, strategy.comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        if self.position is not None:
            loader.load_state_dict(self.position)
        self.steps = Steps(loader, strategy.exchange)
        self.evaluate = allstep.Evaluator(correct, self.test_set, strategy.comm, micro_batch=64)
        return self.steps

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x, y in batch:
            batch.backward(cross_entropy(self.net(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def on_save_checkpoint(self, checkpoint):
        """The Trainer restores a loader's state within an epoch only."""
        checkpoint["position"] = self.steps.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.position = checkpoint["position"]

    def on_train_epoch_end(self):
        self.steps.end_epoch()
        self.position = self.steps.state_dict()
        self.log("accuracy", self.evaluate(self.net)["accuracy"], prog_bar=True, sync_dist=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save", help="file for the model that was trained")
    args = parser.parse_args()

    trainer = lightning.Trainer(
        devices=args.workers, strategy=AllstepStrategy(), max_epochs=EPOCHS, logger=False
    )
    trainer.fit(Digits())
    accuracy = float(trainer.callback_metrics["accuracy"])
    trainer.print(f"{trainer.world_size} workers, test accuracy {accuracy:.4f}")
    if args.save:
        trainer.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
