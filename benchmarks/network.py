"""Ranks on one machine: as processes of one host, or on hosts with links as slow as one likes.

A host is a network namespace whose only way out is a link to a switch. Needs root and iproute2;
standard library only.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["ShapedHosts", "UnavailableError", "run_on_one_host"]

_BURST_S = 0.002  # how long a link that was idle may be faster than its rate
_SMALLEST_BURST_BYTES = 16 << 10
_QUEUE_S = 0.1  # of a port, as in a switch with some hundred KB of memory for it
_POLL_S = 0.05


class UnavailableError(RuntimeError):
    """This machine can't have hosts of its own; the message says why."""


class ShapedHosts:
    """Hosts on a switch, whose links carry `rate_bps` each way; as a context manager.

    Each end of a link sends through a token bucket, so that a host neither sends nor receives
    faster. Hosts have the addresses 10.77.0.1, 10.77.0.2, ... on their interface `eth0`.

    Args:
        num_hosts: 1 to 250.
        rate_bps: bits per second; headers count.

    Raises:
        UnavailableError: without root, iproute2 or the kernel's support.
    """

    interface = "eth0"

    def __init__(self, num_hosts: int, rate_bps: float) -> None:
        assert 1 <= num_hosts <= 250
        if os.geteuid() != 0:
            raise UnavailableError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"`{tool}` is missing: apt-get install iproute2")
        self.num_hosts = num_hosts
        self.rate_bps = rate_bps
        self._switch = f"allstep-{os.getpid()}-switch"
        self.hosts = [f"allstep-{os.getpid()}-{i}" for i in range(num_hosts)]

    def __enter__(self) -> "ShapedHosts":
        try:
            self._build()
        except UnavailableError:
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

    def run(self, command: Sequence[object], *, timeout_s: float) -> None:
        """Runs a command on every host at once, as rank i of as many, as torchrun would.

        Raises:
            RuntimeError: with the end of what a rank said, if it failed or took too long.
        """
        commands, environments = [], []
        for rank, host in enumerate(self.hosts):
            commands.append(["ip", "netns", "exec", host, *map(str, command)])
            variables = {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": self.num_hosts}
            variables |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            variables |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": self.interface}
            environments.append(_environment(rank, self.num_hosts, variables))
        _run_all(commands, environments, timeout_s)

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            _ip("netns", "add", host)
            _ip(
                *("-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", self.interface, "netns", host),
            )
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            address = f"10.77.0.{number + 1}/24"
            _ip("-n", host, "address", "add", address, "dev", self.interface)
            _ip("-n", host, "link", "set", self.interface, "up")
            _ip("-n", host, "link", "set", "lo", "up")
            for namespace, device in ((host, self.interface), (self._switch, port)):
                self._shape(namespace, device)

    def _shape(self, namespace: str, device: str) -> None:
        burst_bytes = max(_SMALLEST_BURST_BYTES, self.rate_bps / 8 * _BURST_S)
        shape = ["tbf", "rate", f"{self.rate_bps:.0f}bit", "burst", f"{burst_bytes:.0f}"]
        shape += ["latency", f"{1e3 * _QUEUE_S:.0f}ms"]
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        """Removes what there is; links go with their namespaces."""
        for namespace in (*self.hosts, self._switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def run_on_one_host(num_ranks: int, command: Sequence[object], *, timeout_s: float) -> None:
    """Runs a command as every rank of this host at once, as torchrun would.

    Raises:
        RuntimeError: with the end of what a rank said, if it failed or took too long.
    """
    environments = []
    for rank in range(num_ranks):
        variables = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        environments.append(_environment(rank, num_ranks, variables))
    _run_all([[str(word) for word in command]] * num_ranks, environments, timeout_s)


def _environment(rank: int, size: int, variables: dict[str, object]) -> dict[str, str]:
    common = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": 29_400 + os.getpid() % 500}
    common |= {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}  # one core a rank
    return os.environ | {name: str(value) for name, value in {**common, **variables}.items()}


def _run_all(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], timeout_s: float
) -> None:
    """Runs the commands side by side; ends the others when one fails."""
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(commands))]
        processes = []
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                with log.open("w") as output:
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                    )
            while None in (codes := [process.poll() for process in processes]):
                if any(codes) or time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(
                    f"rank {rank} ended with {code}:\n{logs[rank].read_text()[-4000:]}"
                )
        if None in codes:
            raise RuntimeError(
                f"ranks took longer than {timeout_s:g} s:\n{logs[0].read_text()[-4000:]}"
            )


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
