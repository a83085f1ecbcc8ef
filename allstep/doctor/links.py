"""Latency and bandwidth of messages between two workers, pair by pair."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median_high
from time import perf_counter

import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import Messenger
from allstep.doctor.measurements import PairTiming
from allstep.doctor.timing import USUAL_EFFORT, Effort, synchronize
from allstep.plan import Link

_NUM_PINGS = 20
_ENOUGH_S = 0.03  # a slow link is known before the largest size
_REPEATS = 3


def measure_pairs(comm: Communicator, effort: Effort = USUAL_EFFORT) -> tuple[PairTiming, ...]:
    """Times messages between the first workers of every two hosts, and inside each host.

    bandwidth = 8 (n1 - n0) / (seconds of n1 bytes - seconds of n0 bytes)

    so that neither latency nor the head start of an idle link counts. One pair talks at a time.
    Collective.

    Returns:
        The timings, the same on every worker.
    """
    places = comm.all_gather_object((comm.node_rank, comm.local_rank))
    own: list[tuple[tuple[int, int], tuple[float, float]]] = []
    pairs = _pairs(places)
    for pair in pairs:
        comm.barrier()
        if comm.rank == pair[0]:
            own.append((pair, _ask(comm, pair[1], effort.message_sizes_bytes)))
        elif comm.rank == pair[1]:
            _answer(comm, pair[0])
    links = {pair: link for found in comm.all_gather_object(own) for pair, link in found}
    return tuple(
        PairTiming(
            ranks=pair,
            same_host=places[pair[0]][0] == places[pair[1]][0],
            link=Link(bandwidth_bps=links[pair][0], latency_s=links[pair][1]),
        )
        for pair in pairs
    )


def slowest(pairs: Sequence[PairTiming], *, same_host: bool) -> Link | None:
    """The link that limits a ring: the lowest bandwidth and the highest latency."""
    links = [pair.link for pair in pairs if pair.same_host == same_host]
    if not links:
        return None
    return Link(
        bandwidth_bps=min(link.bandwidth_bps for link in links),
        latency_s=max(link.latency_s for link in links),
    )


def _pairs(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of two hosts' first workers, and of a host's first worker with each other one there.

    >>> _pairs([(0, 0), (0, 1), (1, 0)])
    [(0, 1), (0, 2)]
    """
    return [
        (a, b)
        for a, b in combinations(range(len(places)), 2)
        if places[a][1] == 0 and (places[a][0] == places[b][0] or places[b][1] == 0)
    ]


def _ask(comm: Communicator, peer: int, sizes_bytes: Sequence[int]) -> tuple[float, float]:
    """Sends messages that are acknowledged, each after its length; 0 ends them.

    Returns:
        Bandwidth in bits per second, and latency in seconds.
    """
    messenger = Messenger(comm)
    ping_s = median_high(_send(comm, messenger, peer, 1) for _ in range(_NUM_PINGS))
    seconds: list[float] = []
    for num_bytes in sizes_bytes:
        seconds.append(min(_send(comm, messenger, peer, num_bytes) for _ in range(_REPEATS)))
        if len(seconds) > 2 and seconds[-1] > _ENOUGH_S:
            break
    _header(comm, messenger, peer, 0)
    smaller, largest = sizes_bytes[len(seconds) - 2 : len(seconds)]
    s_per_byte = (seconds[-1] - seconds[-2]) / (largest - smaller)
    if s_per_byte <= 0:  # too fast for this clock: all of it is latency
        s_per_byte = seconds[-1] / largest
    # A ping is a header, a byte and an answer.
    return 8 / s_per_byte, ping_s / 3


def _send(comm: Communicator, messenger: Messenger, peer: int, num_bytes: int) -> float:
    x = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device)
    start_s = perf_counter()
    _header(comm, messenger, peer, num_bytes)
    messenger.send(x, peer).wait()
    messenger.recv(x[:1], peer).wait()
    synchronize(comm.device)
    return perf_counter() - start_s


def _header(comm: Communicator, messenger: Messenger, peer: int, num_bytes: int) -> None:
    messenger.send(torch.tensor([num_bytes], device=comm.device), peer).wait()


def _answer(comm: Communicator, peer: int) -> None:
    messenger = Messenger(comm)
    header = torch.zeros(1, dtype=torch.int64, device=comm.device)
    while True:
        messenger.recv(header, peer).wait()
        num_bytes = int(header.item())
        if not num_bytes:
            return
        x = torch.zeros(num_bytes, dtype=torch.uint8, device=comm.device)
        messenger.recv(x, peer).wait()
        synchronize(comm.device)
        messenger.send(x[:1], peer).wait()
