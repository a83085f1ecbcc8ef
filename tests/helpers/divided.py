"""Models that are divided over workers, compared with those of one worker; most are `text`'s."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.cli.main import main
from allstep.comm import fsdp_modules, shards_of, stages_of
from allstep.errors import CheckpointError
from allstep.recipes.text import Text
from tests.helpers.processes import run_processes
from tests.helpers.small_recipes import small_text

Found = tuple[dict[str, Tensor], allstep.train.RunReport]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters with the parts of all workers that share the model. Collective."""
    shards = shards_of(model)
    state = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()
        for name, x in model.state_dict().items()
    }
    for name, shard in shards.items():
        state[name] = torch.cat(shard.comm.all_gather(state[name].contiguous()), shard.dim)
    return state


def run_epochs(
    run_epoch: Callable[[allstep.AutoCheckpoint | None], None],
    num_epochs: int,
    run_dir: Path | None,
    loader: Any,
    exchange: allstep.Exchange,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Calls it for each epoch; with a folder, for those that a checkpoint there leaves."""
    if run_dir is None:
        for _ in range(num_epochs):
            run_epoch(None)
        return
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as checkpoint:
        for _ in checkpoint.epochs(num_epochs):
            run_epoch(checkpoint)


def save_whole(model: nn.Module, run_dir: Path) -> None:
    """A checkpoint of one worker's loop, after a step."""
    exchange, loader, checkpoint = _own_loop(model, Communicator.single_process(), run_dir)
    with loader, checkpoint:
        for _ in checkpoint.epochs(1):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for _ in batch:
                    batch.backward(sum(p.square().sum() for p in model.parameters()))


def misfit(model: nn.Module, data: Communicator, run_dir: Path) -> str:
    """Why the model can't go on from that of `save_whole`."""
    exchange, loader, checkpoint = _own_loop(model, data, run_dir)
    with loader, pytest.raises(CheckpointError) as error, checkpoint:
        pass
    exchange.detach()
    return str(error.value)


def _own_loop(
    model: nn.Module, data: Communicator, run_dir: Path
) -> tuple[allstep.Exchange, allstep.data.MapLoader, allstep.AutoCheckpoint]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = allstep.attach(model, data)
    samples = TensorDataset(torch.ones(data.size))
    loader = allstep.data.loader(samples, data, global_batch=data.size, micro_batch=1)
    state = {"optimizer": optimizer}
    return exchange, loader, allstep.AutoCheckpoint(run_dir, loader, exchange, state=state)


def divisible_text(folder: Path, **changes: Any) -> Text:
    """Five micro-batches a global batch, which two copies of the model can't share out evenly."""
    usual: dict[str, Any] = {
        "global_batch": 30,
        "depth": 4,
        "heads": 4,
        "dropout": 0.1,
        "clip_norm": 0.2,
        "threads": 1,
        "held_out": 0.03,
    }
    return small_text(folder, **usual | changes)


def train_text(
    comm: Communicator,
    recipe: Text,
    run_dir: Path,
    spoil: Callable[[nn.Module], None] | None = None,
    resume: bool = False,
) -> Found:
    """What a worker comes to, with the shards of those that share its copy of the model."""
    task = recipe.task(comm)
    assert bool(shards_of(task.model)) == (comm.size > 1 and recipe.tensor_parallel > 1)
    assert bool(stages_of(task.model)) == (comm.size > 1 and recipe.pipeline > 1)
    assert bool(fsdp_modules(task.model)) == (comm.size > recipe.copy_size and recipe.shard)
    if spoil is not None:
        spoil(task.model)
    report = allstep.fit(task, recipe, comm, run_dir, resume=resume)
    return whole_state(task.model), report


def merged(found: Sequence[Found]) -> Found:
    """The workers' parts as one model; what several of them have must be the same."""
    whole: dict[str, Tensor] = {}
    for state, report in found:
        assert all(torch.equal(state[name], whole.setdefault(name, state[name])) for name in state)
        assert report.metrics == found[0][1].metrics
    return whole, found[0][1]


def _train_each(comm: Communicator, *runs: tuple[Any, ...]) -> list[Found]:
    return [train_text(comm, *arguments) for arguments in runs]


def trainings_on(size: int, *runs: tuple[Any, ...]) -> list[Found]:
    """`train_text` with each of the arguments, one after the other on so many workers."""
    if size == 1:
        return _train_each(Communicator.single_process(), *runs)
    found = run_processes(size, _train_each, *runs, timeout_s=200)
    return [merged(of_run) for of_run in zip(*found, strict=True)]


def train_on(size: int, *arguments: Any) -> Found:
    """`train_text` on so many workers."""
    return trainings_on(size, arguments)[0]


def largest_difference(one: Found, other: Found) -> float:
    """Of parameters and metrics."""
    (a, of_a), (b, of_b) = one, other
    assert a.keys() == b.keys()
    differences = [float((a[name] - b[name]).abs().max()) for name in a]
    return max(*differences, *(abs(of_a.metrics[k] - of_b.metrics[k]) for k in of_a.metrics))


def keep_one_checkpoint(run_dir: Path, step: int) -> None:
    """Deletes all others, as if the run had ended there."""
    for path in (run_dir / "checkpoints").iterdir():
        if path.name != f"step-{step:08}":
            shutil.rmtree(path)


def check_elastic_refused(
    flags: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuses elastic workers for a recipe with these flags."""
    elastic = ["--compression", "exact", "--elastic", "--workers", "2", "--run-dir", str(run_dir)]
    assert main(["train", "text", *flags, *elastic]) == 2
    assert "`elastic`: text divides its model" in capsys.readouterr().err
