"""A real sshd on each of some hosts, with keys and settings of its own."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.named_hosts import NamedHosts

_SSHD = "/usr/sbin/sshd"
_START_S = 60.0


@contextmanager
def ssh_servers(
    hosts: NamedHosts, folder: Path, environs: Mapping[int, Mapping[str, str]]
) -> Iterator[str]:
    """Serves ssh on all hosts; gives the ssh command that comes in. Skips where it can't be.

    Args:
        hosts: that serve.
        folder: for keys and settings.
        environs: host -> variables that whoever comes in finds there.
    """
    if not Path(_SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server and openssh-client")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "user_key"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(line, check=True)
    servers = []
    try:
        for number in range(len(hosts.names)):
            config = folder / f"sshd-{number}"
            config.write_text(_settings(folder, environs.get(number, {})))
            log = folder / f"sshd-{number}.log"
            line = hosts.line(number, [_SSHD, "-D", "-f", config, "-E", log])
            servers.append(subprocess.Popen(line))
        client = folder / "ssh_config"
        client.write_text(
            f"Host *\nUser root\nPort 2222\nIdentityFile {folder}/user_key\nLogLevel ERROR\n"
            "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nIdentitiesOnly yes\n"
        )
        for name in hosts.names:
            _wait_for(hosts, folder, name)
        yield f"ssh -F {client}"
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _settings(folder: Path, environ: Mapping[str, str]) -> str:
    lines = ["Port 2222", f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/user_key.pub"]
    lines += ["StrictModes no", "UsePAM no", "PermitRootLogin yes", "PidFile none"]
    if environ:
        lines.append("SetEnv " + " ".join(f"{name}={value}" for name, value in environ.items()))
    return "\n".join(lines) + "\n"


def _wait_for(hosts: NamedHosts, folder: Path, name: str) -> None:
    line = hosts.line(0, ["ssh", "-F", folder / "ssh_config", "-o", "BatchMode=yes", name, "true"])
    deadline_s = time.monotonic() + _START_S
    while True:
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline_s:
            logs = [path.read_text() for path in folder.glob("sshd-*.log")]
            pytest.skip(f"sshd lets nobody in here: {done.stderr} {logs} {os.getuid()}")
        time.sleep(0.1)
