"""Small models and the ways to run them on one process and on several."""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from allstep.comm import Communicator

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


class Failing(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


class _Ignored(torch.autograd.Function):
    """Tells autograd that the gradient of `ignored` is zero."""

    @staticmethod
    def forward(ctx: object, x: Tensor, ignored: Tensor) -> Tensor:
        return x * ignored.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Ignoring(nn.Module):
    """Two parameters, of which autograd gets no gradient for one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return _Ignored.apply(self.used, self.ignored)


def clone(model: nn.Module, comm: Communicator) -> nn.Module:
    """A copy whose parameters are right on rank 0 only."""
    copied = copy.deepcopy(model)
    if comm.rank:
        with torch.no_grad():
            for tensor in [*copied.parameters(), *copied.buffers()]:
                tensor.add_(comm.rank)
    return copied


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(actual: dict, expected: dict, rtol: float = 1e-12) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            assert actual[name] is not None, name
            torch.testing.assert_close(actual[name], value, rtol=rtol, atol=1e-11, msg=name)


def differs(actual: dict, expected: dict, by: float) -> bool:
    return any(
        float((actual[n] - expected[n]).abs().max()) > by
        for n in expected
        if expected[n] is not None
    )


def shard(samples: Tensor, comm: Communicator) -> Tensor:
    """This worker's equal part."""
    return samples.chunk(comm.size)[comm.rank]


def blocks(samples: Tensor, micro_batch: int, rank: int, size: int) -> Iterator[Tensor]:
    """This worker's micro-batches, in contiguous blocks; the last one may be short."""
    parts: Sequence[Tensor] = samples.split(micro_batch)
    yield from parts[rank * len(parts) // size : (rank + 1) * len(parts) // size]
