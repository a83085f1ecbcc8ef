"""A tensor in a few numbers, with which tensors of two runs can be compared.

[Note: sketches] A sketch holds a tensor's norm and its products with fixed vectors v_j of random
signs. The products are linear, so that those of a difference are the difference of the products,

    |x - y|^2  ~  mean over j of (<x, v_j> - <y, v_j>)^2

and a weighted mean of gradients can be had from the sketches of the gradients.

A row of numbers is sketched in three to twelve equal pieces if it can be. Biases of queries, keys
and values are often one tensor, and those of the keys have gradients that are nothing but rounding:
attention is the same whatever they are. [Note: what is rounding] is to leave out these, and no
others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PRODUCTS = 16
_WIDTH = 1 << 14
_SEED = 20_160_607
_NUM_PIECES = (12, 6, 3)  # whole thirds: queries, keys and values
_LEAST_ELEMENTS = 4  # of a piece


@dataclass(frozen=True)
class Sketch:
    """Norm of a tensor, and its products with the random vectors."""

    norm: float
    products: list[float]


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What of a tensor is sketched, and its name.

    >>> [name for name, _ in pieces("in_proj_bias", torch.ones(24))]
    ['in_proj_bias[0:4]', 'in_proj_bias[4:8]', ..., 'in_proj_bias[20:24]']
    >>> [name for name, _ in pieces("weight", torch.ones(24, 2))]
    ['weight']
    """
    size = tensor.numel()
    fitting = (n for n in _NUM_PIECES if size % (n * _LEAST_ELEMENTS) == 0)
    num_pieces = next(fitting, 1) if tensor.dim() == 1 and size else 1
    if num_pieces == 1:
        yield name, tensor
        return
    length = size // num_pieces
    for begin in range(0, size, length):
        yield f"{name}[{begin}:{begin + length}]", tensor[begin : begin + length]


class Sketcher:
    """Makes sketches, alike in all processes.

    >>> sketch = Sketcher()
    >>> x, y = torch.randn(50_000), torch.randn(50_000)
    >>> difference = torch.tensor(sketch(x).products) - torch.tensor(sketch(y).products)
    >>> 0.3 < difference.square().mean().sqrt() / (x - y).norm() < 3
    tensor(True)
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        shape = (2, _WIDTH, NUM_PRODUCTS)
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1
        self._signs: dict[torch.device, Tensor] = {signs.device: signs}

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Sketch:
        x = tensor.detach()
        if x.layout != torch.strided:
            x = x.to_dense()
        if x.is_complex():
            x = torch.view_as_real(x)
        x = x.reshape(-1).double()
        return Sketch(float(x.norm()), self._products(x).tolist())

    def _products(self, x: Tensor) -> Tensor:
        """Element (b, l) of x, cut in rows, meets the sign of row b times that of column l."""
        if x.device not in self._signs:
            self._signs[x.device] = next(iter(self._signs.values())).to(x.device)
        of_row, of_column = self._signs[x.device].unbind()
        if x.numel() <= _WIDTH:
            return x @ of_column[: x.numel()]
        rows = torch.nn.functional.pad(x, (0, -x.numel() % _WIDTH)).view(-1, _WIDTH)
        index = torch.arange(len(rows), device=x.device) % _WIDTH
        return (rows @ of_column * of_row[index]).sum(0)
