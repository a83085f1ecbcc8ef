"""Hosts with names of their own, as on stock Debian: each believes that its name is 127.0.1.1."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from allstep.doctor import ShapedHosts, UnavailableError

NAMES = ("alpha", "beta", "gamma")
_FILES = Path("/etc/netns")  # `ip netns exec` puts what is there in place of /etc's


class NamedHosts:
    """Network namespaces with host names; see `named_hosts`."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.namespaces = list(namespaces)
        self.names = NAMES[: len(self.namespaces)]
        self.addresses = [f"10.78.0.{number + 1}" for number in range(len(self.namespaces))]

    def write_host_files(self, others: Mapping[str, str] = MappingProxyType({})) -> None:
        """Name -> address: what all of them know besides their own names."""
        for number, namespace in enumerate(self.namespaces):
            lines = ["127.0.0.1 localhost"]
            for other, name in enumerate(self.names):
                address = "127.0.1.1" if other == number else self.addresses[other]
                lines.append(f"{address} {name}")
            lines += [f"{address} {name}" for name, address in others.items()]
            folder = _FILES / namespace
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def remove_host_files(self) -> None:
        for namespace in self.namespaces:
            shutil.rmtree(_FILES / namespace, ignore_errors=True)

    def line(self, host: int, command: Sequence[object]) -> list[str]:
        """A command line that runs another on a host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host]]
        return ["ip", "netns", "exec", self.namespaces[host], *named, *map(str, command)]

    def run(self, host: int, *command: object) -> str:
        done = subprocess.run(self.line(host, command), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def outputs(
        self, commands: Sequence[Sequence[object]], timeout_s: float, **options: object
    ) -> list[tuple[int, str]]:
        """Runs a command on each host at once: exit codes and what they print."""
        processes = [
            subprocess.Popen(
                self.line(host, command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                **options,  # type: ignore[call-overload]
            )
            for host, command in enumerate(commands)
        ]
        try:
            printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            (process.returncode, text) for process, text in zip(processes, printed, strict=True)
        ]


@contextmanager
def named_hosts(num_hosts: int = 2) -> Iterator[NamedHosts]:
    """Hosts alpha, beta, ... at 10.78.0.1, 10.78.0.2, ... on `eth0`; skips where there can't be."""
    try:
        with ShapedHosts(num_hosts, 1e9) as shaped:
            hosts = NamedHosts(shaped.namespaces)
            try:
                hosts.write_host_files()
                hosts.run(0, "true")
                yield hosts
            finally:
                hosts.remove_host_files()
    except UnavailableError as reason:
        pytest.skip(str(reason))


def torchrun(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]
