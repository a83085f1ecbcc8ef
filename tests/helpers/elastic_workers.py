"""Workers of an elastic training, each of which may be killed or held at any call."""

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import allstep
from allstep.comm.membership import Membership
from allstep.errors import PeerLostError
from tests.helpers.processes import Workers

TOO_LATE = re.compile("nothing to join|before this one had joined")
_PACKAGE = os.path.dirname(allstep.__file__)
_LOST_AFTER_S = 2.0  # a store that gives no answer

Moment = int | tuple[str, int]  # the n-th call of all, or of a function, from 1


class Calls:
    """Counts calls of allstep's functions on this thread; at one of them ends or holds it.

    Args:
        dies_at: the call.
        until: a file; while it is not there the call waits, instead of ending the process.
    """

    def __init__(self, dies_at: Moment | None, until: Path | None = None) -> None:
        self.count = 0
        self._until = until
        self._name, self._dies_at = dies_at if isinstance(dies_at, tuple) else (None, dies_at)
        self._num_named = 0
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        self.count += 1
        self._num_named += frame.f_code.co_name == self._name
        if self._dies_at != (self.count if self._name is None else self._num_named):
            return
        if self._until is None:
            os.kill(os.getpid(), signal.SIGKILL)
            return
        while not self._until.exists():
            time.sleep(0.01)


def ended(workers: Workers, timeout_s: float = 120.0) -> list[int | None]:
    """Exit codes, once all have ended."""
    deadline_s = time.monotonic() + timeout_s
    while not workers.wait(1.0):
        if time.monotonic() > deadline_s:
            workers.show_stacks()
            raise TimeoutError(f"{workers.exit_codes}; {workers.outcomes()}")
    return workers.exit_codes


def wait_until(happened: Callable[[], bool], workers: Workers) -> None:
    deadline_s = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline_s, workers.outcomes()
        time.sleep(0.01)


def hold_until(file: Path) -> None:
    """Holds a worker, and then until it knows who wants to join by now."""
    _sign(file).touch()
    while not file.exists():
        time.sleep(0.01)
    wait_for_a_look()


def wait_for_a_look() -> None:
    """Waits until rank 0, if this process is it, has looked for those that wait to join by now."""
    deadline_s = time.monotonic() + _LOST_AFTER_S
    for membership in [x for x in gc.get_objects() if type(x) is Membership]:
        is_first = bool(membership.members) and membership.rank == 0
        for _ in range(2 * is_first):  # the first look may have begun before
            with suppress(PeerLostError):
                seen = membership.requests()
                while membership.requests() is seen and time.monotonic() < deadline_s:
                    time.sleep(0.01)


def is_held(file: Path) -> bool:
    """Whether a worker has come to where it is held until the file is there."""
    return _sign(file).exists()


def _sign(file: Path) -> Path:
    return file.with_name(f"{file.name}.held")
