"""Ranks as processes that share one GPU: over Gloo, or over NCCL as if each had a host of its own.

NCCL refuses two ranks on one GPU where it sees that they are: `NCCL_HOSTID` hides it, and their
messages take the network's way through the host. So the calls, streams, timeouts and errors are
NCCL's own; what NVLink or two GPUs would show, this does not.

With `pytest --gpu-tests-on-cpu` the same tests run on CPUs, to see that they are sound before
there is a GPU.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allstep.comm import Communicator, init, initialise
from allstep.env import read_launch
from tests.helpers.gpus import on_cpu
from tests.helpers.processes import Workers

LINKS = ["gloo", "nccl"]
over_links = pytest.mark.parametrize("link", LINKS)


def gpu() -> torch.device:
    """What all ranks share."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", 0)


def run_on_gpu(
    n: int, fn: Callable[..., Any], *args: Any, link: str = "nccl", timeout_s: float = 100.0
) -> list[Any]:
    """Runs `fn(comm, *args)` in n processes that compute on one GPU; returns the results, by rank.

    Args:
        n: number of ranks.
        fn: can be imported; what it returns can be pickled, so no tensors of a GPU.
        args: plain data.
        link: one of `LINKS`.
        timeout_s: of the communicators, and of all.
    """
    with start_on_gpu(n, fn, *args, link=link, timeout_s=timeout_s) as workers:
        return workers.results(timeout_s)


def start_on_gpu(
    n: int, fn: Callable[..., Any], *args: Any, link: str = "nccl", timeout_s: float = 100.0
) -> Workers:
    """Starts what `run_on_gpu` runs."""
    return Workers(n, _with_comm, (link, timeout_s, fn, args))


def share_the_gpu() -> None:
    """Lets this rank's NCCL share a GPU with others, and its products be those of float32."""
    os.environ["NCCL_HOSTID"] = f"host of rank {read_launch().rank}"
    os.environ["NCCL_NET"], os.environ["NCCL_SOCKET_IFNAME"] = "Socket", "lo"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # else cuDNN's recurrent layers vary
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def _with_comm(link: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    share_the_gpu()
    with mock.patch.object(initialise, "check_own_devices"), _init(link, timeout_s) as comm:
        result = fn(comm, *args)
        if comm.size == 1 or comm.process_group is not None:  # `fn` may have left the group
            comm.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _init(link: str, timeout_s: float) -> Communicator:
    """`init` as a user calls it, or over a group of Gloo alone, as a framework may have made it."""
    if link == "gloo":
        dist.init_process_group("gloo")
    return init(device=gpu(), timeout_s=timeout_s)
