"""A memory format: [height, width, channel, batch], in which a window's row is one matrix.

[Note: batch last] Tensors have torch's shape [batch, channel, height, width] wherever a user sees
them. The layers that are faster with the batch last hand out such tensors with their memory in
the order of [height, width, channel, batch], as `torch.channels_last` tensors have it in the order
of [batch, height, width, channel]. Between two of these layers nothing is copied.
"""

from torch import Tensor


def to_batch_last(x: Tensor) -> Tensor:
    """[batch, channel, height, width] as a contiguous [height, width, channel, batch].

    A view where `x` came from `from_batch_last`.
    """
    return x.permute(2, 3, 1, 0).contiguous()


def from_batch_last(x: Tensor) -> Tensor:
    """[height, width, channel, batch] as [batch, channel, height, width]; a view."""
    return x.permute(3, 2, 0, 1)
