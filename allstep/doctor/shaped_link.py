"""Links as slow as one likes between workers on one machine, to try a network before buying it.

Two ways: network namespaces, which need root, and a token bucket under a communicator, which
needs nothing but shapes allstep's own messages alone.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.topology import Topology
from allstep.comm.wire import Posted, Wire
from allstep.errors import AllstepError

__all__ = ["ShapedCommunicator", "ShapedHosts", "TokenBucket", "UnavailableError"]

_BURST_S = 0.002  # how long a link that was idle may be faster than its rate
_SMALLEST_BURST_BYTES = 16 << 10
_QUEUE_S = 0.1  # of a port, as in a switch with some hundred KB of memory for it


class UnavailableError(AllstepError, RuntimeError):
    """This machine can't have hosts of its own; the message says why."""


class ShapedHosts:
    """Hosts on a switch, whose links carry `rate_bps` each way; as a context manager.

    A host is a network namespace whose only way out is a link to the switch; each end of the link
    sends through a token bucket. Hosts have the addresses 10.78.0.1, 10.78.0.2, ... on `eth0`.

    Args:
        num_hosts: 1 to 250.
        rate_bps: bits per second; headers count.

    Raises:
        UnavailableError: without root, iproute2 or the kernel's support.
    """

    def __init__(self, num_hosts: int, rate_bps: float) -> None:
        assert 1 <= num_hosts <= 250
        if os.geteuid() != 0:
            raise UnavailableError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"`{tool}` is missing: apt-get install iproute2")
        self._rate_bps = rate_bps
        self._switch = f"allstep-demo-{os.getpid()}-switch"
        self._hosts = [f"allstep-demo-{os.getpid()}-{i}" for i in range(num_hosts)]

    def commands(self, command: Sequence[str], variables: Mapping[str, object]) -> list[list[str]]:
        """A command for each host, as rank i of as many, as torchrun would start it."""
        size = len(self._hosts)
        prefixes = []
        for rank, host in enumerate(self._hosts):
            own: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
            }
            own |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": size, "MASTER_PORT": 29_400}
            own |= {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
            words = [f"{name}={value}" for name, value in {**own, **variables}.items()]
            prefixes.append(["ip", "netns", "exec", host, "env", *words])
        return [[*prefix, *command] for prefix in prefixes]

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            _ip("netns", "add", host)
            _ip(
                *("-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", host),
            )
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host, "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            for namespace, device in ((host, "eth0"), (self._switch, port)):
                self._shape(namespace, device)

    def _shape(self, namespace: str, device: str) -> None:
        burst_bytes = max(_SMALLEST_BURST_BYTES, self._rate_bps / 8 * _BURST_S)
        shape = ["tbf", "rate", f"{self._rate_bps:.0f}bit", "burst", f"{burst_bytes:.0f}"]
        shape += ["latency", f"{1e3 * _QUEUE_S:.0f}ms"]
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        """Removes what there is; links go with their namespaces."""
        for namespace in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


class TokenBucket:
    """What leaves a worker: bytes in order, at `rate_bps`.

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
        """Seconds on the clock when the last of so many bytes will have left."""
        with self._lock:
            start_s = max(self._free_s, self._clock())
            self._free_s = start_s + 8 * num_bytes / self._rate_bps
            return self._free_s

    def wait_until(self, end_s: float) -> None:
        """Sleeps until then."""
        time.sleep(max(0.0, end_s - self._clock()))


class ShapedCommunicator(Communicator):
    """The workers of another communicator, each as a host whose messages pass a token bucket.

    Args:
        comm: stays open; close it afterwards.
        bucket: what its channels share.
    """

    def __init__(self, comm: Communicator, bucket: TokenBucket) -> None:
        topology = Topology(0, 1, comm.rank, comm.size)
        super().__init__(ShapedWire(comm.wire, bucket), topology, comm.device)
        self._bucket = bucket

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """As `Communicator.split`; the part is shaped by the same bucket."""
        part = super().split(color, key)
        return None if part is None else ShapedCommunicator(part, self._bucket)


class ShapedWire:
    """Another wire behind a token bucket.

    An all-reduce counts as a ring's, 2 (size - 1) / size of the tensor's bytes, a broadcast as the
    tensor's.

    Args:
        wire: that carries the messages.
        bucket: that they pass.
    """

    def __init__(self, wire: Wire, bucket: TokenBucket) -> None:
        self._wire, self._bucket = wire, bucket
        self.rank, self.size, self.group = wire.rank, wire.size, wire.group
        self.timeout_s = wire.timeout_s

    def carrier(self, device: torch.device) -> torch.device:
        return self._wire.carrier(device)

    def _paced(self, num_bytes: float, posted: Posted) -> Posted:
        """Lets a message end when its last byte would have left."""
        end_s = self._bucket.take(num_bytes)

        def wait(timeout_s: float | None) -> None:
            posted.wait(timeout_s)
            self._bucket.wait_until(end_s)

        return Posted(wait)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Posted:
        num_bytes = 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._paced(num_bytes, self._wire.all_reduce(tensor, op, verb))

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Posted]:
        own, posted = self._wire.reduce_scatter(parts, op, verb)
        sent = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        return own, self._paced(sent, posted)

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Posted:
        return self._paced(buffer.nbytes, self._wire.broadcast(buffer, root, verb))

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        pieces = self._wire.all_gather(buffer, sizes_bytes, verb)
        self._paced((self.size - 1) * buffer.nbytes, Posted()).wait()
        return pieces

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        pieces = self._wire.all_to_all(buffers, sizes_bytes, verb)
        sent = sum(b.nbytes for rank, b in enumerate(buffers) if rank != self.rank)
        self._paced(sent, Posted()).wait()
        return pieces

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Posted:
        return self._paced(buffer.nbytes, self._wire.send(buffer, dest, tag, verb))

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Posted:
        return self._wire.recv(buffer, source, tag, verb)

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Posted:
        posted = self._wire.exchange(outgoing, dest, incoming, source, tag, verb)
        return self._paced(outgoing.nbytes, posted)

    def close(self, *, abort: bool) -> None:
        self._wire.close(abort=abort)
