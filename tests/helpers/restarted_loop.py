"""A user's own loop that is started again and again, until it has come to its end.

As a script: `restarted_loop.py RUN_DIR RESULT`; in its first life under torchrun its last worker
kills itself.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import allstep
from allstep import Communicator
from tests.helpers import same_model

NUM_EPOCHS = 3
STEPS_PER_EPOCH = 4
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH

Moment = tuple[str, int]
"""A place in the loop, "micro-batch", "update" or "epoch", and how many were before."""


def nothing(_: Moment) -> None:
    """What happens in an undisturbed run."""


def train(
    comm: Communicator,
    run_dir: str | None,
    happens: Callable[[Moment], None] = nothing,
    *,
    policy: allstep.ExchangePolicy | None = None,
    updates_every: int = 1,
    draws: bool = True,
    resumes: bool = True,
    elastic: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains in a folder: float64, momentum, dropout, batch norm, a schedule by epochs.

    Args:
        comm: the workers.
        run_dir: of the checkpoints.
        happens: called at each moment of the loop.
        policy: of the exchange.
        updates_every: global batches whose gradients make one update.
        draws: False leaves out what takes random numbers, which ranks that are threads share.
        resumes: False for the control that restores the model only.
        elastic: keep the checkpoints by Elastic, whose sums are exact, instead of AutoCheckpoint.
        options: of that.

    Returns:
        The model, the last rate, the steps that this life has made, and what ended it.
    """
    task = same_model.make_task("sgd", augment=draws)
    for module in task.model.modules():
        if isinstance(module, torch.nn.Dropout) and not draws:
            module.p = 0.0
    model, optimizer = task.model.to(comm.device), task.optimizer(task.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    if elastic:
        policy = allstep.Synchronous(compression="exact")
    exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
    loader = allstep.data.loader(
        task.train_set,
        comm,
        global_batch=same_model.GLOBAL_BATCH,
        micro_batch=same_model.MICRO_BATCH,
        seed=11,
    )
    if run_dir is not None and not resumes:
        restore_the_model_only(comm, run_dir, model)
        run_dir += "-anew"
    steps, count = [], 0
    state = {"optimizer": optimizer, "scheduler": scheduler}
    keeper: allstep.AutoCheckpoint | allstep.Elastic
    if elastic:
        keeper = allstep.Elastic(loader, exchange, state=state, run_dir=run_dir, **options)
    else:
        keeper = allstep.AutoCheckpoint(run_dir, loader, exchange, state=state, **options)
    given: dict[str, Any] = {"elastic" if elastic else "checkpoint": keeper}
    with keeper:
        for epoch in keeper.epochs(NUM_EPOCHS):
            for batch in allstep.steps(loader, exchange, **given):
                for data in batch:
                    happens(("micro-batch", count))
                    batch.backward(same_model.loss_of(model, data))
                    count += 1
                happens(("update", batch.step))
                if (batch.step + 1) % updates_every == 0 and exchange.has_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                steps.append(batch.step)
            if keeper.interrupted is None:
                scheduler.step()
                happens(("epoch", epoch))
    exchange.detach()
    loader.close()
    return {
        "model": model.state_dict(),
        "rate": optimizer.param_groups[0]["lr"],
        "steps": steps,
        "interrupted": keeper.interrupted,
    }


def restore_the_model_only(comm: Communicator, run_dir: str, model: torch.nn.Module) -> None:
    """What a loop by hand may content itself with."""
    found = allstep.train.Checkpoints(Path(run_dir) / "checkpoints", comm).load_latest()
    assert found is not None
    model.load_state_dict(found[1]["models"][0])


def kill_at(
    moment: Moment | None, number: signal.Signals, ranks: tuple[int, ...], comm: Communicator
) -> Callable[[Moment], None]:
    """The process sends itself a signal there."""

    def happens(now: Moment) -> None:
        if now == moment and comm.rank in ranks:
            os.kill(os.getpid(), number)

    return happens


def main(run_dir: str, result: str) -> None:
    with allstep.init(device="cpu") as comm:
        is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        moment = ("update", 6) if is_first_life else None
        happens = kill_at(moment, signal.SIGKILL, (comm.size - 1,), comm)
        found = train(comm, run_dir, happens, every_steps=2)
        if comm.rank == 0:
            torch.save(found, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
