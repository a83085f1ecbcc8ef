"""The control: what torch's own distributed tensors make of a convolution, and of uneven shards.

Were this to fail, torch would have learnt it, and our layer's place would have to be thought over.
"""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import conv2d

from allstep.comm import Communicator
from allstep.nn import Conv2d, Grid
from tests.helpers.processes import run_processes
from tests.nn.grids import part, values

X, WEIGHT = values(1, 2, 8, 8), values(2, 2, 3, 3, seed=1)


def torchs_own(comm: Communicator, dim: int, kernel: int, **settings: int) -> dict[str, Any]:
    """What torch makes of a convolution whose input is sharded along a dimension."""
    mesh = init_device_mesh("cpu", (comm.size,))
    x = distribute_tensor(X, mesh, [Shard(dim)]).requires_grad_()
    weight = distribute_tensor(WEIGHT[..., :kernel, :kernel], mesh, [Replicate()]).requires_grad_()
    y = conv2d(x, weight, **settings)
    assert isinstance(y, DTensor)
    y.sum().backward()
    assert isinstance(weight.grad, DTensor)
    return {
        "shape": list(y.full_tensor().shape),
        "says_whole": y.placements == (Replicate(),),
        "input_gradient": x.grad.placements if isinstance(x.grad, DTensor) else None,
        "weight_gradient": weight.grad.full_tensor(),
    }


def torchs_own_of_both(comm: Communicator) -> list[dict[str, Any]]:
    """Of windows that overlap, and of patches that lie on one worker each."""
    return [torchs_own(comm, 2, 3, padding=1), torchs_own(comm, 3, 2, stride=2)]


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
@pytest.mark.skipif(not "2.13" <= torch.__version__ < "2.14", reason="what torch 2.13 does")
def test_dtensor_convolution_is_wrong_without_an_error():
    found = run_processes(2, torchs_own_of_both)
    for overlapping, patches in found:
        # Half of the array, called the whole of it, and the other half's gradient is lost, or
        # (pytorch#191926) laid out otherwise than the input.
        assert overlapping["says_whole"] and overlapping["shape"] == [1, 2, 4, 8]
        assert overlapping["input_gradient"] is None
        assert patches["says_whole"] and patches["shape"] == [1, 2, 4, 2]
        assert patches["input_gradient"] == (Replicate(),)
    whole = WEIGHT[..., :2, :2].clone().requires_grad_()
    conv2d(X, whole, stride=2).sum().backward()
    parts = [patches["weight_gradient"] for _, patches in found]
    torch.testing.assert_close(sum(parts), whole.grad)  # of which each is called the sum
    assert (parts[0] - whole.grad).abs().max() > 0.1
    for error, has_gradient in run_processes(2, ours):
        assert error < 1e-12 and has_gradient


def means_of_uneven_shards(comm: Communicator) -> tuple[float, float]:
    """Of three rows that torch has cut, and of four that lie on the workers as one and three."""
    mesh = init_device_mesh("cpu", (comm.size,))
    cut = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0)])
    rows = torch.arange(16.0).view(4, 4)
    mine = rows[:1] if comm.rank == 0 else rows[1:]
    known = {"shape": rows.shape, "stride": rows.stride()}
    given = DTensor.from_local(mine, mesh, [Shard(0)], run_check=True, **known)
    return float(cut.mean().full_tensor()), float(given.mean().full_tensor())


@pytest.mark.process
def test_mean_of_uneven_shards_is_right_only_where_torch_has_cut_them():
    for of_cut, of_given in run_processes(2, means_of_uneven_shards):
        assert of_cut == 5.5  # pytorch#162692, mended
        assert of_given == 5.5 != torch.arange(16.0).mean()  # pytorch#144109
