"""Simulated hosts on one machine with links of a given rate, by network namespaces.

A host is a network namespace whose only way out is a link to a switch; two are joined by a cable,
since a switch's work would be done by the hosts' cores. Needs root and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

from allstep.errors import AllstepError

_BURST_S = 0.002  # how long a link that was idle may be faster than its rate
_SMALLEST_BURST_BYTES = 16 << 10
_QUEUE_S = 0.1  # of a port, as in a switch with some hundred KB of memory for it


class UnavailableError(AllstepError, RuntimeError):
    """Raised if this machine can't have simulated hosts; the message says why."""


class ShapedHosts:
    """Hosts whose links carry `rate_bps` each way; as a context manager.

    Each end of a link sends through a token bucket, so that a host neither sends nor receives
    faster. Hosts have the addresses 10.78.0.1, 10.78.0.2, ... on `eth0`.

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
        self._switch = f"allstep-{os.getpid()}-switch"
        self._hosts = [f"allstep-{os.getpid()}-{i}" for i in range(num_hosts)]

    @property
    def namespaces(self) -> list[str]:
        """The names of the hosts' network namespaces."""
        return list(self._hosts)

    def commands(self, command: Sequence[str], variables: Mapping[str, object]) -> list[list[str]]:
        """A command for each host, which runs as rank i, as torchrun would start it."""
        size = len(self._hosts)
        alike: dict[str, object] = {"WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        alike |= {"GROUP_WORLD_SIZE": size, "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": 29_400}
        alike |= {"GLOO_SOCKET_IFNAME": "eth0", **variables}
        lines = []
        for rank, host in enumerate(self._hosts):
            own = {"RANK": rank, "GROUP_RANK": rank, **alike}
            words = [f"{name}={value}" for name, value in own.items()]
            lines.append(["ip", "netns", "exec", host, "env", *words, *command])
        return lines

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        for host in self._hosts:
            _ip("netns", "add", host)
        if len(self._hosts) == 2:
            self._join(self._hosts[0], "eth0", self._hosts[1])
        else:
            self._build_switch()
        for number, host in enumerate(self._hosts):
            _ip("-n", host, "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def _build_switch(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, host in enumerate(self._hosts):
            self._join(self._switch, f"port{number}", host)
            _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")

    def _join(self, namespace: str, device: str, host: str) -> None:
        """Connects a device to a host's `eth0`, with a limited rate at each end."""
        _ip(
            *("-n", namespace, "link", "add", device, "type", "veth"),
            *("peer", "name", "eth0", "netns", host),
        )
        self._shape(namespace, device)
        self._shape(host, "eth0")

    def _shape(self, namespace: str, device: str) -> None:
        burst_bytes = max(_SMALLEST_BURST_BYTES, self._rate_bps / 8 * _BURST_S)
        shape = ["tbf", "rate", f"{self._rate_bps:.0f}bit", "burst", f"{burst_bytes:.0f}"]
        shape += ["latency", f"{1e3 * _QUEUE_S:.0f}ms"]
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        """Removes the devices and namespaces; links are removed with their namespaces."""
        for namespace in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
