"""Recognises torch's DistributedDataParallel around a module."""

import gc
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WITHOUT_DDP = (
    "without DDP and a framework's `setup` or `prepare`, which makes it; or keep DDP alone, without"
    " `attach`, and register `allstep.ddp_hook`."
)


def is_ddp(module: nn.Module) -> bool:
    """Whether a module is a DistributedDataParallel, which exchanges gradients by itself."""
    return isinstance(module, DistributedDataParallel)


def is_in_ddp(model: nn.Module) -> bool:
    """Whether the model runs in the forward pass of a DistributedDataParallel around it."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch's own mark
    return ddp is not None and any(module is model for module in ddp.modules())


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether `ddp` is in `ddp.join()`, where workers may have different numbers of batches."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def find_ddp(parameters: Iterable[Tensor], hook: object = None) -> DistributedDataParallel | None:
    """The DistributedDataParallel that exchanges the gradient of one of `parameters`, if any does.

    DDP leaves no mark on its parameters, and there is no list of DDPs, so this searches all objects
    of the garbage collector. It takes about 0.03 s, and is skipped if torch.distributed is not
    initialised.

    Args:
        parameters: the parameters.
        hook: a communication hook; of several DDPs the one that calls it is returned.
    """
    if not dist.is_initialized():
        return None
    ids = {id(p) for p in parameters}
    if not _ddps_of(ids):
        return None
    gc.collect()  # a DDP without references exchanges nothing from now on
    ddps = _ddps_of(ids)
    callers = (ddp for ddp in ddps if any(hook is own for own, _ in ddp._comm_hooks))
    return next(callers, next(iter(ddps), None))


def _ddps_of(ids: set[int]) -> list[DistributedDataParallel]:
    """The DistributedDataParallels that have a parameter with one of these `id`s."""
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An object refers to its class. isinstance would ask some objects for an attribute.
    ddps = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    return [ddp for ddp in ddps if any(id(p) in ids for p in ddp.parameters())]
