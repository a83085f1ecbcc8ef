"""Makes process groups on a store, without touching torch's global state."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["make_group"]

_BackendType = dist.ProcessGroup.BackendType


def make_group(
    store: Store, rank: int, size: int, *, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """A group of `size` workers who meet on `store`: Gloo, and NCCL beside it on CUDA.

    Any number of groups may live in a process, also of several threads.

    Args:
        store: shared by the members and by nobody else; wrap it in a PrefixStore.
        rank, size: this member and how many there are.
        device: where this member computes.
        timeout_s: how long a call in the group may take, and the meeting too.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu/", store), rank, size, timeout)
    group._register_backend(torch.device("cpu"), _BackendType.GLOO, gloo)
    group._set_default_backend(_BackendType.GLOO)
    if device.type == "cuda":
        _add_nccl(group, store, device, timeout)
    return group


def _add_nccl(
    group: dist.ProcessGroup, store: Store, device: torch.device, timeout: timedelta
) -> None:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), group.rank(), group.size(), options)
    group.bound_device_id = device
    group._register_backend(torch.device("cuda"), _BackendType.NCCL, nccl)
    group._set_default_backend(_BackendType.NCCL)
