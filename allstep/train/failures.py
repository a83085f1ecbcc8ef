"""One worker fails, all stop: which worker reports the error, and how the others end at once.

[Note: one fails, all stop]
A worker that fails writes its error file, prints its traceback and exits without unwinding
anything else; its sockets close, so peers in a collective fail too. The launcher notices the
death and sends SIGTERM to the others, the same signal that a preempted machine sends. The
two are told apart by looking at the peers of this node: if one has an error file or is gone,
the signal means "end at once", else "save a checkpoint and end". A separate thread reads signals
as they come, because Python's handlers wait until the main thread returns from a long matrix
product or a collective.
"""

import atexit
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import allstep.comm
from allstep.comm import FAILED as HAS_FAILED
from allstep.comm import LOST_PEER, SIGNALLED, Activity, Communicator
from allstep.env import Launch, is_alive, read_error_file, read_launch
from allstep.errors import AllstepError, CommunicationError, DisagreementError
from allstep.train.stop import REPEAT_S, SIGNALS

FAILED = 1
USAGE = 2
# A worker that ends only because another one did.
PEER_LOST = 75
# In the launcher's folder, the rank that failed first.
REPORTED = "reported"

_POLL_S = 0.5


def run_worker(
    body: Callable[[Communicator], int],
    *,
    launcher_pid: int | None = None,
    advice: Callable[[], str] | None = None,
) -> int:
    """Runs a worker's body with a communicator; if it fails, the whole process ends at once.

    Args:
        body: returns the exit code; called with this worker's communicator.
        launcher_pid: the process whose end also ends this worker; by default its present parent.
        advice: how the run can be continued, printed once a node when a worker failed; None if the
            launcher reports what became of its workers.

    Returns:
        What `body` returned, once all workers have finished it; a worker that a launcher has
        started doesn't return but exits with this code.
    """
    launch = read_launch()
    guard = _Guard(launch, launcher_pid or os.getppid(), advice)
    guard.start()
    try:
        with allstep.comm.init() as comm:
            guard.meet(comm)
            code = body(comm)
            comm.barrier()
        if launch.launcher != "none":
            _exit(code)
        return code
    except SystemExit:
        raise
    except BaseException as error:
        guard.fail(error)
    finally:
        guard.stop()


def message_of(error: AllstepError) -> str:
    """An error's message, without the traceback that a loader's process wraps it in.

    >>> message_of(AllstepError("no such file"))
    'no such file'
    """
    text = str(error)
    if not text.startswith("Caught ") or "Original Traceback" not in text:
        return text
    return text.rpartition(f"{type(error).__name__}: ")[2].strip()


def _exit(code: int) -> NoReturn:
    """Exits as `sys.exit` does, but without finalizing the interpreter.

    A thread of the backend that releases a tensor during finalization would abort the process.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Guard:
    """Watches signals, the parent and the peers of one worker process."""

    def __init__(self, launch: Launch, launcher_pid: int, advice: Callable[[], str] | None) -> None:
        self._launch = launch
        self._advice = advice
        self._error_file = read_error_file()
        self._peer_pids: dict[int, int] = {}  # by rank, of this node
        self._activity = Activity()
        self._launcher_pid = launcher_pid
        self._requested_at_s: float | None = None
        self._leaving = threading.Lock()  # whoever takes it decides the exit code
        self._previous_handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._read_fd, self._write_fd = os.pipe()

    def start(self) -> None:
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._leave_on_signal)
        threading.Thread(target=self._watch, name="allstep-guard", daemon=True).start()

    def stop(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        os.close(self._write_fd)  # ends the thread

    def meet(self, comm: Communicator) -> None:
        """Learns the process ids of this node's workers. All workers call it."""
        self._activity = comm.activity
        places = comm.all_gather_object([comm.node_rank, os.getpid()])
        self._peer_pids = {
            rank: pid
            for rank, (node, pid) in enumerate(places)
            if node == comm.node_rank and pid != os.getpid()
        }

    def fail(self, error: BaseException) -> NoReturn:
        """Reports the exception that is being handled, once among all workers, and exits."""
        self._leaving.acquire()
        if isinstance(error, KeyboardInterrupt):
            self._end(128 + signal.SIGINT)
        if isinstance(error, CommunicationError) and not isinstance(error, DisagreementError):
            if not self._peer_fails_soon() or self._speaks():
                print(f"{self._prefix}{message_of(error)}", file=sys.stderr)
            self._advise()
            self._end(PEER_LOST)
        is_first = self._claim_report()
        if self._error_file is not None and isinstance(error, Exception):
            get_error_handler().record_exception(error)
        if is_first:
            header = f"{self._prefix}failed:\n" if self._prefix else ""
            text = header + traceback.format_exc()
            if isinstance(error, AllstepError):
                text = f"error: {message_of(error)}\n"
            print(text, end="", file=sys.stderr, flush=True)
        if not isinstance(error, AllstepError):
            self._advise()
        self._end(USAGE if isinstance(error, AllstepError) else FAILED)

    @property
    def _prefix(self) -> str:
        return f"[rank {self._launch.rank}] " if self._launch.size > 1 else ""

    def _claim_report(self) -> bool:
        """True for the first failing worker of a launcher: a bug often fails them all alike."""
        if self._error_file is None:
            return True
        try:
            with (self._error_file.parent.parent / REPORTED).open("x") as file:
                file.write(str(self._launch.rank))
        except OSError:
            return False
        return True

    def _peer_failed(self) -> bool:
        """Whether a worker of this node has failed or is gone, so that this one must end, too."""
        if self._launch.min_workers is not None:
            return False
        if self._error_file is not None:
            for file in self._error_file.parent.parent.glob(f"*/{self._error_file.name}"):
                if file != self._error_file:
                    return True
        return bool(self._ended_peers())

    def _ended_peers(self) -> list[int]:
        return [rank for rank, pid in self._peer_pids.items() if not is_alive(pid)]

    def _speaks(self) -> bool:
        """Whether this worker prints advice for its node, as its launcher does not."""
        below = [rank for rank in self._peer_pids if rank < self._launch.rank]
        return self._advice is not None and set(below) <= set(self._ended_peers())

    def _advise(self) -> None:
        """Prints how to continue."""
        if self._advice is not None and self._speaks():
            print(self._advice(), file=sys.stderr, flush=True)

    def _end_after_peer(self) -> NoReturn:
        """Exits because another worker of this node did."""
        if self._speaks():
            for rank in self._ended_peers():
                pid, host = self._peer_pids[rank], socket.gethostname()
                text = f"{self._prefix}rank {rank} (process {pid} on {host}) failed or was stopped."
                print(text, file=sys.stderr)
        self._advise()
        self._end(PEER_LOST)

    def _peer_fails_soon(self) -> bool:
        """As `_peer_failed`, but gives a dying peer, and the launcher that reaps it, a moment."""
        deadline_s = time.monotonic() + 2 * _POLL_S
        while not (failed := self._peer_failed()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 10)
        return failed

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._read_fd], [], [], _POLL_S)
            if ready:
                numbers = os.read(self._read_fd, 64)
                if not numbers:
                    os.close(self._read_fd)
                    return
                for number in numbers:
                    if number in SIGNALS:
                        self._react(signal.Signals(number))
            elif self._launch.launcher != "none" and os.getppid() != self._launcher_pid:
                self._activity.end(HAS_FAILED, "its launcher is gone")
                self._leave(PEER_LOST)

    def _react(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        if self._peer_failed():
            self._leaving.acquire()
            self._end_after_peer()
        if signal.getsignal(number) == self._leave_on_signal:  # nobody answers requests now
            self._leave(128 + number)
        if self._requested_at_s is None:
            self._requested_at_s = now_s
        elif now_s - self._requested_at_s > REPEAT_S:
            self._leave(128 + number)

    def _leave_on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._leaving.acquire(blocking=False):  # else it interrupts this thread's leaving
            if self._peer_failed():
                self._end_after_peer()
            self._end(128 + number)

    def _leave(self, code: int) -> NoReturn:
        self._leaving.acquire()
        self._end(code)

    def _end(self, code: int) -> NoReturn:
        """Ends this process and its loader processes now, whatever other threads are doing."""
        if code > 128:
            self._activity.end(SIGNALLED, signal.Signals(code - 128).name)
        else:  # an error has told of itself before
            self._activity.end(LOST_PEER if code == PEER_LOST else HAS_FAILED)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler raises
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                stream.write("\x1b[?25h")  # a progress bar hides the cursor
            stream.flush()
        os._exit(code)
