"""What each worker's memory holds: a part of the parameters, and no more."""

import resource
from pathlib import Path

import pytest
import torch

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn import Grid, LocallyConnected2d
from tests.helpers.processes import run_processes
from tests.nn.grids import part, values

WEIGHT_BYTES = 4 * 32 * 32 * 64 * 512  # 128 MB


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def train_step(comm: Communicator, num_maps: int) -> tuple[torch.optim.Optimizer, bool]:
    """A layer's optimizer after one step with momentum, and whether the loss was finite."""
    grid = Grid(comm)
    layer = LocallyConnected2d(
        grid, grid.split((39, 39)), 8, 8, 1, (num_maps, 1, 1), bias=False, seed=0
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x = part(values(1, 8, 39, 39).float(), layer.in_layout.windows[comm.rank])
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    return optimizer, bool(loss.isfinite())


def trained(comm: Communicator) -> tuple[int, bool]:
    """Resident bytes that the layer, its gradient and SGD's momentum take."""
    train_step(comm, 1)  # what a first step loads and keeps is not the layer's
    before = status_bytes("VmRSS")
    optimizer, is_finite = train_step(comm, 64)
    resident = status_bytes("VmRSS") - before
    assert optimizer.state  # what was measured is still here
    return resident, is_finite


def capped(comm: Communicator) -> tuple[int, bool] | str:
    """The same with room for less than one worker's weight: the result, or why not."""
    limit = status_bytes("VmData") + WEIGHT_BYTES - (8 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return trained(comm)
    except UsageError as error:
        return str(error)


@pytest.mark.process
def test_memory_falls_with_the_number_of_workers():
    alone = run_processes(1, trained)[0][0]
    assert alone > 3 * WEIGHT_BYTES
    for num_workers in (2, 4):
        for resident, _ in run_processes(num_workers, trained):
            assert resident < 1.15 * alone / num_workers


@pytest.mark.process
def test_four_train_what_one_has_no_room_for():
    (refused,) = run_processes(1, capped)
    assert f"rank 0's filters take {WEIGHT_BYTES} bytes, for which there is no room" in refused
    assert "use more than 1 workers" in refused
    for resident, is_finite in run_processes(4, capped):
        assert resident < WEIGHT_BYTES and is_finite
