"""Sharpness of the minimum that a training found: top Hessian eigenvalue, loss rise under noise.

[Note: a function of the weights] Both are of the mean loss over given samples, with the model in
eval mode: batch norm takes its running statistics and dropout does nothing, so that the loss is a
mean over samples, whatever the micro-batches and whichever worker has them. All sums over samples
are made in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from allstep.comm import Communicator, divided_modules, shards_of
from allstep.data import GlobalBatch
from allstep.data.random import derive_seed
from allstep.errors import AllstepError, UsageError, check_integer
from allstep.torch_classes import is_dtensor
from allstep.train.curvature import Objective, top_eigenvalue
from allstep.train.evaluator import evaluating
from allstep.train.layer_sharpness import LayerSharpness, measure_layers

_NOISE = 0x6E6F697365


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """What `sharpness` measured; the same on every worker.

    Attributes:
        loss: mean over the samples.
        top_eigenvalue: largest eigenvalue of the loss's Hessian.
        residual: |H v - eigenvalue v| / |eigenvalue| of the unit vector v that it was found with;
            some eigenvalue is no farther than this share away.
        num_products: Hessian-vector products that it took.
        loss_rise: mean rise of the loss when every weight tensor gets Gaussian noise of `sigma`
            times its root mean square.
        loss_rise_error: standard error of that mean.
        sigma: as given.
        num_draws: draws of the noise.
        num_samples: samples over which the loss is the mean.
        layers: measurements of every parameter tensor, if requested.
    """

    loss: float
    top_eigenvalue: float
    residual: float
    num_products: int
    loss_rise: float
    loss_rise_error: float
    sigma: float
    num_draws: int
    num_samples: int
    layers: tuple[LayerSharpness, ...] = ()


def sharpness(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: GlobalBatch,
    comm: Communicator,
    *,
    max_products: int = 100,
    tolerance: float = 1e-3,
    sigma: float = 0.05,
    num_draws: int = 8,
    seed: int = 0,
    layers: bool = False,
) -> Sharpness:
    """Measures how sharp the loss is around the model's weights. Collective.

    top_eigenvalue = max over unit v of v.H v, by power iteration v <- H v / |H v|
    loss_rise = mean over draws of loss(w + sigma * rms(w) * noise) - loss(w)

    If the eigenvalue of largest magnitude is negative, the iteration continues with H minus it.

    Args:
        model: on `comm.device`, not attached; its weights and modes are as before afterwards.
        loss: `(model, micro_batch) -> scalar`, the mean over the micro-batch's samples; twice
            differentiable.
        batch: from `allstep.data.loader(...).global_batches()`, with any micro-batches.
        comm: the workers that share the batch.
        max_products: largest number of Hessian-vector products.
        tolerance: stop when the residual is below this.
        sigma: size of the noise, relative to each tensor's root mean square.
        num_draws: draws of the noise.
        seed: seed of the first vector and of the noise.
        layers: whether to measure every parameter tensor separately, too; each takes up to
            `max_products` more products.

    Returns:
        The largest eigenvalue and the mean rise of the loss, the same on every worker.

    Raises:
        UsageError: if a number is out of range, the model has nothing to train, or a part of it is
            divided over workers.
        AllstepError: if the loss is not finite, or has no finite second derivative.

    >>> from torch.utils.data import TensorDataset
    >>> import allstep
    >>> model = nn.Linear(2, 1, bias=False)  # loss w[0]**2 + 4 * w[1]**2
    >>> samples = TensorDataset(torch.tensor([[2.0**0.5, 0.0], [0.0, 8.0**0.5]]))
    >>> comm = Communicator.single_process()
    >>> loader = allstep.data.loader(samples, comm, global_batch=2, micro_batch=1)
    >>> batch = next(loader.global_batches())
    >>> measured = sharpness(model, lambda m, data: m(data[0]).square().mean(), batch, comm)
    >>> round(measured.top_eigenvalue, 3)
    8.0

    Source: Yao et al., 2020, arXiv:1912.07145 (power iteration); the sharp minima of Keskar et
    al., 2017, arXiv:1609.04836.
    """
    check_sharpness_arguments(sigma, num_draws, max_products, tolerance)
    workers = dict.fromkeys(divided_modules(model), comm)
    workers |= {name: shard.comm for name, shard in shards_of(model).items()}
    workers |= {name: comm for name, p in model.named_parameters() if is_dtensor(p)}
    for name, others in workers.items():
        raise UsageError(
            f"`model.{name}` is divided over the {others.size} workers, and each needs the second"
            " derivatives of all of it: measure on one, as with `allstep sharpness --workers 1`."
        )
    objective = Objective(model, loss, batch, comm)
    with sdpa_kernel(SDPBackend.MATH), evaluating(model):  # the other kernels have one derivative
        at_rest = objective.value()
        if not math.isfinite(at_rest):
            raise AllstepError(
                f"The loss is {at_rest}: the weights are of a training that diverged, and no"
                " minimum is near them. Lower its learning rate."
            )
        eigenvalue, residual, num_products = top_eigenvalue(
            objective, max_products=max_products, tolerance=tolerance, seed=seed
        )
        rises = _loss_rises(objective, at_rest, sigma=sigma, num_draws=num_draws, seed=seed)
        measured = (
            measure_layers(objective, max_products=max_products, tolerance=tolerance, seed=seed)
            if layers
            else ()
        )
    return Sharpness(
        loss=at_rest,
        top_eigenvalue=eigenvalue,
        residual=residual,
        num_products=num_products,
        loss_rise=float(rises.mean()),
        loss_rise_error=float(rises.std() / math.sqrt(num_draws)),
        sigma=sigma,
        num_draws=num_draws,
        num_samples=batch.num_samples,
        layers=measured,
    )


@torch.no_grad()
def _loss_rises(
    objective: Objective, at_rest: float, *, sigma: float, num_draws: int, seed: int
) -> Tensor:
    """The rise of the loss for each draw of the noise; the weights are restored."""
    kept = [p.detach().clone() for p in objective.parameters]
    rises = []
    try:
        for draw in range(num_draws):
            generator = torch.Generator().manual_seed(derive_seed(seed, _NOISE, draw))
            for p, weight in zip(objective.parameters, kept, strict=True):
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                rms = weight.double().square().mean().sqrt()
                p.copy_(weight.double() + sigma * rms * noise.to(weight.device))
            rises.append(objective.value() - at_rest)
    finally:
        for p, weight in zip(objective.parameters, kept, strict=True):
            p.copy_(weight)
    return torch.tensor(rises, dtype=torch.float64)


def check_sharpness_arguments(
    sigma: float, num_draws: int, max_products: int, tolerance: float = 1e-3
) -> None:
    """Checks the arguments of `sharpness`, before any work.

    Raises:
        UsageError: naming the argument.
    """
    check_integer("max_products", max_products, 2, "100 is usual")
    if not 0 < tolerance < 1:
        raise UsageError(f"`tolerance` (={tolerance}) must be between 0 and 1; 1e-3 is usual.")
    if not 0 < sigma < math.inf:
        raise UsageError(f"`sigma` (={sigma}) must be positive and finite; 0.05 is usual.")
    check_integer("num_draws", num_draws, 2, "a standard error takes two")
