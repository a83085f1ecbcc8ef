"""What torch's DistributedDataParallel does around a module."""

from torch import nn
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
