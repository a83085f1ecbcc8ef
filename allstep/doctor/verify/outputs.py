"""What modules return in training, in few numbers that add up over samples and workers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from allstep.doctor.verify.sketch import NUM_PRODUCTS, Sketcher, pieces
from allstep.exchange import FunctionHook, Removable


@dataclass(frozen=True)
class OutputSum:
    """A module's outputs in one step, summed over all dimensions but the last.

    Attributes:
        num_rows: that were summed.
        width: of the last dimension.
        bound: at least the sum's norm: sum over calls of sqrt(num_rows) times the output's norm.
        products: of the sum, as `row_products` makes them.
    """

    num_rows: int
    width: int
    bound: float
    products: list[float]

    def __add__(self, other: "OutputSum") -> "OutputSum":
        products = [x + y for x, y in zip(self.products, other.products, strict=True)]
        bound, num_rows = self.bound + other.bound, self.num_rows + other.num_rows
        return OutputSum(num_rows, self.width, bound, products)


def row_products(sketch: Sketcher, row: Tensor) -> list[float]:
    """Those of a row's pieces, added up: comparable with a parameter's of that shape."""
    total = torch.zeros(NUM_PRODUCTS, dtype=torch.float64)
    for _, piece in pieces("", row):
        total += torch.tensor(sketch(piece).products, dtype=torch.float64)
    found: list[float] = total.tolist()
    return found


class OutputWatch:
    """Adds up what each module of a model returns in training.

    Args:
        model: to watch.
        sketch: makes products.

    Attributes:
        sums: since they were last taken, by module; "" is the model itself.
        hooks: to remove in the end.
    """

    def __init__(self, model: nn.Module, sketch: Sketcher) -> None:
        self.sums: dict[str, OutputSum] = {}
        self.hooks: list[Removable] = []
        self._sketch = sketch
        for name, module in model.named_modules():
            self.hooks.append(module.register_forward_hook(self._hook_of(name)))

    def take(self) -> dict[str, OutputSum]:
        """What was added up since the last call."""
        taken, self.sums = self.sums, {}
        return taken

    def _hook_of(self, name: str) -> FunctionHook:
        def add(module: nn.Module, _: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                leaf = next(filter(_is_summable, pytree.tree_leaves(output)), None)
                if leaf is not None:
                    self._add(name, leaf.detach())

        return FunctionHook(self, add)

    @torch.no_grad()
    def _add(self, name: str, output: Tensor) -> None:
        rows = output.reshape(-1, output.shape[-1]).double()
        bound = float(rows.norm()) * len(rows) ** 0.5
        products = row_products(self._sketch, rows.sum(0))
        new = OutputSum(len(rows), output.shape[-1], bound, products)
        earlier = self.sums.get(name)
        self.sums[name] = new if earlier is None or earlier.width != new.width else earlier + new


def _is_summable(leaf: Any) -> bool:
    """Whether it is a plain tensor with rows."""
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_nested
    return is_plain and leaf.is_floating_point() and leaf.dim() > 0 and leaf.numel() > 0
