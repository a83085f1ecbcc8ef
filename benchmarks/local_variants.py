"""A locally connected layer, and other ways to compute the same, for bench_local.py."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

import allstep
from allstep.nn import Grid, LocallyConnected2d

try:
    import jax
except ImportError:
    jax = None

__all__ = ["Jax", "Ours", "Shape", "Unfold", "Views", "check", "jax", "sparse_forwards"]

BATCH = 96


@dataclass(frozen=True)
class Shape:
    """A layer: a square array of `size`, blocks of (depth, height, width)."""

    size: int
    channels: int
    kernel: int
    step: int
    block: tuple[int, int, int]
    batch: int = BATCH

    @property
    def rows(self) -> int:
        return (self.size - self.kernel) // self.step + 1

    @property
    def filters(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def fan_in(self) -> int:
        return self.kernel**2 * self.channels

    @property
    def num_weights(self) -> int:
        return self.rows**2 * self.filters * self.fan_in

    @property
    def flops(self) -> int:
        return 2 * self.num_weights * self.batch

    def __str__(self) -> str:
        block = "x".join(map(str, self.block))
        return f"{self.size}x{self.size}x{self.channels} k={self.kernel} s={self.step} {block}"


def batch_last(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """[batch, channel, height, width] in the layer's own memory format."""
    batch, channels, height, width = shape
    x = torch.randn(height, width, channels, batch, device=device).to(dtype)
    return x.permute(3, 2, 0, 1)


class Ours:
    """The layer, its input and the gradient of its output."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        grid = Grid(allstep.Communicator.single_process(device))
        layout = grid.split((shape.size, shape.size))
        self.layer = LocallyConnected2d(
            grid,
            layout,
            shape.channels,
            shape.kernel,
            shape.step,
            shape.block,
            bias=False,
            dtype=dtype,
            seed=0,
        )
        size = (shape.batch, shape.channels, shape.size, shape.size)
        self.x = batch_last(*size, dtype=dtype, device=device).requires_grad_()
        out = self.layer.out_layout.shape
        self.grad = batch_last(shape.batch, shape.block[0], *out, dtype=dtype, device=device)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.layer(self.x)

    def step(self) -> None:
        self.x.grad = self.layer.weight.grad = None
        self.layer(self.x).backward(self.grad)


class Unfold:
    """One product with every receptive field of the array at once."""

    def __init__(self, shape: Shape, weight: Tensor, x: Tensor):
        self.shape = shape
        filters = weight.detach().unflatten(3, (shape.kernel**2, -1)).transpose(3, 4)
        self.weight = filters.reshape(shape.rows**2, shape.filters, -1).requires_grad_()
        self.x = x.detach().contiguous().requires_grad_()
        self.grad = torch.randn(shape.batch, shape.filters, shape.rows**2).to(self.x)

    def _response(self) -> Tensor:
        fields = torch.nn.functional.unfold(self.x, self.shape.kernel, stride=self.shape.step)
        return torch.einsum("bkl,lfk->bfl", fields, self.weight)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._response()

    def step(self) -> None:
        self.x.grad = self.weight.grad = None
        self._response().backward(self.grad)


class Views(Unfold):
    """The same by strided views of the input."""

    def __init__(self, shape: Shape, unfold: Unfold):
        self.shape = shape
        self.x = unfold.x.detach().requires_grad_()
        side, kernel = (shape.rows, shape.rows), (shape.kernel, shape.kernel)
        weight = unfold.weight.detach().view(*side, shape.filters, shape.channels, *kernel)
        self.weight = weight.permute(2, 0, 1, 3, 4, 5).contiguous().requires_grad_()
        self.grad = unfold.grad.unflatten(2, side)

    def _response(self) -> Tensor:
        kernel, step = self.shape.kernel, self.shape.step
        fields = self.x.unfold(2, kernel, step).unfold(3, kernel, step)
        return torch.einsum("bcijuv,fijcuv->bfij", fields, self.weight)


class Jax:
    """JAX's own locally connected convolution."""

    def __init__(self, shape: Shape, unfold: Unfold):
        self.x = jax.numpy.asarray(unfold.x.detach().numpy())
        weight = unfold.weight.detach().view(shape.rows, shape.rows, shape.filters, -1)
        self.weight = jax.numpy.asarray(weight.permute(2, 3, 0, 1).numpy())
        self.grad = jax.numpy.asarray(unfold.grad.unflatten(2, (shape.rows, -1)).numpy())

        def response(x: Any, weight: Any) -> Any:
            return jax.lax.conv_general_dilated_local(
                x,
                weight,
                (shape.step, shape.step),
                "VALID",
                (shape.kernel, shape.kernel),
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )

        def step(x: Any, weight: Any, grad: Any) -> Any:
            y, backward = jax.vjp(response, x, weight)
            return y, backward(grad)

        self._response, self._step = jax.jit(response), jax.jit(step)

    def forward(self) -> Any:
        return jax.block_until_ready(self._response(self.x, self.weight))

    def step(self) -> None:
        jax.block_until_ready(self._step(self.x, self.weight, self.grad))


def sparse_forwards(shape: Shape, ours: Ours) -> dict[str, Callable[[], Tensor]]:
    """The same layer as a matrix of all outputs by all inputs, in torch's sparse formats."""
    x = ours.x.detach().permute(2, 3, 1, 0).reshape(-1, shape.batch)
    first = torch.arange(shape.rows) * shape.step
    place = first[:, None] * shape.size + first  # of each block's first input pixel
    offsets = torch.arange(shape.kernel)[:, None] * shape.size + torch.arange(shape.kernel)
    pixels = place.reshape(-1, 1) + offsets.reshape(1, -1)
    columns = (pixels[:, :, None] * shape.channels + torch.arange(shape.channels)).flatten(1)
    weight = ours.layer.weight.detach().reshape(shape.rows**2, shape.filters, shape.fan_in)
    num_rows = shape.rows**2 * shape.filters
    csr = torch.sparse_csr_tensor(
        torch.arange(num_rows + 1) * shape.fan_in,
        columns[:, None].expand(weight.shape).flatten(),
        weight.flatten(),
        (num_rows, x.shape[0]),
        check_invariants=True,
    )
    side = gcd(shape.filters, shape.step * shape.channels, shape.kernel * shape.channels)
    tiles = weight.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    per_row = shape.fan_in // side
    bsr = torch.sparse_bsr_tensor(
        torch.arange(num_rows // side + 1) * per_row,
        (columns[:, ::side] // side)[:, None].expand(-1, shape.filters // side, -1).flatten(),
        tiles.reshape(-1, side, side),
        (num_rows, x.shape[0]),
        check_invariants=True,
    )
    return {"csr": lambda: csr @ x, "bsr": lambda: bsr @ x}


def check(shape: Shape, ours: Ours, others: dict[str, Tensor]) -> None:
    """All variants compute the same."""
    y = ours.forward().detach()
    _, height, width = shape.block
    blocks = y.unflatten(2, (-1, height)).unflatten(4, (-1, width))  # [b, d, i, r, j, s]
    y = blocks.permute(0, 3, 5, 1, 2, 4).reshape(shape.batch, shape.filters, -1)
    for name, other in others.items():
        torch.testing.assert_close(
            other, y, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
