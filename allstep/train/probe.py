"""Measures at the end of a run how fast a single worker would be on this machine."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allstep.comm import Communicator
from allstep.device import default_device, synchronize
from allstep.env import num_cores
from allstep.nn import GroupedBatchNorm
from allstep.train.flops import count_flops
from allstep.train.precision import Precision
from allstep.train.task import Task

_NUM_REPEATS = 5
_BUDGET_S = 20.0  # of each measurement, for the other workers wait; one call may take longer


@dataclass(frozen=True)
class Probe:
    """Cost of a micro-batch and of an update, on one worker that has the machine to itself.

    Attributes:
        flops: floating-point operations of the micro-batch's forward and backward pass; None if
            they can't be counted.
        compute_s: seconds of these passes.
        update_s: seconds of the optimizer's step.
    """

    flops: float | None
    compute_s: float
    update_s: float


def probe(
    task: Task,
    precision: Precision,
    comm: Communicator,
    data: Any,
    num_threads: int | None = None,
) -> Probe:
    """Runs one micro-batch on a copy of the model, on one worker while the others wait.

    Args:
        task: the task; its model is copied, and its loss and optimizer are used on the copy.
        precision: the run's precision.
        comm: the workers; all of them must call this.
        data: a micro-batch on this worker's device; None if this worker had none.
        num_threads: threads that the one worker uses; by default as many as there are cores.

    Returns:
        The same numbers on every worker.
    """
    comm.activity.enter("measurement of a sample's cost")
    holder = torch.tensor(-1 if data is None else comm.rank, device=comm.device)
    root = int(comm.all_reduce(holder, "max"))
    measured = _measure(task, precision, data, num_threads) if comm.rank == root else None
    return Probe(*comm.broadcast_object(measured, root=root))


def _measure(
    task: Task, precision: Precision, data: Any, num_threads: int | None
) -> tuple[float | None, float, float]:
    # Prepared anew: recurrent layers of a copy are not in one piece, as cuDNN wants them.
    model = precision.prepare_model(copy.deepcopy(task.model)).train()
    for module in model.modules():
        if isinstance(module, GroupedBatchNorm):
            module.leave_peers()  # they aren't called
    optimizer = task.optimizer(model)

    def compute() -> None:
        with precision.autocast():
            loss = task.mean_loss(model, precision.prepare_data(data))
        loss.backward()  # type: ignore[no-untyped-call]

    own = torch.get_num_threads()
    torch.set_num_threads(max(own, num_cores()) if num_threads is None else num_threads)
    try:
        flops = count_flops(compute)
        compute_s = shortest_s(compute)
        update_s = shortest_s(optimizer.step)
    finally:
        torch.set_num_threads(own)
    return flops, compute_s, update_s


def shortest_s(
    function: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of the shortest of five calls, or of fewer if the time budget ends before."""
    start_s = clock()
    found: list[float] = []
    while len(found) < _NUM_REPEATS and (not found or clock() - start_s < _BUDGET_S):
        begin_s = clock()
        function()
        synchronize(default_device())
        found.append(clock() - begin_s)
    return min(found)
