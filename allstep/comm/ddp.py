"""What torch's DistributedDataParallel does around a module."""

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
    """Whether it exchanges the gradients of a module inside by itself."""
    return isinstance(module, DistributedDataParallel)


def is_in_ddp(model: nn.Module) -> bool:
    """Whether it is called in the forward of a DistributedDataParallel around it."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch's own mark
    return ddp is not None and any(module is model for module in ddp.modules())


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether it is in `ddp.join()`, where workers may have different numbers of batches."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def find_ddp(parameters: Iterable[Tensor], hook: object = None) -> DistributedDataParallel | None:
    """One that exchanges the gradient of one of these, whichever module it was made of.

    It leaves no mark on its parameters, and nobody keeps a list: the garbage collector knows all
    objects. It takes about 0.03 s, and is not asked where torch.distributed was not initialized.

    Args:
        parameters: of which it has one.
        hook: if several do, the one that calls this communication hook.
    """
    if not dist.is_initialized():
        return None
    ids = {id(p) for p in parameters}
    if not _ddps_of(ids):
        return None
    gc.collect()  # what nobody holds any more exchanges nothing from now on
    ddps = _ddps_of(ids)
    callers = (ddp for ddp in ddps if any(hook is own for own, _ in ddp._comm_hooks))
    return next(callers, next(iter(ddps), None))


def _ddps_of(ids: set[int]) -> list[DistributedDataParallel]:
    """Those that have a parameter with one of these `id`s."""
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An object refers to its class. Not by isinstance, which asks some objects for an attribute.
    ddps = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    return [ddp for ddp in ddps if any(id(p) in ids for p in ddp.parameters())]
