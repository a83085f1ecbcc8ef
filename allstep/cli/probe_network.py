"""Readings of the network between two hosts, of which one serves and the other sends.

Runs in `allstep host` and does not import torch.
"""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from typing import Any

from allstep.errors import UsageError

LARGEST_PORT = 65_535
_CONNECT_S = 5.0
_ECHO_S = 5.0
_ADDRESS_BYTES = 64
_LARGE_BYTES = 64 << 10
_STREAM_BYTES = 16 << 20
_STREAM_S = 3.0
_NUM_DATAGRAMS = 400
_DATAGRAM_S = 3.0  # of silence, on a busy machine too


class EchoServer:
    """A server that echoes streams and datagrams, on a port for each, until it is closed."""

    def __init__(self) -> None:
        self._streams = listening_socket(0)
        self._datagrams = socket.socket(self._streams.family, socket.SOCK_DGRAM)
        if self._streams.family == socket.AF_INET6:
            self._datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._datagrams.bind(("", 0))
        self.ports = (self._streams.getsockname()[1], self._datagrams.getsockname()[1])
        for work in (self._accept, self._return_datagrams):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._streams.accept()
                threading.Thread(target=_answer, args=(stream,), daemon=True).start()

    def _return_datagrams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                content, sender = self._datagrams.recvfrom(2048)
                self._datagrams.sendto(content, sender)

    def close(self) -> None:
        self._streams.close()
        self._datagrams.close()


def check_port(port: int, least: int) -> None:
    """Raises UsageError if a host can have no such port."""
    if not least <= port <= LARGEST_PORT:
        raise UsageError(f"`port` (={port}) is none: choose one from {least} to {LARGEST_PORT}.")


def listening_socket(port: int) -> socket.socket:
    """A socket that accepts connections to any IPv4 or IPv6 address of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no interface may have it
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(stream: socket.socket) -> None:
    """Acknowledges each message after all of its bytes; its length comes first.

    One of no length asks from which address it came.
    """
    with contextlib.suppress(OSError), stream:
        while head := stream.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            if not left:
                stream.sendall(stream.getpeername()[0].encode().ljust(_ADDRESS_BYTES))
                continue
            while left:
                left -= len(stream.recv(min(left, 1 << 20))) or left
            stream.sendall(b"\1")


def probe(address: str, stream_port: int, datagram_port: int) -> dict[str, Any]:
    """This host's readings of another host, which serves.

    Returns:
        error: why no connection comes about, else empty; own, seen: the address from which this
        host sends, and from which the other gets it; is_large_lost: small messages arrive and
        large ones don't; latency_s, rate_bps: of a stream; loss: share of datagrams, there or back.
    """
    found: dict[str, Any] = {"error": "", "own": "", "seen": "", "is_large_lost": False}
    found |= {"latency_s": None, "rate_bps": None, "loss": None}
    try:
        stream = socket.create_connection((address, stream_port), _CONNECT_S)
    except OSError as error:
        return found | {"error": error.strerror or str(error)}
    with stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(_ECHO_S)
        try:
            found["latency_s"] = min(_send(stream, 8) for _ in range(20))
            found["own"] = _plain(stream.getsockname()[0])
            found["seen"] = _plain(_seen_address(stream))
        except OSError as error:
            return found | {"error": str(error)}
        try:
            _send(stream, _LARGE_BYTES)
        except OSError:
            return found | {"is_large_lost": True}
        try:
            found["rate_bps"] = _measure_rate_bps(stream)
            found["loss"] = _measure_loss(stream.family, address, datagram_port)
        except OSError as error:
            return found | {"error": str(error)}
    return found


def _send(stream: socket.socket, num_bytes: int) -> float:
    """Seconds until the other end has all of a message."""
    start_s = time.monotonic()
    stream.sendall(num_bytes.to_bytes(8, "big") + bytes(num_bytes))
    if not stream.recv(1):
        raise OSError("the other end closed the connection")
    return time.monotonic() - start_s


def _seen_address(stream: socket.socket) -> str:
    """The address by which the other end knows this host."""
    stream.sendall(bytes(8))
    return stream.recv(_ADDRESS_BYTES, socket.MSG_WAITALL).decode().strip()


def _plain(address: str) -> str:
    """An address without its interface; mapped IPv4 addresses as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _measure_rate_bps(stream: socket.socket) -> float:
    """Bits per second of the fastest of three messages that are long enough to measure."""
    stream.settimeout(20 * _STREAM_S)
    num_bytes = 1 << 18
    while True:
        time_s = _send(stream, num_bytes)
        if time_s > _STREAM_S / 10 or num_bytes >= _STREAM_BYTES:
            # One alone may have met a moment in which a host was busy.
            return 8 * num_bytes / min(time_s, *(_send(stream, num_bytes) for _ in range(2)))
        num_bytes *= 4


def _measure_loss(family: int, address: str, port: int) -> float:
    """The share of lost datagrams, which are sent slowly enough for any link."""
    missing = {os.urandom(8) for _ in range(_NUM_DATAGRAMS)}
    with socket.socket(family, socket.SOCK_DGRAM) as probing:
        probing.connect((address, port))
        for token in list(missing):
            probing.settimeout(0.002)
            with contextlib.suppress(OSError):  # what a firewall refuses is lost, too
                probing.send(token)
                missing.discard(probing.recv(64))
        probing.settimeout(_DATAGRAM_S)
        with contextlib.suppress(OSError):
            while missing:
                missing.discard(probing.recv(64))
    return len(missing) / _NUM_DATAGRAMS
