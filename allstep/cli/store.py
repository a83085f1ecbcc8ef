"""`allstep store`: serves the store of elastic runs on a host of its own.

[Note: store apart] A launcher that serves the store takes the run along when it ends. This process
only answers who is in which generation, and for several runs. If it ends, those that train go on.
[Note: lost store]
"""

import argparse
import signal
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from allstep.cli.exits import outward_addresses
from allstep.cli.interruptible import interruptible
from allstep.cli.probe_network import LARGEST_PORT, check_port, listening_socket
from allstep.errors import UsageError

PORT = 29_400
_CONNECT_S = 10.0


def run(arguments: list[str]) -> int:
    """Serves until a signal comes."""
    parser = argparse.ArgumentParser(
        prog="allstep store",
        description="Serves the store in which workers of runs with --elastic find each other, on a"
        " host that need not train.",
        allow_abbrev=False,
    )
    parser.add_argument("--port", metavar="N", type=int, default=PORT, help=f"{PORT}; 0 for any")
    port = parser.parse_args(arguments).port
    check_port(port, 0)
    with interruptible():
        store = _serve(port)
        for address in outward_addresses() or ["127.0.0.1"]:
            print(f"serves elastic runs at {address}:{store.port}", flush=True)
        while True:
            signal.pause()


def _serve(port: int) -> TCPStore:
    try:
        listening_socket(port).close()
    except OSError as error:
        raise UsageError(
            f"`port` (={port}) can't be listened on: {error.strerror}; choose another."
        ) from None
    timeout = timedelta(seconds=_CONNECT_S)
    return TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False)


def read_address(text: str) -> tuple[str, int]:
    """The host and port of a store, which must answer.

    Args:
        text: HOST:PORT, as a user has written it.

    Raises:
        UsageError: if it is no address, or if nothing answers there.

    >>> read_address("alpha")
    Traceback (most recent call last):
    allstep.errors.UsageError: `store` (='alpha') is no HOST:PORT, such as alpha:29400.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > LARGEST_PORT:
        example = f"{host or text.strip(':') or 'alpha'}:{PORT}"
        raise UsageError(f"`store` (={text!r}) is no HOST:PORT, such as {example}.")
    host = host.strip("[]")  # of an IPv6 address
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except UnicodeError:  # what can't be a name, such as .alpha
        raise UsageError(
            f"`store` (={text!r}): no host has the name {host!r}; give HOST:PORT, such as"
            f" alpha:{PORT}."
        ) from None
    except OSError as error:
        raise UsageError(
            f"`store` (={text!r}) does not answer ({error.strerror or error}): start it there with"
            f" `allstep store --port {port}`, and let this host connect to it."
        ) from None
    return host, int(port)
