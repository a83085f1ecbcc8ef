"""A node of `allstep cluster template aws`: its first boot, or a later one, without AWS.

python -m tests.helpers.aws_node FOLDER RANK ADDRESS MASTER

In a network namespace of its own. What is not the script's own work is a stand-in: apt-get, the
environment of Python that venv makes, the shared folder in the place of NFS, the instance's
metadata, and systemd, which is this process.
"""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from configparser import RawConfigParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_METADATA = "169.254.169.254"
_UNIT = Path("/etc/systemd/system/allstep.service")
_LIMITS = {
    "LimitNOFILE": resource.RLIMIT_NOFILE,
    "LimitMEMLOCK": resource.RLIMIT_MEMLOCK,
    "LimitSTACK": resource.RLIMIT_STACK,
}


def main(folder: Path, rank: str, address: str, master: str) -> int:
    disk = folder / f"disk-{rank}"
    for place in (_UNIT.parent, Path("/opt"), Path("/mnt")):
        own = disk / place.name
        own.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", own, place], check=True)
    _serve_metadata(
        {
            "local-ipv4": address,
            "tags/instance/allstep-rank": rank,
            **({"tags/instance/allstep-master": master} if rank != "0" else {}),
        }
    )
    programs = _write_stand_ins(disk / "bin", folder / "bin", folder / "shared")
    cores = sorted(os.sched_getaffinity(0))  # one thread, as what the run is compared with has
    os.sched_setaffinity(0, {cores[int(rank) % len(cores)]})
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    if not _UNIT.exists():
        subprocess.run(["bash", folder / "boot.sh"], check=True)
    return _run_unit()


def _serve_metadata(values: dict[str, str]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            has_lifetime = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
            self._answer("a-token" if has_lifetime and self.path == "/latest/api/token" else None)

        def do_GET(self) -> None:
            is_known = self.headers["X-aws-ec2-metadata-token"] == "a-token"
            name = self.path.removeprefix("/latest/meta-data/")
            self._answer(values.get(name) if is_known else None)

        def _answer(self, text: str | None) -> None:
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

    # A node that boots again has the address from before.
    subprocess.run(["ip", "address", "replace", f"{_METADATA}/32", "dev", "lo"], check=True)
    server = ThreadingHTTPServer((_METADATA, 80), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _write_stand_ins(folder: Path, programs: Path, shared: Path) -> Path:
    texts = {
        "apt-get": "",
        "systemctl": "",
        "python3": f"mkdir -p $3/bin && cp {programs}/* $3/bin",
        "mount": f'echo mount "$@"\nexec /bin/mount --bind {shared} "${{@: -1}}"',
    }
    shared.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def _run_unit() -> int:
    """As systemd does, without waiting before it starts a service again."""
    parser = RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(_UNIT)
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    _limit(service)
    for _ in range(20):  # systemd would go on for ever; what is broken here shall end
        if subprocess.run([service["ExecStart"]]).returncode == 0:
            return 0
        print("the service is started again", flush=True)
    return 1


def _limit(service: Mapping[str, str]) -> None:
    """Sets the service's limits, as far as this machine lets it."""
    for key, limit in _LIMITS.items():
        _, highest = resource.getrlimit(limit)
        value = -1 if service[key] == "infinity" else int(service[key])
        wanted = [number for number in (value, highest) if number != resource.RLIM_INFINITY]
        resource.setrlimit(limit, (min(wanted, default=resource.RLIM_INFINITY), highest))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
