"""Ports for processes that are told one before they start."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST = 10_000
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")  # to who asks for any, or connects
_ports = random.Random(os.getpid())  # processes that run tests side by side look elsewhere


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of this machine at which nothing answers meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def free_port() -> int:
    """A port that nobody gets by chance until it is listened on.

    The port of a socket that was closed is given to the next who asks for any: a test beside this
    one may serve there before the process that was told of it.
    """
    last = int(_GIVEN_OUT.read_text().split()[0]) - 1
    while True:
        port = _ports.randint(_FIRST, last)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
