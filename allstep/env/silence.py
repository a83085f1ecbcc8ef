"""How long the system waits for an answer on a connection before it closes it."""

import contextlib
import os
import socket
import stat
from pathlib import Path

_OWN_FILES = Path("/proc/self/fd")
_NUM_PROBES = 4  # probes within `silence_s` on an idle connection


def limit_connection_silence(port: int, silence_s: float) -> None:
    """Makes the system close this process's connections whose other end is silent for `silence_s`.

    By default it resends unanswered packets for a quarter of an hour, and waits forever where it
    has nothing to send. Works on Linux only; elsewhere nothing changes.

    Args:
        port: port of the other end; other connections are left as they are.
        silence_s: seconds until a waiting call gets an error.
    """
    if not _OWN_FILES.exists():
        return
    for name in os.listdir(_OWN_FILES):
        with contextlib.suppress(OSError):  # closed by now, or not connected
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if _is_connected_to(connection, port):
                        _limit(connection, silence_s)


def _is_connected_to(connection: socket.socket, port: int) -> bool:
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and connection.type == socket.SOCK_STREAM and connection.getpeername()[1] == port


def _limit(connection: socket.socket, silence_s: float) -> None:
    between_probes_s = max(1, round(silence_s / _NUM_PROBES))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between_probes_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_probes_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * silence_s))
