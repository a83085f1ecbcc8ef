"""How long the system waits for an answer over a connection before it gives it up."""

import contextlib
import os
import socket
import stat
from pathlib import Path

_OWN_FILES = Path("/proc/self/fd")
_NUM_PROBES = 4  # in that time, where nobody has sent anything


def limit_silence(port: int, silence_s: float) -> None:
    """Has the system give up this process's connections whose other end doesn't answer for so long.

    By itself it sends what got no answer again and again, for a quarter of an hour, and waits for
    ever where it has nothing to send. Only Linux is told.

    Args:
        port: of the other end.
        silence_s: until whoever waits gets an error.
    """
    if not _OWN_FILES.exists():
        return
    for name in os.listdir(_OWN_FILES):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
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
