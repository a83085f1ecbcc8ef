"""What a membership needs of the machines and the network between them.

Tests pass another system: a simulated one with its own clock.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from allstep.comm.failures import translated
from allstep.comm.group_wire import GroupWire, connect, shut_down
from allstep.comm.missing import RankNames
from allstep.comm.places import Place
from allstep.comm.wire import Wire
from allstep.comm.work import ThreadWork
from allstep.env import (
    address_towards,
    interface_of,
    is_loopback,
    limit_connection_silence,
    read_gloo_interface,
    set_gloo_interface,
)
from allstep.errors import UsageError

CONNECT_S = 20.0  # timeout to reach the store, and to meet once all are known to be there
_POLL_S = 0.01


class Event(Protocol):
    """An event with the methods of `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


def open_store(host: str, port: int, patience_s: float) -> TCPStore:
    """See `System.open_store`."""
    timeout = timedelta(seconds=CONNECT_S)
    try:
        # If nothing listens any more, torch's store would retry for most of a minute.
        socket.create_connection((host, port), CONNECT_S).close()
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"No run with `--elastic` answers at {host}:{port}; it has ended, or this host can't"
            " reach it."
        ) from error
    limit_connection_silence(port, patience_s)
    return store


class System:
    """This machine's clock and processes, and its connections to other workers, through torch.

    Args:
        launcher_host: name or address by which this machine reaches the launcher's machine.
    """

    def __init__(self, launcher_host: str) -> None:
        self._launcher_host = launcher_host
        self._launcher_pid = os.getppid()
        self._takes_any_interface = read_gloo_interface() is None

    def now_s(self) -> float:
        """The time in seconds, from an arbitrary start."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Waits for `duration_s` seconds."""
        time.sleep(duration_s)

    def new_event(self) -> Event:
        """An event that one thread sets and another waits for."""
        return threading.Event()

    def start_thread(self, run: Callable[[], None], name: str) -> None:
        """Runs a function in a thread; the process waits some seconds for it before it ends.

        Args:
            run: the function.
            name: name of the thread's call, for errors.
        """
        ThreadWork.start(run, name)

    def own_place(self) -> Place:
        """Where this worker runs."""
        return Place.own()

    def has_ended(self, place: Place) -> bool:
        """Whether the process of a place is known to have ended."""
        return place.has_ended()

    def launcher_has_ended(self) -> bool:
        """Whether the process that started this one has ended."""
        return os.getppid() != self._launcher_pid

    def open_store(self, host: str, port: int, patience_s: float) -> Store:
        """Connects to the store of a run, which another process serves.

        Args:
            host, port: the store's address.
            patience_s: how long a call to the store may wait once its host can't be reached.

        Raises:
            UsageError: if the store does not answer.
        """
        return open_store(host, port, patience_s)

    def connect(
        self,
        store: Store,
        names: RankNames,
        timeout_s: float,
        check: Callable[[], None],
    ) -> Wire:
        """Connects to the other workers of a Gloo group. [Note: elastic workers on a GPU]

        Args:
            store: a store for this group only.
            names: names of its ranks; the group must be a first group, not split off another.
            timeout_s: timeout of the group's calls afterwards.
            check: called again and again; raises if a worker will not come.

        Raises:
            PeerLostError, CollectiveTimeoutError: if not all workers have met.
        """
        self._choose_interface(store, names, check)
        group_store, device = PrefixStore("group", store), torch.device("cpu")
        with translated("regroup", names.number, names.size, CONNECT_S):
            group = connect(
                group_store,
                names.number,
                names.size,
                device=device,
                timeout_s=CONNECT_S,
                check=check,
            )
        return GroupWire(group, timeout_s, partial(shut_down, group, device), names)

    def _choose_interface(self, store: Store, names: RankNames, check: Callable[[], None]) -> None:
        """Makes Gloo use the interface that leads to the other hosts. [Note: own address]

        Workers on the launcher's host reach it at its loopback address; they use the interface that
        leads to another host.
        """
        hosts = [place.host for place in names.places]
        own = hosts[names.number]
        if not self._takes_any_interface or set(hosts) == {own}:
            return
        address = address_towards(self._launcher_host)
        if is_loopback(address):
            other = next(rank for rank, host in enumerate(hosts) if host != own)
            while not store.check([f"address/{other}"]):
                check()
                self.sleep(_POLL_S)
            address = address_towards(store.get(f"address/{other}").decode())
        store.set(f"address/{names.number}", address)
        interface = interface_of(address)
        if interface is not None:
            set_gloo_interface(interface)
