"""The control: what torch's own distributed tensors make of a convolution split in space.

Were this to fail, torch would have learnt it, and our layer's place would have to be thought over.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import conv2d

from allstep.comm import Communicator
from allstep.nn import Conv2d, Grid
from tests.helpers.processes import run_processes
from tests.nn.grids import part, values

X, WEIGHT = values(1, 2, 8, 8), values(2, 2, 3, 3, seed=1)


def torchs_own(comm: Communicator) -> tuple[list[int], bool, bool]:
    """Shape and layout of the result, and whether the input has a gradient."""
    mesh = init_device_mesh("cpu", (comm.size,))
    x = distribute_tensor(X, mesh, [Shard(2)]).requires_grad_()
    weight = distribute_tensor(WEIGHT, mesh, [Replicate()])
    y = conv2d(x, weight, padding=1)
    assert isinstance(y, DTensor)
    y.sum().backward()
    return list(y.full_tensor().shape), y.placements == (Replicate(),), x.grad is not None


def ours(comm: Communicator) -> tuple[float, bool]:
    """How far the layer is from convolution of the whole array; the same about the gradient."""
    grid = Grid(comm, (comm.size, 1))
    conv = Conv2d(grid, grid.split((8, 8)), 2, 2, 3, padding=1, bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(WEIGHT)
    x = part(X, conv.in_layout.windows[comm.rank]).clone().requires_grad_()
    y = conv(x)
    y.sum().backward()
    expected = conv2d(X, WEIGHT, padding=1)
    own = part(expected, conv.out_layout.windows[comm.rank])
    return (y - own).abs().max().item(), x.grad is not None


@pytest.mark.process
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older ones of torch go another way")
def test_dtensor_convolution_is_wrong_without_an_error():
    for shape, says_whole, has_gradient in run_processes(2, torchs_own):
        # Half of the array, called the whole of it, and the other half's gradient is lost.
        assert shape == [1, 2, 4, 8] and says_whole and not has_gradient
    for error, has_gradient in run_processes(2, ours):
        assert error < 1e-12 and has_gradient
