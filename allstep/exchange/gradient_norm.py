"""The norm of a whole model's gradients, also where workers have parts of it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from allstep.comm import Communicator, parts_along_axes, shards_of, stages_of
from allstep.exchange.divided import DividedParameters
from allstep.exchange.parameters import ParameterSet


def gradient_norm(
    model: nn.Module, parameters: ParameterSet, divided: DividedParameters, comm: Communicator
) -> Tensor:
    """L2 norm of all gradients, the same on all workers that have parts of one copy. Collective.

    norm = sqrt(sum over whole w of |g_w|^2 + sum over workers r and their parts p of |g_pr|^2)

    Everything is a part along the axis of a pipeline's stages.

    Args:
        model: the attached model.
        parameters: those of its parameters that are exchanged.
        divided: those that only this worker has.
        comm: the workers that it is attached to.
    """
    shards, trained = shards_of(model), parameters.trained
    whole = [p for name, p in trained.items() if name not in shards]
    gradients = [p.grad for p in [*trained.values(), *divided.by_name.values()]]
    dtype = next((g.dtype for g in gradients if g is not None), torch.float32)
    total = _square(whole, comm)
    for sharing in {shard.comm: None for shard in shards.values()}:
        cut = [trained[name] for name, shard in shards.items() if shard.comm is sharing]
        total = total + sharing.all_reduce(_square(cut, comm))
    if divided.has_modules:
        total = total + comm.all_reduce(_square(divided.by_name.values(), comm))
    for along in {stages.comm: None for stages in stages_of(model).values()}:
        total = along.all_reduce(total)
    return total.sqrt().to(dtype)


def is_in_parts(model: nn.Module, divided: DividedParameters) -> bool:
    """Whether other workers have other gradients."""
    return divided.has_modules or bool(parts_along_axes(model))


def _square(parameters: Iterable[nn.Parameter], comm: Communicator) -> Tensor:
    """In float64, as one worker may have no gradient and another many."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.to(comm.device, torch.float64).square()
