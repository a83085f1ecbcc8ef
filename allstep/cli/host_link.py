"""A connection by the system's ssh to `allstep host` on a host."""

import contextlib
import json
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from allstep.cli.hosts import HostOptions
from allstep.errors import UsageError

_BEAT_S = 5.0
_ASK_S = 60.0
_CLOSE_S = 2.0
_LAST_LINES = 5
# No questions to a person; an end within about 20 s where the host or the network is gone.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")

# What comes of a host: a "line", its command's exit code as it has "ended", or ssh's, "lost".
Event = tuple["HostLink", str, Any]


@contextlib.contextmanager
def open_links(options: HostOptions, events: "queue.Queue[Event]") -> Iterator[list["HostLink"]]:
    """Opens connections to all hosts, closed at the end; `events` receives their messages."""
    with contextlib.ExitStack() as stack:
        links = []
        for host in options.hosts:
            links.append(HostLink(host.name, options, events))
            stack.callback(links[-1].close)
        yield links


class HostLink:
    """A connection to a host over ssh. [Note: host protocol]

    Args:
        name: of the host.
        options: how to come there.
        events: takes what the host's command prints, and its end.
    """

    def __init__(self, name: str, options: HostOptions, events: "queue.Queue[Event]") -> None:
        self.name = name
        self._events = events
        self._answers: queue.Queue[Any] = queue.Queue()
        self._errors: list[str] = []
        self._lock = threading.Lock()
        folder, python = shlex.quote(options.folder), shlex.quote(options.python)
        command = f"cd {folder} && exec {python} -m allstep host"
        own = [word for option in _OPTIONS for word in ("-o", option)]
        try:
            self._process = subprocess.Popen(
                [*options.ssh, *own, "-T", name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is handed on in order
            )
        except OSError as error:
            raise UsageError(
                f"`ssh` (={shlex.join(options.ssh)}) can't be run here ({error.strerror}); install"
                " openssh-client, or give another command."
            ) from None
        self._error_thread = threading.Thread(target=self._read_errors, daemon=True)
        self._threads = [self._error_thread, threading.Thread(target=self._read, daemon=True)]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def ask(self, question: str, **details: Any) -> dict[str, Any]:
        """Sends a request and returns the host's answer.

        Raises:
            UsageError: if it can't be reached; with what ssh or the host's shell said.
        """
        self.send(ask=question, **details)
        try:
            answer = self._answers.get(timeout=_ASK_S)
        except queue.Empty:
            answer = None
        if answer is None:
            raise UsageError(
                f"`hosts`: {self.name} can't be used ({self.last_words()}); see whether "
                f"`ssh {self.name} true` works without a password, and whether the same folder and "
                "Python are there (`--remote-dir`, `--python`)."
            )
        found: dict[str, Any] = answer
        return found

    def send(self, **message: Any) -> None:
        """Sends a message, if the connection is open."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def last_words(self) -> str:
        """The last lines from ssh or the host's shell."""
        self._error_thread.join(1.0)
        return "; ".join(self._errors[-_LAST_LINES:]) or "it does not answer"

    def close(self) -> None:
        """Closes the connection, which ends the command on the host."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        for thread, stream in zip(
            self._threads, (self._process.stderr, self._process.stdout), strict=True
        ):
            thread.join(_CLOSE_S)  # longer only if something that ssh left holds the pipe
            if stream is not None and not thread.is_alive():
                stream.close()

    def _beat(self) -> None:
        while self._process.poll() is None:
            self.send()
            time.sleep(_BEAT_S)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._errors.append(line.strip())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            message = None
            with contextlib.suppress(ValueError):
                message = json.loads(text)
            if not isinstance(message, dict):  # what a shell's start-up file prints
                message = {"line": text.rstrip("\n")}
            if "answer" in message:
                self._answers.put(message["answer"])
            elif "line" in message:
                self._events.put((self, "line", message["line"]))
            elif "ended" in message:
                self._events.put((self, "ended", message["ended"]))
        self._process.wait()
        self._answers.put(None)
        self._events.put((self, "lost", self._process.returncode))
