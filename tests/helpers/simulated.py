"""A network that is only a dict of queues: a `Wire` without torch's process groups."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm import Communicator, Work
from allstep.comm.group import Topology
from allstep.comm.missing import RankNames
from allstep.comm.work import CompletedWork, JoinedWork

_TAG = -1  # of collectives
_REDUCE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class Network:
    """Messages on their way, by group, sender, receiver and tag."""

    def __init__(self) -> None:
        self._queues: dict[Any, SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()
        self.group_ids = count()

    def queue(self, *key: object) -> SimpleQueue[Tensor]:
        with self._lock:
            return self._queues[key]


class SimulatedWire:
    """A rank's end of a `Network`; see `Wire` for the verbs."""

    group = None

    def __init__(self, network: Network, name: str, names: RankNames, rank: int, size: int) -> None:
        self._network, self._name = network, name
        self.rank, self.size, self.names, self.timeout_s = rank, size, names, 20.0

    def transport_device(self, device: torch.device) -> torch.device:
        return device

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        self._network.queue(self._name, self.rank, dest, tag).put(buffer.clone())
        return CompletedWork(None)

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        queue = self._network.queue(self._name, source, self.rank, tag)

        def take() -> None:
            buffer.copy_(queue.get(timeout=self.timeout_s))

        return JoinedWork([], take)

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        self.send(outgoing, dest, tag, verb)
        return self.recv(incoming, source, tag, verb)

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        for dest, buffer in enumerate(buffers):
            self.send(buffer, dest, _TAG, verb)
        pieces = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in sizes_bytes]
        for source, piece in enumerate(pieces):
            self.recv(piece, source, _TAG, verb).wait()
        return pieces

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        return self.all_to_all([buffer] * self.size, sizes_bytes, verb)

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        if self.rank != root:
            return self.recv(buffer, root, _TAG, verb)
        for dest in range(self.size):
            if dest != root:
                self.send(buffer, dest, _TAG, verb)
        return CompletedWork(None)

    def all_reduce(self, tensor: Tensor, op: Any, verb: str) -> Work[None]:
        raw = tensor.reshape(-1).view(torch.uint8)
        pieces = self.all_gather(raw, [raw.numel()] * self.size, verb)
        first, *others = [piece.view(tensor.dtype).view(tensor.shape) for piece in pieces]
        for other in others:
            first = _REDUCE[op](first, other)
        tensor.copy_(first)
        return CompletedWork(None)

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: Any, verb: str
    ) -> tuple[Tensor, Work[None]]:
        whole = [part.clone() for part in parts]
        for part in whole:
            self.all_reduce(part, op, verb)
        return whole[self.rank], CompletedWork(None)

    def new_group_id(self) -> int:
        return next(self._network.group_ids)

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "SimulatedWire":
        rank = ranks.index(self.rank)
        names = self.names.subgroup(ranks, rank)
        return SimulatedWire(self._network, f"{self._name}/{name}", names, rank, len(ranks))

    def check(self, verb: str) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def close(self, *, abort: bool) -> None:
        pass


def run_simulated(n: int, fn: Callable[[Communicator], Any], local_size: int = 1) -> list[Any]:
    """Runs `fn(comm)` on n ranks of one simulated network, each a thread."""
    network = Network()

    def work(rank: int) -> Any:
        wire = SimulatedWire(network, "", RankNames(range(n), rank, n), rank, n)
        topology = Topology.from_nodes([other // local_size for other in range(n)], rank)
        return fn(Communicator(wire, topology, torch.device("cpu")))

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(work, range(n)))
