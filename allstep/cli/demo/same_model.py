"""Panel b: whether other numbers of workers train the same model, also if one is killed."""

import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.processes import Processes, WorkerError
from allstep.cli.launch import Workers
from allstep.cli.worker import read_result
from allstep.comm import Communicator
from allstep.recipes.digits import Digits
from allstep.train import fit, read_checkpoint, write_checkpoint

# Twelve micro-batches, so that 1, 2, 3 and 4 workers all have equal work.
_RECIPE = Digits(
    width=16,
    epochs=4,
    global_batch=96,
    micro_batch=8,
    warmup_epochs=1.0,
    evaluate_every_epochs=4,
    checkpoint_every_steps=10,
)
NUM_STEPS = 4 * 15


def train_the_same(
    comm: Communicator, folder: str, compression: str, resume: bool = False, elastic: bool = False
) -> str:
    """The recipe `digits`, as `allstep train` runs it; returns the last checkpoint's folder."""
    torch.set_num_threads(1)
    recipe = replace(_RECIPE, compression=compression)
    report = fit(recipe.task(comm), recipe, comm, folder, resume=resume, elastic=elastic)
    return str(report.checkpoint)


def train_as_usual(comm: Communicator, folder: str) -> str:
    """The same model and batches in DistributedDataParallel, as its tutorials do it.

    Batch norm sees only a worker's own samples, and each worker draws its own dropout.
    """
    torch.set_num_threads(1)
    task = _RECIPE.task(comm)
    torch.manual_seed(comm.rank)
    sampler: DistributedSampler[Any] = DistributedSampler(
        task.train_set, comm.size, comm.rank, seed=_RECIPE.seed
    )
    batches = DataLoader(task.train_set, _RECIPE.global_batch // comm.size, sampler=sampler)
    model: nn.Module = task.model
    if comm.size > 1:
        model = DistributedDataParallel(model)
    optimizer = task.optimizer(task.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
    for epoch in range(_RECIPE.epochs):
        if comm.rank == 0 and epoch == 1:
            (Path(folder) / _BEGUN).mkdir(parents=True)
        sampler.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            task.mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    path = Path(folder) / "last"
    if comm.rank == 0:
        write_checkpoint(path, {"model": task.model.state_dict()}, step=NUM_STEPS)
    return str(path)


_SIZES = (2, 4)
_KILL_AFTER_STEP = 20
_KILL_TIMEOUT_S = 120.0
_KILLED = "4, kill -9 of one"
_BEGUN = "begun"  # in the folder of a training as usual, after its first epoch
_WAYS = ("allstep", "allstep, exact", "DDP as usual")
_COMPRESSIONS = {"allstep": "fp32", "allstep, exact": "exact"}

Differences = dict[str, dict[str, float]]


def measure(processes: Processes, folder: Path) -> Iterator[Panel]:
    """Trains every way on 1, 2 and 4 workers, and kills one of 4."""
    differences: Differences = {way: {} for way in _WAYS}
    yield _panel(differences, "training on 1 worker")
    one_worker = {way: _train(processes, 1, way, folder) for way in _WAYS}
    for size in _SIZES:
        for way in _WAYS:
            yield _panel(differences, f"{way}: training on {size} workers")
            found = _train(processes, size, way, folder)
            differences[way][str(size)] = _largest_difference(one_worker[way], found)
    num_left: dict[str, int] = {}
    for way in _WAYS:
        yield _panel(differences, f"{way}: kill -9 of one of 4 workers", num_left)
        run_dir = folder / f"{way}-killed"
        workers = _train_and_kill(processes, way, run_dir)
        num_left[way] = workers.exit_codes.count(0)
        if num_left[way]:
            found = _load(read_result(workers.folder))
        elif way in _COMPRESSIONS:
            yield _panel(differences, f"{way}: 3 workers resume", num_left)
            found = _load(processes.run(3, train_the_same, **_asked(way, run_dir), resume=True))
        else:
            continue
        differences[way][_KILLED] = _largest_difference(one_worker[way], found)
    yield _panel(differences, "", num_left)


def _train(processes: Processes, size: int, way: str, folder: Path) -> Mapping[str, Tensor]:
    return _load(processes.result(_start(processes, size, way, folder / f"{way}-{size}")))


def _start(processes: Processes, size: int, way: str, run_dir: Path) -> Workers:
    if way not in _COMPRESSIONS:
        return processes.start(size, train_as_usual, folder=str(run_dir))
    return processes.start(size, train_the_same, **_asked(way, run_dir))


def _asked(way: str, run_dir: Path) -> dict[str, Any]:
    return {"folder": str(run_dir), "compression": _COMPRESSIONS[way]}


def _load(path: str) -> Mapping[str, Tensor]:
    model: Mapping[str, Tensor] = read_checkpoint(path)["model"]
    return {name: x.double() for name, x in model.items() if "running" not in name}


def _largest_difference(model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((model[name] - other[name]).abs().max()) for name in model)


def _train_and_kill(processes: Processes, way: str, run_dir: Path) -> Workers:
    """Kills worker 2 of 4 in the midst of it; returns all when they have ended.

    With exact sums the others go on; without, they end, and leave checkpoints.
    """
    begun = run_dir / f"checkpoints/step-{_KILL_AFTER_STEP:08d}"
    if _COMPRESSIONS.get(way) == "exact":
        workers = processes.start(4, train_the_same, **_asked(way, run_dir), elastic=True)
    else:
        workers = _start(processes, 4, way, run_dir)
        begun = begun if way in _COMPRESSIONS else run_dir / _BEGUN
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while not begun.exists():
        if time.monotonic() > deadline_s:
            raise WorkerError(f"no checkpoint came in {_KILL_TIMEOUT_S:g} s.")
        time.sleep(0.005)
    workers.send(signal.SIGKILL, 2)
    while not workers.wait(0.05) and time.monotonic() < deadline_s:
        pass
    if workers.exit_codes[2] != -signal.SIGKILL:
        raise WorkerError("the training was faster than the kill; run the panel again.")
    return workers


def _panel(
    differences: Differences, status: str, num_left: Mapping[str, int] | None = None
) -> Panel:
    """Args: num_left: of each way, the workers that went on when one of 4 was killed."""
    num_left = num_left or {}
    columns = [*map(str, _SIZES), _KILLED]
    return Panel(
        letter="b",
        title="Same model: largest difference of a parameter to the one that 1 worker trains",
        header=("workers", *columns),
        rows=[
            (
                way,
                *(_difference_in_words(found.get(column)) for column in columns[:-1]),
                _after_a_kill(found.get(_KILLED), num_left.get(way)),
            )
            for way, found in differences.items()
        ],
        chart=Chart(
            "largest parameter difference to 1 worker",
            [
                Bar(way, value, size if size == _KILLED else f"{size} workers")
                for way, found in differences.items()
                for size, value in found.items()
            ],
            is_log=True,
        ),
        notes=(
            f"Digits, {NUM_STEPS} steps of 96 samples, with batch norm and dropout. DDP as usual"
            " has batch norm and dropout of each worker's own.",
            "fp32 sums differ in the last bits by the order in which workers add; `exact` adds"
            " without rounding, and then workers may come and go.",
        ),
        status=status,
        conclusion="" if status else _conclude(differences, num_left),
        numbers={"largest_difference": differences, "workers_left": dict(num_left)},
    )


def _difference_in_words(difference: float | None) -> str:
    if difference is None:
        return ""
    return f"{difference:.1e}" if difference else "0 (same bits)"


def _after_a_kill(difference: float | None, num_left: int | None) -> str:
    if num_left is None:
        return ""
    if difference is None:
        return "all end"
    how = f"{num_left} go on" if num_left else "all end, 3 resume"
    return f"{_difference_in_words(difference)}, {how}"


def _conclude(differences: Differences, num_left: Mapping[str, int]) -> str:
    ours = max(differences["allstep"].values())
    exact = max(differences["allstep, exact"].values())
    usual = max(differences["DDP as usual"].values())
    exact_text = "not one bit differs" if exact == 0 else f"it is {exact:.1e}"
    return (
        f"With allstep parameters differ by at most {ours:.1e}, also after kill -9 of one of 4"
        f" workers; with compression exact {exact_text}, and"
        f" {num_left.get('allstep, exact', 0)} go on as one is killed. DDP as usual trains another"
        f" model: {usual:.1e}."
    )
