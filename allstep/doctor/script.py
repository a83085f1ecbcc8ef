"""A user's script, run in this process as `python SCRIPT` would, and observed from `attach` on."""

import contextlib
import functools
import importlib
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary, extract_stack
from typing import Any, NoReturn, Protocol

import torch

import allstep
from allstep.comm import Communicator, Mesh
from allstep.errors import CommunicationError, DisagreementError, UsageError
from allstep.exchange import Exchange

Attach = Callable[..., Exchange]

_MEETING_S, _STUCK_S = 60.0, 5.0
_POLL_S = 0.2


class Observer(Protocol):
    """Observes a script by hooks that change nothing in it."""

    @property
    def num_events(self) -> int:
        """The number of forward passes and steps so far, which shows progress."""

    def attach(self, attach: Attach, *args: Any, **options: Any) -> Exchange:
        """Replaces `allstep.attach` in the script; gets the original."""

    def see_mesh(self, mesh: Mesh[Communicator]) -> None:
        """Called with each mesh that the script makes."""

    def close(self) -> None:
        """Removes all hooks."""


@dataclass(frozen=True)
class Failure:
    """The reason why a script ended early.

    Attributes:
        kind: "error", "exit" (with a code of its own), "timeout" (no progress) or "refused" (the
            observer can't take such a script).
        text: a traceback, what the code was, or what is wrong with the script.
        is_own: whether no other worker's end brought it about.
        time_s: when, of `time.monotonic`, for finding the first.
    """

    kind: str
    text: str
    is_own: bool
    time_s: float

    def words(self, timeout_s: float, where: str = "") -> str:
        """The end of the script in words, for a sentence that begins with its name.

        Args:
            timeout_s: that it was given for a forward or a step.
            where: it failed, such as " on 2 workers".
        """
        text = self.text.rstrip()
        if self.kind == "timeout":
            return (
                f"made no forward and no step for {timeout_s:g} s{where}. It was at\n{text}\n"
                "Give it more time with `--timeout-s`, if that is what it needs."
            )
        if self.kind == "refused":
            return text
        return f"exited with {text}{where}." if self.kind == "exit" else f"failed{where}:\n{text}"


class ScriptRefusedError(UsageError):
    """Ends a script that its observer can't handle; the message follows the script's name."""


class _EnoughSteps(BaseException):
    """Raised in the script to leave it."""


class ScriptRunner:
    """Runs a script until its observer has seen enough, it ends, or it makes no progress.

    Args:
        script: any Python file that calls `allstep.attach`.
        arguments: the script's own.
        timeout_s: after so long without a forward or a step this process ends.
        report: leaves what was seen where others find it, with the failure if there was one;
            called once.
        meet: waits for other workers to report, for so many seconds at most; while they have not,
            they need this one.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        timeout_s: float,
        report: Callable[[Failure | None], None],
        meet: Callable[[float], None] = lambda timeout_s: None,
    ) -> None:
        self._script, self._arguments = script, arguments
        self._report, self._meet = report, meet
        self._has_reported = False
        self._watchdog = Watchdog(timeout_s, self._give_up)

    def run(self, observer: Observer) -> Failure | None:
        """Runs the script; returns why it failed, if it did.

        Whoever has taken `attach` from its room before doesn't find the observer's: import little
        before.
        """
        failure = None
        self._watchdog.start(lambda: observer.num_events)
        try:
            with _observed(observer), _as_main(self._script, self._arguments):
                runpy.run_path(str(self._script), run_name="__main__")
        except _EnoughSteps:
            pass
        except BaseException as error:
            failure = _failure(error, self._script)
        finally:
            self._watchdog.stop()
            observer.close()
        self._report_once(failure)
        return failure

    def stop(self) -> NoReturn:
        """Leaves the script from a hook, as soon as enough was observed; it may still clean up."""
        if self._report_once(None):
            self._watchdog.expect_end()
            self._meet(_MEETING_S)
        raise _EnoughSteps

    def _give_up(self, place: StackSummary) -> None:
        text = "".join(_frames_of_user(place, self._script).format())
        self._report_once(Failure("timeout", text, True, time.monotonic()))
        self._meet(_STUCK_S)  # others may be stuck elsewhere

    def _report_once(self, failure: Failure | None) -> bool:
        is_first, self._has_reported = not self._has_reported, True
        if is_first:
            self._report(failure)
        return is_first


@contextlib.contextmanager
def _observed(observer: Observer) -> Iterator[None]:
    """Tells the observer which models are attached and which meshes are made."""
    room = importlib.import_module("allstep.exchange")
    attach, make_mesh = room.attach, Communicator.mesh

    @functools.wraps(attach)
    def observed(*args: Any, **options: Any) -> Exchange:
        return observer.attach(attach, *args, **options)

    @functools.wraps(make_mesh)
    def observed_mesh(comm: Communicator, **axes: int) -> Mesh[Communicator]:
        mesh = make_mesh(comm, **axes)
        observer.see_mesh(mesh)
        return mesh

    vars(room)["attach"] = observed
    Communicator.mesh = observed_mesh  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        vars(room)["attach"] = attach
        Communicator.mesh = make_mesh  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _failure(error: BaseException, script: Path) -> Failure | None:
    """The failure that ended the script; None if it ended by itself."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        return Failure("exit", str(error.code), True, time.monotonic())
    if isinstance(error, ScriptRefusedError):
        return Failure("refused", str(error), True, time.monotonic())
    is_own = isinstance(error, DisagreementError) or not isinstance(error, CommunicationError)
    told = traceback.TracebackException.from_exception(error)
    told.stack = _frames_of_script(told.stack, script)
    return Failure("error", "".join(told.format()), is_own, time.monotonic())


def _frames_of_script(stack: StackSummary, script: Path) -> StackSummary:
    """The frames from the script's first one on."""
    names = [os.path.realpath(frame.filename) for frame in stack]
    mine = os.path.realpath(script)
    start = names.index(mine) if mine in names else len(names)
    return StackSummary.from_list(stack[start:])


def _frames_of_user(stack: StackSummary, script: Path) -> StackSummary:
    """The script's frames up to its call of torch or allstep."""
    frames = _frames_of_script(stack, script)
    libraries = tuple(os.path.dirname(module.__file__ or "") for module in (torch, allstep))
    inside = (i for i, frame in enumerate(frames) if frame.filename.startswith(libraries))
    return StackSummary.from_list(frames[: next(inside, len(frames))])


class Watchdog:
    """A thread that ends this process after a long time without progress, or without launcher.

    Args:
        timeout_s: longest time in which nothing may happen.
        give_up: called with where the main thread is, before the end.
        tidy_s: how long the script may take to end after `expect_end`.
        end: ends the process, with an exit code.
        parent: tells the launcher's process id.
    """

    def __init__(
        self,
        timeout_s: float,
        give_up: Callable[[StackSummary], None],
        *,
        tidy_s: float = 10.0,
        end: Callable[[int], object] = os._exit,
        parent: Callable[[], int] = os.getppid,
    ) -> None:
        self._timeout_s, self._give_up = timeout_s, give_up
        self._tidy_s = tidy_s
        self._end, self._parent = end, parent
        self._deadline_s: float | None = None
        self._stopped = threading.Event()

    def start(self, num_events: Callable[[], int]) -> None:
        """Starts watching this thread.

        Args:
            num_events: tells how much has happened.
        """
        watched = threading.get_ident(), num_events, self._parent()
        threading.Thread(
            target=self._watch, args=watched, name="allstep watchdog", daemon=True
        ).start()

    def expect_end(self) -> None:
        """Allows the script a limited time to clean up, after all was reported."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._tidy_s

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def _watch(self, thread: int, num_events: Callable[[], int], launcher: int) -> object:
        """Watches until it ends the process, or is stopped."""
        seen, since_s = -1, time.monotonic()
        while not self._stopped.wait(_POLL_S):
            now_s = time.monotonic()
            if self._parent() != launcher:
                return self._end(1)
            if num_events() != seen:
                seen, since_s = num_events(), now_s
            if self._deadline_s is not None:
                if now_s > self._deadline_s:
                    return self._end(0)
            elif now_s - since_s > self._timeout_s:
                self._give_up(extract_stack(sys._current_frames()[thread]))
                return self._end(1)
        return None
