"""Two hosts with names, addresses and /dev/shm of their own, and a small disk that both see."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.named_hosts import NamedHosts, named_hosts

_DISK_BYTES = 4 << 20
_SPACES = ("net", "uts", "mnt")
_HOLD = "mount -t tmpfs -o size=1m tmpfs /dev/shm && echo && exec sleep infinity"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        namespace: its network's name.
        address: for the other one.
        pid: a process there.
    """

    namespace: str
    address: str
    pid: int

    @property
    def shm(self) -> Path:
        """Its /dev/shm, as the tests see it."""
        return Path(f"/proc/{self.pid}/root/dev/shm")

    def enter(self) -> None:
        """Has this process, which has one thread still, live there."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(f"/proc/{self.pid}/ns/{space}")) for space in _SPACES]
            for file in files:
                _set_namespace(file.fileno())

    @contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are the host's."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self.pid}/ns/net") as other:
            _set_namespace(other.fileno())
            try:
                yield
            finally:
                _set_namespace(own.fileno())


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The launcher's, and that of those who join; skips where there can't be.

    Args:
        folder: where the disk is mounted.
    """
    if shutil.which("nft") is None:
        pytest.skip("needs nft: apt-get install nftables")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(named_hosts(2))
        _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder))
        stack.callback(_run, "umount", "--lazy", str(folder))
        first, second = (stack.enter_context(_held(hosts, number)) for number in range(2))
        yield first, second


@contextmanager
def _held(hosts: NamedHosts, number: int) -> Iterator[Host]:
    line = hosts.line(number, ["sh", "-c", _HOLD])
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n", "no /dev/shm of its own"
            yield Host(hosts.namespaces[number], hosts.addresses[number], process.pid)
        finally:
            process.kill()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
