"""How each kind of fault is done, and undone."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.nemesis.clock import clock_file, set_clock
from tests.helpers.nemesis.faults import Fault, Kind
from tests.helpers.nemesis.hosts import Host

Undo = Callable[[], None]

_JUMP_S = 3600  # of a clock

_DROP = """table inet nemesis {
    chain incoming { type filter hook input priority 0; iifname "eth0" drop; }
    chain outgoing { type filter hook output priority 0; oifname "eth0" drop; }
}"""


@dataclass(frozen=True)
class Scene:
    """What faults are done to.

    Attributes:
        pids: of the workers, in the order of their start; of those that run still.
        hosts: each worker's.
        far: the host of those that join, whose link is cut.
        disk: holds the run's folder.
        clocks: the folder of those of workers that have one of their own.
    """

    pids: Mapping[int, int]
    hosts: Sequence[Host]
    far: Host
    disk: Path
    clocks: Path


def disturb(fault: Fault, scene: Scene) -> Undo:
    """Does it; returns what undoes it."""
    return _DO[fault.kind](fault, scene)


def _nothing() -> None:
    """Undoes what can't be undone."""


def _kill(fault: Fault, scene: Scene) -> Undo:
    _send(signal.SIGKILL, fault, scene)
    return _nothing


def _terminate(fault: Fault, scene: Scene) -> Undo:
    _send(signal.SIGTERM, fault, scene)
    return _nothing


def _stop(fault: Fault, scene: Scene) -> Undo:
    _send(signal.SIGSTOP, fault, scene)
    return lambda: _send(signal.SIGCONT, fault, scene)


def _send(number: int, fault: Fault, scene: Scene) -> None:
    if fault.victim in scene.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(scene.pids[fault.victim], number)


def _link_down(fault: Fault, scene: Scene) -> Undo:
    link = ("ip", "-n", scene.far.namespace, "link", "set", "eth0")
    _call(*link, "down")
    return lambda: _undo(*link, "up")


def _drop(fault: Fault, scene: Scene) -> Undo:
    """No reset comes, and none is sent: as where a host has lost its power."""
    nft = ("ip", "netns", "exec", scene.far.namespace, "nft")
    _call(*nft, "-f", "-", given=_DROP)
    return lambda: _undo(*nft, "delete", "table", "inet", "nemesis")


def _slow_link(fault: Fault, scene: Scene) -> Undo:
    """Messages take some hundred times as long; of large ones packets are lost on the way."""
    queue = ("tc", "-n", scene.far.namespace, "qdisc")
    shape = ("tbf", "rate", "500kbit", "burst", "2k", "latency", "50ms")
    _call(*queue, "replace", "dev", "eth0", "root", *shape)
    return lambda: _undo(*queue, "delete", "dev", "eth0", "root")


def _full_disk(fault: Fault, scene: Scene) -> Undo:
    return _fill(scene.disk)


def _full_shm(fault: Fault, scene: Scene) -> Undo:
    return _fill(scene.hosts[fault.victim].shm)


def _clock_ahead(fault: Fault, scene: Scene) -> Undo:
    return _set_clock(_JUMP_S, fault, scene)


def _clock_back(fault: Fault, scene: Scene) -> Undo:
    return _set_clock(-_JUMP_S, fault, scene)


def _set_clock(ahead_s: int, fault: Fault, scene: Scene) -> Undo:
    if fault.victim not in scene.pids:
        return _nothing
    file = clock_file(scene.clocks, scene.pids[fault.victim])
    set_clock(file, ahead_s)
    return lambda: set_clock(file, 0)


def _fill(folder: Path) -> Undo:
    file = folder / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 12))
    return lambda: file.unlink(missing_ok=True)


_DO: dict[Kind, Callable[[Fault, Scene], Undo]] = {
    "kill": _kill,
    "stop": _stop,
    "terminate": _terminate,
    "link down": _link_down,
    "drop": _drop,
    "slow link": _slow_link,
    "full disk": _full_disk,
    "full shm": _full_shm,
    "clock ahead": _clock_ahead,
    "clock back": _clock_back,
}


def _call(*command: str, given: str | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=given)


def _undo(*command: str) -> None:
    """Of two faults of a kind the first that is over is the end of both."""
    subprocess.run(command, check=False, capture_output=True)
