"""How rates and warm-ups follow the global batch."""

import math

from allstep.errors import UsageError

__all__ = ["linear_scaling", "linear_warmup_epochs", "sqrt_scaling"]


def linear_scaling(base_lr: float, base_batch: int, global_batch: int) -> float:
    """The rate grows as the batch does, so that an epoch's steps add up to the same way.

    lr = base_lr * global_batch / base_batch

    Args:
        base_lr: a rate that is good for `base_batch`.
        base_batch: in samples.
        global_batch: in samples, over all workers.

    Returns:
        The rate for `global_batch`.

    Raises:
        UsageError: if an argument is not positive.

    >>> linear_scaling(0.1, 256, 8192)
    3.2

    Source: Goyal et al., 2017, arXiv:1706.02677, section 2.1.
    """
    _check_positive(base_lr=base_lr, base_batch=base_batch, global_batch=global_batch)
    return base_lr * global_batch / base_batch


def sqrt_scaling(base_lr: float, base_batch: int, global_batch: int) -> float:
    """The rate grows with the root of the batch, so that the noise of a step stays the same.

    lr = base_lr * sqrt(global_batch / base_batch)

    Args:
        base_lr: a rate that is good for `base_batch`.
        base_batch: in samples.
        global_batch: in samples, over all workers.

    Returns:
        The rate for `global_batch`.

    Raises:
        UsageError: if an argument is not positive.

    >>> sqrt_scaling(0.1, 256, 1024)
    0.2

    Source: Krizhevsky, 2014, arXiv:1404.5997; You et al., 2020, arXiv:1904.00962, section 4.
    """
    _check_positive(base_lr=base_lr, base_batch=base_batch, global_batch=global_batch)
    return base_lr * math.sqrt(global_batch / base_batch)


def linear_warmup_epochs(base_epochs: float, base_batch: int, global_batch: int) -> float:
    """Linear-epoch warm-up: its epochs grow as the batch does, so its steps stay the same.

    epochs = base_epochs * global_batch / base_batch

    Args:
        base_epochs: of the warm-up at `base_batch`.
        base_batch: in samples.
        global_batch: in samples, over all workers.

    Returns:
        The epochs of the warm-up at `global_batch`.

    Raises:
        UsageError: if an argument is not positive.

    >>> linear_warmup_epochs(0.3125, 512, 32768)
    20.0

    Source: You et al., 2020, arXiv:1904.00962, section 4.
    """
    _check_positive(base_epochs=base_epochs, base_batch=base_batch, global_batch=global_batch)
    return base_epochs * global_batch / base_batch


def _check_positive(**arguments: float) -> None:
    for name, value in arguments.items():
        if not 0 < value < math.inf:
            raise UsageError(f"`{name}` (={value}) must be finite and positive.")
