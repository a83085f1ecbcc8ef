"""The example's training by Lightning, left with a checkpoint and gone on with.

python -m tests.helpers.lightning_resumed WORKERS FOLDER WHERE

Leaves in the middle of an epoch or at an epoch's end, as WHERE says, with the checkpoint that
FOLDER then has; with one there, goes on to the end. "reloaded" is an end, with loaders that are
made anew in each epoch before it.
"""

import sys
from pathlib import Path
from typing import Any

import lightning
from digits import EPOCHS
from lightning.pytorch.callbacks import ModelCheckpoint
from with_lightning import AllstepStrategy, Digits

STOP_AT: dict[str, dict[str, Any]] = {
    "middle": {"max_steps": 30},  # of 13 an epoch
    "end": {"max_epochs": 2},
    "reloaded": {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
}
SAVE_AT: dict[str, dict[str, Any]] = {
    "middle": {"every_n_train_steps": 30, "save_on_train_epoch_end": False},
    "end": {},
    "reloaded": {},
}


def main(workers: int, folder: Path, where: str) -> None:
    saved = folder / "begun.ckpt"
    is_begun = saved.exists()
    saver = ModelCheckpoint(folder, "begun", **SAVE_AT[where])
    stop_at = {"max_epochs": EPOCHS} if is_begun else STOP_AT[where]
    trainer = lightning.Trainer(
        devices=workers,
        strategy=AllstepStrategy(),
        callbacks=[] if is_begun else [saver],
        enable_checkpointing=not is_begun,
        enable_progress_bar=False,
        logger=False,
        **stop_at,
    )
    trainer.fit(Digits(), ckpt_path=str(saved) if is_begun else None)
    if is_begun:
        trainer.save_checkpoint(folder / "end.ckpt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
