"""Ranks as threads of one process: a group in 0.05 s, for tests and experiments."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from allstep.comm.communicator import Communicator
from allstep.comm.failures import translated
from allstep.comm.group import Topology
from allstep.comm.group_wire import GroupWire, make_group
from allstep.comm.work import check_timeout
from allstep.env import without_collector
from allstep.errors import (
    CommunicationError,
    PeerLostError,
    check_integer,
    check_multiple,
)

__all__ = ["run_ranks"]

T = TypeVar("T")


def run_ranks(
    n: int,
    fn: Callable[[Communicator], T],
    *,
    local_size: int | None = None,
    timeout_s: float = 30.0,
) -> list[T]:
    """Runs `fn(comm)` on n ranks, each a thread with a Gloo group of its own.

    A rank that raises aborts its group, so that the others fail at once. Meanwhile cyclic garbage
    is not collected. [Note: collector and random state]

    Args:
        n: number of ranks.
        fn: function that each rank calls with its communicator.
        local_size: ranks per node, to simulate several nodes; n if None. Divides n.
        timeout_s: the communicators' timeout.

    Returns:
        The n results, by rank.

    Raises:
        UsageError: if `n`, `local_size` or `timeout_s` is out of range.
        Exception: the first rank's error that is not just a consequence of another rank's.

    >>> run_ranks(3, lambda comm: comm.all_reduce(torch.tensor(comm.rank)).item())
    [3, 3, 3]
    """
    local_size = _check(n, local_size, timeout_s)
    store = HashStore()
    results: dict[int, T] = {}
    failures: list[tuple[float, int, BaseException]] = []
    groups: list[Communicator] = []  # kept until all have ended: a rank may end before its peers

    def work(rank: int) -> None:
        try:
            comm = _join(PrefixStore("ranks", store), rank, n, local_size, timeout_s)
            groups.append(comm)
            try:
                results[rank] = fn(comm)
            except BaseException:
                comm.abort()
                raise
        except BaseException as error:
            error.add_note(f"on rank {rank} of {n}")
            failures.append((time.monotonic(), rank, error))

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    with without_collector():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for comm in groups:
        comm.close()
    if failures:
        raise min(failures, key=lambda failure: (_severity(failure[2]), failure[0]))[2]
    return [results[rank] for rank in range(n)]


def _check(n: int, local_size: int | None, timeout_s: float) -> int:
    check_timeout(timeout_s)
    check_integer("n", n)
    if local_size is None:
        return n
    check_integer("local_size", local_size)
    check_multiple("n", n, "local_size", local_size)
    return local_size


def _join(
    store: PrefixStore, rank: int, size: int, local_size: int, timeout_s: float
) -> Communicator:
    device = torch.device("cpu")
    with translated("init", rank, size, timeout_s):
        group = make_group(store, rank, size, device=device, timeout_s=timeout_s)
    topology = Topology.from_nodes([other // local_size for other in range(size)], rank)
    return Communicator(GroupWire(group, timeout_s), topology, device)


def _severity(error: BaseException) -> int:
    """Sorts causes before consequences: 0 for a rank's own error, 2 for a lost peer."""
    if isinstance(error, PeerLostError):
        return 2
    return 1 if isinstance(error, CommunicationError) else 0
