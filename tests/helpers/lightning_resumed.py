"""The example's training by Lightning, left in the middle of an epoch and gone on with.

python -m tests.helpers.lightning_resumed WORKERS FOLDER

Leaves at step 30 with the checkpoint that FOLDER then has; with one there, goes on to the end.
"""

import sys
from pathlib import Path

import lightning
from digits import EPOCHS
from lightning.pytorch.callbacks import ModelCheckpoint
from with_lightning import AllstepStrategy, Digits

STOP_AT = 30  # of 13 steps an epoch


def main(workers: int, folder: Path) -> None:
    middle = folder / "middle.ckpt"
    is_begun = middle.exists()
    saver = ModelCheckpoint(
        folder, "middle", every_n_train_steps=STOP_AT, save_on_train_epoch_end=False
    )
    trainer = lightning.Trainer(
        devices=workers,
        strategy=AllstepStrategy(),
        max_epochs=EPOCHS,
        max_steps=-1 if is_begun else STOP_AT,
        callbacks=[] if is_begun else [saver],
        enable_checkpointing=not is_begun,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), ckpt_path=str(middle) if is_begun else None)
    if is_begun:
        trainer.save_checkpoint(folder / "end.ckpt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
