"""Chooses the address at which each host is reached, and checks that the others do reach it.

[Note: own address] By default Gloo looks up the host's own name; on stock Debian this gives
127.0.1.1, a loopback address, which no other host reaches. So each worker takes the address from
which the system sends to MASTER_ADDR. On rank 0's host this may be a loopback address, too; it
then takes the address from which it sends to another host. Then one worker per host opens a port,
those of other hosts connect to it, and all workers get an error about a host that can't be reached,
before Gloo would wait for it.
"""

import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from allstep.comm.places import Place
from allstep.env import (
    Launch,
    address_towards,
    interface_of,
    is_loopback,
    own_addresses,
    read_gloo_interface,
    set_gloo_interface,
)
from allstep.errors import UsageError

_CONNECT_S = 10.0
_MOST_PEERS = 8  # hosts that each host connects to; up to 9 hosts form a full mesh
_CURE = "set GLOO_SOCKET_IFNAME on each host to the interface of the network that joins them"


@dataclass(frozen=True)
class _Own:
    """A worker's proposal: the address that it would use, or why it has none.

    Attributes:
        address: the address from which its host sends to MASTER_ADDR.
        wanted: the interface that the user set; empty if the worker may choose.
        wanted_address: address of that interface.
        error: why there is no address; empty if there is one.
    """

    address: str = ""
    wanted: str = ""
    wanted_address: str = ""
    error: str = ""


@dataclass(frozen=True)
class _Plan:
    """Rank 0's decision.

    Attributes:
        addresses: the hosts' addresses by rank; empty if all workers are on one host.
        testers: one rank of each host.
        error: what is wrong with the proposals; empty if nothing is.
    """

    addresses: Sequence[str] = ()
    testers: Sequence[int] = ()
    error: str = ""


def choose_interface(
    store: Store, launch: Launch, places: Sequence[Place], deadline_s: float
) -> None:
    """Makes Gloo use the interface that the other hosts reach. Collective. [Note: own address]

    If all workers are on one host, nothing is changed.

    Args:
        store: a store for this meeting only.
        launch: this worker's launch.
        places: where the workers run, by rank.
        deadline_s: the deadline, by `time.monotonic()`.

    Raises:
        UsageError: on all workers, if a host can't reach another; names address and interface.
    """
    rank = launch.rank
    own = _own_address(launch, places[rank])
    store.set(f"address/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        given = [
            _Own(**json.loads(text))
            for text in _get_all(store, "address", range(launch.size), deadline_s)
        ]
        store.set("plan", json.dumps(asdict(_make_plan(given, places))))
    [text] = _get_all(store, "", ["plan"], deadline_s)
    plan = _Plan(**json.loads(text))
    if plan.error:
        raise UsageError(f"`init` on rank {rank} of {launch.size}: {plan.error}")
    if not plan.addresses:
        return
    problem = _check(store, launch, places, plan, deadline_s)
    if problem:
        raise UsageError(f"`init` on rank {rank} of {launch.size}: {problem}")
    interface = interface_of(plan.addresses[rank])
    if not own.wanted and interface is not None:
        set_gloo_interface(interface)


def _own_address(launch: Launch, place: Place) -> _Own:
    who = f"rank {launch.rank} ({place})"
    wanted, wanted_address = read_gloo_interface(), ""
    if wanted is not None:
        known = own_addresses()
        wanted_address = next((address for name, address in known if name == wanted), "")
        if not wanted_address:
            there = ", ".join(f"{name} ({address})" for name, address in known)
            return _Own(
                error=f"GLOO_SOCKET_IFNAME (={wanted}) of {who} is no interface with an address "
                f"there; it has: {there}. Unset it, or set it to one of them."
            )
    host = launch.master_addr or "127.0.0.1"
    try:
        return _Own(address_towards(host, launch.master_port or 9), wanted or "", wanted_address)
    except OSError as error:
        text = f"{who} has no route to MASTER_ADDR (={host}): {error.strerror or error}."
        return _Own(error=text)


def _make_plan(given: Sequence[_Own], places: Sequence[Place]) -> _Plan:
    """Rank 0's part: the address of each worker's host, from the workers' proposals."""
    for own in given:
        if own.error:
            return _Plan(error=own.error)
    outside = [own.address for own in given if not is_loopback(own.address)]
    for rank, own in enumerate(given):
        if is_loopback(own.address) and not _may_be_one(places[rank], places[0]):
            return _Plan(error=_tunnel(rank, own, places))
    if not outside:
        return _Plan()
    first = given[0].address
    if is_loopback(first):
        try:
            first = address_towards(outside[0])
        except OSError as error:
            text = f"rank 0 ({places[0]}) has no route to {outside[0]} ({error.strerror}); {_CURE}."
            return _Plan(error=text)
    addresses = [first if is_loopback(own.address) else own.address for own in given]
    if len(set(addresses)) == 1:
        return _Plan()
    for rank, own in enumerate(given):
        if own.wanted_address and is_loopback(own.wanted_address):
            return _Plan(
                error=f"GLOO_SOCKET_IFNAME (={own.wanted}) of rank {rank} ({places[rank]}) is the "
                f"loopback interface ({own.wanted_address}), which no other host reaches; unset "
                f"it, or {_CURE}."
            )
        addresses[rank] = own.wanted_address or addresses[rank]
    machines: dict[str, int] = {}
    for rank, address in enumerate(addresses):
        other = machines.setdefault(address, rank)
        if not _may_be_one(places[rank], places[other]):
            return _Plan(
                error=f"rank {other} ({places[other]}) and rank {rank} ({places[rank]}) are on two "
                f"machines that both call themselves {address}, as containers on a network of "
                f"their own do; use the hosts' network (docker run --network host), or {_CURE}."
            )
    return _Plan(addresses, list(machines.values()))


def _tunnel(rank: int, own: _Own, places: Sequence[Place]) -> str:
    return (
        f"rank {rank} ({places[rank]}) reaches rank 0 ({places[0]}) by {own.address} of the "
        "loopback interface lo, as by a tunnel; other hosts can't reach it there. Set MASTER_ADDR "
        "to rank 0's address in the network that joins the hosts."
    )


def _may_be_one(one: Place, other: Place) -> bool:
    """Whether two workers may be on one machine: not if both boot ids are known and differ."""
    boots = [place.space.partition(" ")[0] for place in (one, other)]
    return not all(boots) or boots[0] == boots[1]


def _check(
    store: Store,
    launch: Launch,
    places: Sequence[Place],
    plan: _Plan,
    deadline_s: float,
) -> str:
    """Briefly connects the hosts with each other; returns what is wrong, equal on all workers."""
    with ExitStack() as stack:
        if launch.rank in plan.testers:
            found = _listen(stack, store, launch.rank, plan.addresses[launch.rank], places)
            found = found or _connect(store, launch.rank, plan, places, deadline_s)
            store.set(f"tested/{launch.rank}", found)
        if launch.rank == 0:
            results = _get_all(store, "tested", plan.testers, deadline_s + _CONNECT_S)
            store.set("reached", next(filter(None, results), ""))
        return _get_all(store, "", ["reached"], deadline_s + 2 * _CONNECT_S)[0]


def _listen(
    stack: ExitStack, store: Store, rank: int, address: str, places: Sequence[Place]
) -> str:
    """Opens a port for the other hosts; returns an error's text if it can't, else an empty one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        server.bind((address, 0))
        server.listen(1024)
    except OSError as error:
        store.set(f"port/{rank}", "0")
        return (
            f"rank {rank} ({places[rank]}) can't listen on {address} ({error.strerror}), the "
            f"address by which others know its host; {_CURE}."
        )
    store.set(f"port/{rank}", str(server.getsockname()[1]))
    return ""


def _connect(
    store: Store, rank: int, plan: _Plan, places: Sequence[Place], deadline_s: float
) -> str:
    """Connects to the next hosts; returns an error's text if one can't be reached."""
    start, count = plan.testers.index(rank), len(plan.testers)
    for distance in range(1, min(count, 1 + _MOST_PEERS)):
        peer = plan.testers[(start + distance) % count]
        port = int(_get_all(store, "port", [peer], deadline_s)[0])
        if port == 0:  # that rank reports its error itself
            continue
        address = plan.addresses[peer]
        try:
            socket.create_connection((address, port), _CONNECT_S).close()
        except OSError as error:
            own = plan.addresses[rank]
            return (
                f"rank {rank} ({places[rank]}, {own} on {interface_of(own)}) can't reach rank "
                f"{peer} ({places[peer]}) at {address} ({error.strerror or error}): a firewall "
                "stops it, or that address belongs to another network. Let the hosts open all TCP "
                f"connections to each other, or {_CURE}."
            )
    return ""


def _get_all(
    store: Store, kind: str, names: Sequence[int] | Sequence[str], deadline_s: float
) -> list[str]:
    """Waits for keys that workers write; returns their values."""
    keys = [f"{kind}/{name}" if kind else str(name) for name in names]
    store.wait(keys, timedelta(seconds=max(deadline_s - time.monotonic(), 0.01)))
    return [store.get(key).decode() for key in keys]
