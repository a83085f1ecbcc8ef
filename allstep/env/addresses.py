"""This host's addresses: the one that leads to another host, and their network interfaces."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from array import array
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from allstep.env.variables import Variables

_LIST_ADDRESSES = 0x8912  # SIOCGIFCONF of Linux
_ENTRY_BYTES = 40  # one `struct ifreq`: 16 bytes of name, then a `struct sockaddr_in`
_GLOO = "GLOO_SOCKET_IFNAME"


def address_towards(host: str, port: int = 9) -> str:
    """This host's address when it sends to another host; sends nothing.

    Args:
        host: its name or address.
        port: any port.

    Raises:
        OSError: if the name is unknown, or there is no route to the host.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    problem: OSError = OSError(f"{host} has no address")
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


def is_loopback(address: str) -> bool:
    """Whether an address means, on every host, that host itself.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_addresses() -> list[tuple[str, str]]:
    """Interfaces of this host with their addresses, IPv4 first, in the order of Gloo's search.

    >>> ("lo", "127.0.0.1") in own_addresses()
    True
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array("B", bytes(_ENTRY_BYTES * 1024))
        held = (len(room), room.buffer_info()[0])
        answer = fcntl.ioctl(probe, _LIST_ADDRESSES, struct.pack("iL", *held))
    num_bytes = struct.unpack("iL", answer)[0]
    for start in range(0, num_bytes, _ENTRY_BYTES):
        entry = bytes(room[start : start + _ENTRY_BYTES])
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
        found.append((name, socket.inet_ntoa(entry[20:24])))
    with contextlib.suppress(OSError):  # a system without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return found


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None if this host does not have it.

    >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
    ('lo', None)
    """
    wanted = address.partition("%")[0]
    return next((name for name, own in own_addresses() if own == wanted), None)


def read_gloo_interface(environ: Mapping[str, str] | None = None) -> str | None:
    """The interface that the user chose for Gloo; the first if several are named.

    >>> read_gloo_interface({"GLOO_SOCKET_IFNAME": "eth0,eth1"})
    'eth0'
    """
    text = Variables(environ).text(_GLOO)
    return None if text is None else text.partition(",")[0]


def set_gloo_interface(name: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Makes Gloo use an interface from now on, by the variable that torch reads.

    >>> variables = {}
    >>> set_gloo_interface("eth1", variables)
    >>> variables
    {'GLOO_SOCKET_IFNAME': 'eth1'}
    """
    (os.environ if environ is None else environ)[_GLOO] = name
