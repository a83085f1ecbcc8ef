"""A link of a given rate under a communicator, without the privileges of `ShapedHosts`.

It shapes only allstep's own messages.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm import Communicator, CompletedWork, JoinedWork, Topology, Wire, Work


class TokenBucket:
    """A token bucket for the bytes that a worker sends, at `rate_bps`.

    Args:
        rate_bps: bits per second.
        clock: of seconds.

    >>> bucket = TokenBucket(8000, clock=lambda: 10.0)
    >>> bucket.take(500), bucket.take(500)
    (10.5, 11.0)
    """

    def __init__(self, rate_bps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_bps = rate_bps
        self._clock = clock
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: float) -> float:
        """Takes tokens for a message; the time in seconds when its last byte will have left."""
        with self._lock:
            start_s = max(self._free_s, self._clock())
            self._free_s = start_s + 8 * num_bytes / self._rate_bps
            return self._free_s

    def wait_until(self, end_s: float) -> None:
        """Sleeps until a time."""
        time.sleep(max(0.0, end_s - self._clock()))


class ShapedCommunicator(Communicator):
    """A communicator whose workers' messages pass a token bucket, as if each were a host.

    Args:
        comm: stays open; close it afterwards.
        bucket: what its channels share.
    """

    def __init__(self, comm: Communicator, bucket: TokenBucket) -> None:
        topology = Topology(0, 1, comm.rank, comm.size)
        super().__init__(ShapedWire(comm.wire, bucket), topology, comm.device)


class ShapedWire:
    """A wire behind a token bucket.

    An all-reduce counts as a ring's, 2 (size - 1) / size of the tensor's bytes, a broadcast as the
    tensor's.

    Args:
        wire: that carries the messages.
        bucket: that they pass.
    """

    def __init__(self, wire: Wire, bucket: TokenBucket) -> None:
        self._wire, self._bucket = wire, bucket
        self.rank, self.size, self.group = wire.rank, wire.size, wire.group
        self.names = wire.names

    @property
    def timeout_s(self) -> float:
        """The timeout of a call."""
        return self._wire.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._wire.timeout_s = timeout_s

    def transport_device(self, device: torch.device) -> torch.device:
        return self._wire.transport_device(device)

    def _paced(self, num_bytes: float, work: Work[None]) -> Work[None]:
        """A Work that ends when the message's last byte would have left."""
        end_s = self._bucket.take(num_bytes)

        return JoinedWork([work], lambda: self._bucket.wait_until(end_s))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Work[None]:
        num_bytes = 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._paced(num_bytes, self._wire.all_reduce(tensor, op, verb))

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Work[None]]:
        own, posted = self._wire.reduce_scatter(parts, op, verb)
        sent = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        return own, self._paced(sent, posted)

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        return self._paced(buffer.nbytes, self._wire.broadcast(buffer, root, verb))

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        pieces = self._wire.all_gather(buffer, sizes_bytes, verb)
        self._paced((self.size - 1) * buffer.nbytes, CompletedWork(None)).wait()
        return pieces

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        pieces = self._wire.all_to_all(buffers, sizes_bytes, verb)
        sent = sum(b.nbytes for rank, b in enumerate(buffers) if rank != self.rank)
        self._paced(sent, CompletedWork(None)).wait()
        return pieces

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        return self._paced(buffer.nbytes, self._wire.send(buffer, dest, tag, verb))

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        return self._wire.recv(buffer, source, tag, verb)

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        posted = self._wire.exchange(outgoing, dest, incoming, source, tag, verb)
        return self._paced(outgoing.nbytes, posted)

    def new_group_id(self) -> int:
        return self._wire.new_group_id()

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "ShapedWire":
        return ShapedWire(self._wire.split(name, ranks, device), self._bucket)

    def check(self, verb: str) -> None:
        self._wire.check(verb)

    def interrupt(self) -> None:
        self._wire.interrupt()

    def close(self, *, abort: bool) -> None:
        self._wire.close(abort=abort)
