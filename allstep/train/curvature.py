"""The curvature of a mean loss over the samples of all workers: its Hessian's top eigenvalue."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.data import GlobalBatch
from allstep.data.random import derive_seed
from allstep.errors import AllstepError, UsageError
from allstep.train.devices import to_device
from allstep.train.hessian import hessian_product

_START = 0x7374617274


class Objective:
    """The mean loss over the samples of all workers, as a function of the weights."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: GlobalBatch,
        comm: Communicator,
    ) -> None:
        self._model = model
        self._loss = loss
        self._comm = comm
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise UsageError("`model` has no trainable parameter; check `requires_grad`.")
        self._parts = [
            (micro_batch.num_samples / batch.num_samples, to_device(micro_batch.data, comm.device))
            for micro_batch in batch.micro_batches
        ]
        seen = sum(share for share, _ in self._parts)
        total = torch.tensor(seen, dtype=torch.float64, device=comm.device)
        if abs(float(comm.all_reduce(total)) - 1) > 1e-6:
            raise UsageError(
                "`batch` has been iterated over already; take a fresh one from"
                " `loader.global_batches()`."
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._named.values())

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def of(self, name: str) -> "Objective":
        """The same loss as a function of one parameter, with the others fixed."""
        part = copy.copy(self)
        part._named = {name: self._named[name]}
        return part

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @torch.no_grad()
    def value(self) -> float:
        """The mean loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for share, data in self._parts:
            total += share * self._loss(self._model, data).double()
        return float(self._comm.all_reduce(total))

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient of the mean loss, and the variance of micro-batches' gradients.

        Returns:
            Both flat, float64, in the parameters' order: g, and the mean of (g_k - g)^2 over the
            micro-batches k, weighted by their samples.
        """
        device = self._comm.device
        total = torch.zeros(2, self.num_parameters, dtype=torch.float64, device=device)
        for share, data in self._parts:
            with torch.enable_grad():
                loss = self._loss(self._model, data)
                pieces = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            part = self._flat(pieces)
            total += share * torch.stack([part, part.square()])
        mean, mean_square = self._comm.all_reduce(total)
        return mean, (mean_square - mean.square()).clamp_(min=0)

    def hessian_times(self, vector: Tensor) -> Tensor:
        """H times a flat vector, float64; its pieces are in the parameters' order."""
        total = torch.zeros_like(vector)
        sizes = [p.numel() for p in self.parameters]
        pieces = [
            piece.view_as(p).to(p.dtype)
            for piece, p in zip(torch.split(vector, sizes), self.parameters, strict=True)
        ]
        for share, data in self._parts:
            with torch.enable_grad():
                loss = self._loss(self._model, data)
                products = hessian_product(loss, self.parameters, pieces)
            total += share * self._flat(products)
        return self._comm.all_reduce(total)

    def _flat(self, pieces: Sequence[Tensor | None]) -> Tensor:
        """Concatenates pieces in the parameters' shapes to one vector; None stands for zeros."""
        whole = [
            torch.zeros_like(p) if piece is None else piece
            for piece, p in zip(pieces, self.parameters, strict=True)
        ]
        return torch.cat([piece.detach().reshape(-1).double() for piece in whole])


def top_eigenvalue(
    objective: Objective, *, max_products: int, tolerance: float, seed: int
) -> tuple[float, float, int]:
    """(eigenvalue, residual, products).

    Half of the products find the eigenvalue of largest magnitude. If it is negative, the other half
    use H plus that magnitude, whose largest eigenvalue belongs to the top one of H. They also do so
    if two eigenvalues of opposite signs are so near in magnitude that the vector still mixes both.
    """
    begin = _Iteration(_start(objective, seed))
    found = _dominant(
        objective, begin, 0.0, num_products=-(-max_products // 2), tolerance=tolerance
    )
    num_left = max_products - found.num_products
    if found.eigenvalue < 0 or found.residual >= 1:
        begin = _Iteration(_start(objective, seed), num_products=found.num_products)
        found = _dominant(
            objective, begin, -found.length, num_products=num_left, tolerance=tolerance
        )
    elif found.residual >= tolerance:
        found = _dominant(objective, found, 0.0, num_products=num_left, tolerance=tolerance)
    return found.eigenvalue, found.residual, found.num_products


@dataclass(frozen=True)
class _Iteration:
    """State of a power iteration: its unit vector, the estimates from it, and products so far.

    `length` is |H v|: the largest magnitude of an eigenvalue once the iteration has converged.
    """

    vector: Tensor
    eigenvalue: float = math.nan
    residual: float = math.inf
    length: float = 0.0
    num_products: int = 0


def _start(objective: Objective, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, _START))
    vector = torch.randn(objective.num_parameters, generator=generator, dtype=torch.float64)
    unit: Tensor = vector / vector.norm()
    return unit.to(objective.parameters[0].device)


def _dominant(
    objective: Objective, begin: _Iteration, shift: float, *, num_products: int, tolerance: float
) -> _Iteration:
    """Iterates towards the eigenvalue of H that is farthest from `shift`, by power iteration."""
    at = begin
    for _ in range(num_products):
        product = objective.hessian_times(at.vector)
        eigenvalue = float(at.vector @ product)
        distance = float((product - eigenvalue * at.vector).norm())
        residual = distance / abs(eigenvalue) if eigenvalue else math.inf
        shifted = product - shift * at.vector
        length = float(shifted.norm())
        if not math.isfinite(length):
            raise AllstepError(
                "The loss has no finite second derivative at these weights (a norm or a root at 0,"
                " or numbers too large for their type), so that no eigenvalue can be told."
            )
        if not length:  # H is `shift` times the identity
            return _Iteration(at.vector, shift, 0.0, abs(shift), at.num_products + 1)
        vector = at.vector if residual < tolerance else shifted / length
        at = _Iteration(vector, eigenvalue, residual, float(product.norm()), at.num_products + 1)
        if residual < tolerance:
            break
    return at
