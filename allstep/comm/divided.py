"""Modules of which each worker has others than the rest, as seen by what exchanges gradients."""

from torch import nn

from allstep.comm.communicator import Communicator


class DividedModules(nn.ModuleDict):
    """Modules that are divided over workers, under names that are the same whoever has them.

    [Note: divided parameters] `attach` leaves them to the worker that has them: it neither sends
    their values nor their gradients. The layer around them must send data through the workers, so
    that their gradient is that of the sum of all workers' losses,

        grad = scale * sum_r grad of loss_r

    with the scale of every other gradient: 1/size for a mean, 1 where losses are weighed already.

    Args:
        comm: the workers; those that the model is attached to.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    @property
    def comm(self) -> Communicator:
        """The workers that they are divided over."""
        return self._comm


def divided_modules(model: nn.Module) -> dict[str, DividedModules]:
    """name -> modules of the model that are divided over several workers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DividedModules) and module.comm.size > 1
    }


def divided_prefixes(model: nn.Module) -> tuple[str, ...]:
    """What the names of divided parameters and buffers begin with, for `str.startswith`.

    >>> divided_prefixes(nn.Linear(2, 1))
    ()
    """
    return tuple(f"{name}." if name else "" for name in divided_modules(model))
