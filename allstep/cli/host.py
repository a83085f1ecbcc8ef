"""`allstep host`: the remote end of `--hosts`, started by ssh; not for direct use.

[Note: host protocol] Lines of JSON. In: `{"ask": NAME, ...}`, answered by `{"answer": ...}`;
`{"start": [command], "environ": {...}}`, after which what the command prints comes as
`{"line": ...}` and its end as `{"ended": code}`; `{"signal": number}`; and `{}` every few seconds.
If these stay away, or the stream ends, the connection is lost or the other end is gone: the command
is ended as SIGTERM would end it. This module does not import torch, so that answers come at once.
"""

import contextlib
import hashlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import allstep
from allstep.cli.probe_network import EchoServer, listening_socket, probe
from allstep.env import (
    address_towards,
    environment_of_agent,
    is_loopback,
    num_cores,
    read_ssh_address,
    read_stat,
)

_SILENCE_S = 30.0
_END_S = 40.0  # torchrun gives its workers 30 s to write a checkpoint
_POLL_S = 0.1
_CONNECT_S = 10.0


def run(arguments: list[str]) -> int:
    """Answers requests on stdin until the requested command has ended."""
    assert not arguments
    return _Host(0).serve()


def facts_of(paths: list[str], files: list[str]) -> dict[str, Any]:
    """Facts that must be equal on all hosts, and this host's own.

    Args:
        paths: files and folders that the training reads.
        files: scripts whose text must be alike.
    """
    code = hashlib.sha256()
    root = Path(allstep.__file__).parent
    sources = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in sources:
        code.update(f"{name}\0".encode() + (root / name).read_bytes())
    for name in files:
        code.update(Path(name).read_bytes() if Path(name).is_file() else b"no file")
    with contextlib.suppress(PackageNotFoundError):
        return {
            "python": platform.python_version(),
            "torch": version("torch"),
            "allstep": allstep.__version__,
            "code": code.hexdigest()[:12],
            "num_cores": num_cores(),
            "address": read_ssh_address(),
            "missing": [path for path in (*paths, *files) if not Path(path).exists()],
        }
    return {"error": "it has no torch"}


class _Host:
    """Answers requests, runs one command and ends it.

    Args:
        descriptor: where requests come from.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._command: subprocess.Popen[str] | None = None
        self._pump: threading.Thread | None = None
        self._server: socket.socket | None = None
        self._echo: EchoServer | None = None
        self._lock = threading.Lock()

    def serve(self) -> int:
        with tempfile.TemporaryDirectory(prefix="allstep-host-") as folder:
            try:
                for request in self._requests():
                    self._answer(request, folder)
                    if self._has_ended():
                        break
            finally:
                self._end()
            if self._command is not None and self._pump is not None:
                self._pump.join(_POLL_S * 50)
                self._say(ended=self._command.returncode)
            return 0

    def _requests(self) -> Iterator[dict[str, Any]]:
        """What comes in, and an empty request now and then; ends with the connection."""
        rest = b""
        heard_s = time.monotonic()
        while True:
            if not select.select([self._descriptor], [], [], _POLL_S)[0]:
                if time.monotonic() - heard_s > _SILENCE_S:
                    return
                yield {}
                continue
            heard_s = time.monotonic()
            more = os.read(self._descriptor, 1 << 16)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            yield from map(json.loads, lines)

    def _answer(self, request: dict[str, Any], folder: str) -> None:
        if "ask" in request:
            ask = getattr(self, f"_ask_{request.pop('ask')}")
            try:
                self._say(answer=ask(**request))
            except OSError as error:
                self._say(answer={"error": error.strerror or str(error)})
        elif "start" in request:
            self._start(request["start"], request["environ"], folder)
        elif "signal" in request and self._command is not None:
            if request["signal"] == signal.SIGKILL:
                self._kill()
            else:
                self._command.send_signal(request["signal"])

    _ask_facts = staticmethod(facts_of)
    _ask_probe = staticmethod(probe)

    def _ask_listen(self, towards: str | None, port: int) -> dict[str, Any]:
        """Opens a port for a moment; says by which address others may reach it."""
        self._server = listening_socket(port)
        return {"address": self._address(towards), "port": self._server.getsockname()[1]}

    def _address(self, towards: str | None) -> str:
        """By which others may reach this host, another of which has an address."""
        address = read_ssh_address() or "127.0.0.1"
        return address_towards(towards) if is_loopback(address) and towards else address

    def _ask_connect(self, address: str, port: int) -> dict[str, Any]:
        socket.create_connection((address, port), _CONNECT_S).close()
        return {"own": address_towards(address)}

    def _ask_machine(self, **details: Any) -> dict[str, Any]:
        from allstep.cli.probe_machine import probe_machine  # imports NumPy

        return probe_machine(**details)

    def _ask_time(self) -> dict[str, Any]:
        return {"time_s": time.time()}

    def _ask_serve(self, towards: str | None) -> dict[str, Any]:
        """Opens ports of echoes, for `probe` elsewhere."""
        self._echo = self._echo or EchoServer()
        stream_port, datagram_port = self._echo.ports
        address = self._address(towards)
        return {"address": address, "stream_port": stream_port, "datagram_port": datagram_port}

    def _start(self, command: list[str], environ: dict[str, str], folder: str) -> None:
        if self._server is not None:
            self._server.close()
        line = [sys.executable, *command]
        self._command = subprocess.Popen(
            [word.replace("LOG_FOLDER", folder) for word in line],
            env=environment_of_agent(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._pump_lines, daemon=True)
        self._pump.start()

    def _pump_lines(self) -> None:
        assert self._command is not None and self._command.stdout is not None
        for line in self._command.stdout:
            self._say(line=line.rstrip("\n"))

    def _has_ended(self) -> bool:
        return self._command is not None and self._command.poll() is not None

    def _end(self) -> None:
        """Ends the command, gently first."""
        command = self._command
        if command is None or command.poll() is not None:
            return
        command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(_END_S)
        self._kill()

    def _kill(self) -> None:
        command = self._command
        if command is not None and command.poll() is None:
            for pid in (command.pid, *_descendants(command.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.wait()

    def _say(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # nobody listens any more
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def _descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for number in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            children.setdefault(read_stat(number).parent, []).append(number)
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found
