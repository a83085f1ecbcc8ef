"""What the workers of `bench_recovery` run: trainings that lose workers, and steps in turns.

The model of the recipe `fashion` without dropout, whose masks a loop of torch's would draw
otherwise, on random pictures: global batches of 128, of which each of four workers has a
micro-batch of 32.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_overhead import GLOBAL_BATCH, fashion_task
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Task, TrainOptions
from allstep.cli.worker import read_call
from allstep.comm.membership import Membership
from allstep.env import read_launch
from allstep.files import replacing
from allstep.train.elastic import StepCommit
from allstep.train.run import Run
from allstep.train.stop import Interrupts, StepStopAgreement

NUM_WORKERS, MICRO_BATCH = 4, 32
OVERHEAD_STEPS = 40  # of an epoch
_WARMUPS = 5
_POLL_S = 0.01

OPTIONS = TrainOptions(
    epochs=1, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, compression="exact"
)


def make_task(num_steps: int) -> Task:
    """The same on every worker."""
    torch.manual_seed(0)
    task = fashion_task(num_steps * GLOBAL_BATCH, epochs=1, dropout=0.0)
    tested = TensorDataset(*(tensor[:MICRO_BATCH] for tensor in task.test_set.tensors))
    return replace(task, test_set=tested)


def steps_file(folder: Path, rank: int) -> Path:
    """Where a worker says when it has finished each step, and with how many workers."""
    return folder / f"rank-{rank}.steps"


def final_file(folder: Path, rank: int) -> Path:
    """Where a worker that came to the end leaves its parameters."""
    return folder / f"rank-{rank}.pt"


def notes_steps(optimizer: torch.optim.Optimizer, file: Path, size: Callable[[], int]) -> None:
    """Has an optimizer write to the file of `steps_file` after each update."""
    lines = file.open("a", buffering=1)

    def note(*_: object) -> None:
        lines.write(f"{time.monotonic()} {size()}\n")

    optimizer.register_step_post_hook(note)


def parameters(model: nn.Module) -> Tensor:
    """All of them, flat."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def leave_parameters(model: nn.Module, file: Path) -> None:
    """Whole or not at all."""
    with replacing(file) as draft:
        torch.save(parameters(model), draft)


def train_allstep(folder: Path) -> None:
    """`allstep.fit(..., elastic=True)`, as a worker of `allstep train --elastic`."""
    torch.set_num_threads(1)
    task, rank = make_task(read_call(folder).arguments["num_steps"]), read_launch().rank
    with allstep.init(device="cpu") as comm:

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = task.optimizer(model)
            notes_steps(optimizer, steps_file(folder, rank), lambda: comm.size)
            return optimizer

        noted = replace(task, optimizer=make_optimizer)
        allstep.fit(noted, OPTIONS, comm, folder / "run", elastic=True)
    leave_parameters(task.model, final_file(folder, rank))


def train_torchft(folder: Path) -> None:
    """torchft's way for data parallelism: a worker is a replica group, with a manager of its own.

    Each takes the micro-batch of its number from the global batch of the manager's step. Gradients
    are averaged by the manager itself, or by torchft's DDP.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    arguments, rank = read_call(folder).arguments, read_launch().rank
    num_steps = arguments["num_steps"]
    task = make_task(num_steps)
    inner = task.optimizer(task.model)
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=arguments["gloo_timeout_ms"])),
        min_replica_size=1,
        load_state_dict=partial(_load, task.model, inner),
        state_dict=lambda: {"model": task.model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"worker_{rank}",
        timeout=timedelta(seconds=30),
        heartbeat_interval=timedelta(milliseconds=arguments["heartbeat_interval_ms"]),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=arguments["lighthouse"],
        hostname="127.0.0.1",
        init_sync=False,  # all begin with the same parameters
    )
    has_ddp = arguments["has_ddp"]
    model = DistributedDataParallel(manager, task.model) if has_ddp else task.model
    optimizer = Optimizer(manager, inner)
    notes_steps(inner, steps_file(folder, rank), manager.num_participants)
    _meet(folder, rank)
    while (step := manager.current_step()) < num_steps:
        set_rate(inner, task, step)
        optimizer.zero_grad()
        task.loss(model, micro_batch(task, step, rank)).backward()
        if not has_ddp:
            gradients = [p.grad for p in model.parameters()]
            flat = nn.utils.parameters_to_vector(gradients)
            manager.allreduce(flat).wait()
            nn.utils.vector_to_parameters(flat, gradients)
        optimizer.step()
    leave_parameters(task.model, final_file(folder, rank))
    manager.shutdown(wait=False)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _meet(folder: Path, rank: int) -> None:
    """Waits until all workers have a manager: with `min_replicas` 1 the first would begin alone."""
    (folder / f"rank-{rank}.ready").touch()
    while len(list(folder.glob("rank-*.ready"))) < NUM_WORKERS:
        time.sleep(_POLL_S)


def micro_batch(task: Task, step: int, index: int) -> list[Tensor]:
    """One of a global batch's, of samples in the order of the data set."""
    first = step * GLOBAL_BATCH + index * MICRO_BATCH
    return [tensor[first : first + MICRO_BATCH] for tensor in task.train_set.tensors]


def set_rate(optimizer: torch.optim.Optimizer, task: Task, step: int) -> None:
    """The schedule's rate of a step, from the base rates that groups have at first."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("base_lr", group["lr"]) * task.schedule(step)


def train_lone_torch(num_steps: int) -> Tensor:
    """What torchft's workers should have at the end: the parameters of one, in plain torch."""
    task = make_task(num_steps)
    optimizer = task.optimizer(task.model)
    for step in range(num_steps):
        set_rate(optimizer, task, step)
        optimizer.zero_grad()
        for index in range(NUM_WORKERS):
            (task.loss(task.model, micro_batch(task, step, index)) / NUM_WORKERS).backward()
        optimizer.step()
    return parameters(task.model)


def train_lone_allstep(num_steps: int, run_dir: Path) -> Tensor:
    """The parameters of one worker that nobody disturbs."""
    task = make_task(num_steps)
    allstep.fit(task, OPTIONS, Communicator.single_process(), run_dir)
    return parameters(task.model)


def measure_overhead(folder: Path) -> None:
    """Seconds of steps with and without `elastic`, which take turns step by step.

    Wall is of the slowest worker, cpu of all workers together.
    """
    torch.set_num_threads(1)
    task, arguments = make_task(OVERHEAD_STEPS), read_call(folder).arguments
    with allstep.init(device="cpu") as comm:
        updates = own_updates if arguments["is_own_loop"] else fit_updates
        loops = {name: updates(task, comm, name == "elastic") for name in ("plain", "elastic")}
        found: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in loops}
        for repeat in range(-_WARMUPS, arguments["repeats"]):
            for name in list(loops) if repeat % 2 else list(reversed(loops)):
                comm.barrier()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                next(loops[name])
                own = [time.perf_counter() - start_s, time.process_time() - start_cpu_s]
                wall_s = comm.all_reduce(torch.tensor(own[0], dtype=torch.float64), "max")
                cpu_s = comm.all_reduce(torch.tensor(own[1], dtype=torch.float64))
                if repeat >= 0:
                    found[name]["wall"].append(float(wall_s))
                    found[name]["cpu"].append(float(cpu_s))
        if comm.rank == 0:
            (folder / "overhead.json").write_text(json.dumps(found))
        comm.barrier()


def fit_updates(task: Task, comm: Communicator, is_elastic: bool) -> Iterator[None]:
    """A step of `fit` at a time, of a model of its own."""
    commit = None
    if is_elastic:
        membership = Membership(read_launch(), grace_s=comm.timeout_s)
        membership.begin(comm)
        commit = StepCommit(comm, membership, StepStopAgreement(Interrupts()))
    schedule = allstep.optim.hold(task.schedule, OVERHEAD_STEPS)
    own = replace(task, model=copy.deepcopy(task.model), schedule=schedule)
    run = Run(own, OPTIONS, comm, commit)
    while True:
        for _ in run.updates():
            yield


def own_updates(task: Task, comm: Communicator, is_elastic: bool) -> Iterator[None]:
    """A step of a user's own loop at a time."""
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer(model)
    exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
    loader = allstep.data.loader(
        task.train_set, comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
    )

    def epoch(elastic: allstep.Elastic | None) -> Iterator[None]:
        for batch in allstep.steps(loader, exchange, elastic=elastic):
            for samples in batch:
                batch.backward(task.loss(model, samples))
            optimizer.step()
            optimizer.zero_grad()
            yield

    if not is_elastic:
        while True:
            yield from epoch(None)
    with allstep.Elastic(loader, exchange, state={"optimizer": optimizer}) as elastic:
        for _ in elastic.epochs(1_000_000):
            yield from epoch(elastic)
