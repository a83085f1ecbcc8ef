"""How ranks tell each other through shared memory how far they are.

[Note: ordering] Each rank has a line of counters that it alone writes; the others poll them. A
counter is an aligned 64-bit word, read and written whole. What was written before a counter
must be seen by whoever has read the counter. x86 keeps the order of writes and that of reads.
aarch64 does not; there `_fence` stands before each counter's write and after its read: taking
and releasing a lock is an atomic operation with acquire order and one with release order, and
since no acquire passes a release that stands before it, doing so twice lets nothing pass in
either direction. Values only grow, so a stale read costs another look and no more.

[Note: waiting] Peers are late by microseconds inside a sum and by anything before it. So a wait
first gives way to other threads (the scheduler's, not Python's `sleep(0)`, which takes 50 us),
then sleeps, ever longer, and looks now and then whether its peers live. The lock of the
interpreter is free meanwhile.
"""

import ctypes
import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from allstep.comm.roll_call import listed
from allstep.errors import CollectiveTimeoutError, PeerLostError

__all__ = ["EMPTIED", "FILLED", "LINE_BYTES", "REDUCED", "Signals"]

LINE_BYTES = 128  # of counters for each rank, two cache lines: processors fetch them in pairs
_LINE_WORDS = LINE_BYTES // 8
FILLED, REDUCED, EMPTIED, _LEFT = range(4)  # the counters in a line

_YIELD_S = 2e-3
_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 1e-3
_CHECK_S = 0.02

# Python's own os.sched_yield holds the interpreter's lock before 3.13.
_sched_yield = ctypes.CDLL(None).sched_yield


class Signals:
    """This rank's counters and a view of the others'.

    Args:
        memory: the lines of all ranks, zero at first.
        rank, pids: this rank, and the process of each.
        timeout_s: how long a wait may take.
    """

    def __init__(self, memory: memoryview, rank: int, pids: Sequence[int], timeout_s: float):
        self._words = memory.cast("q")
        self._rank = rank
        self._others = [other for other in range(len(pids)) if other != rank]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ends = select.poll()
        self._pidfds: dict[int, int] = {}
        for other, pid in enumerate(pids):
            if pid != os.getpid():
                pidfd = os.pidfd_open(pid)
                self._pidfds[pidfd] = other
                self._ends.register(pidfd, select.POLLIN)

    def set(self, counter: int, value: int) -> None:
        """Tells the others that this rank has come to `value`. [Note: ordering]"""
        self._fence()
        self._words[self._rank * _LINE_WORDS + counter] = value

    def wait(self, counter: int, value: int, ranks: Sequence[int] | None = None) -> None:
        """Returns when some ranks, all others if None, have come to `value`."""
        words = self._words
        ranks = self._others if ranks is None else ranks
        for rank in ranks:
            if words[rank * _LINE_WORDS + counter] < value:
                self._wait_for(counter, value, ranks)
        self._fence()

    def _fence(self) -> None:
        """Keeps reads and writes before it from those after it. [Note: ordering]"""
        lock = self._lock
        lock.acquire()
        lock.release()
        lock.acquire()
        lock.release()

    def _wait_for(self, counter: int, value: int, ranks: Sequence[int]) -> None:
        """[Note: waiting]"""
        start_s = time.monotonic()
        check_s = start_s + _CHECK_S
        sleep_s = _SLEEP_S
        while late := self._late(counter, value, ranks):
            now_s = time.monotonic()
            if now_s - start_s < _YIELD_S:
                _sched_yield()
                continue
            time.sleep(sleep_s)
            sleep_s = min(1.1 * sleep_s, _LONGEST_SLEEP_S)
            if now_s >= check_s:
                gone = self._gone()
                # Looked at anew: one that has come and left since is not missed.
                late = self._late(counter, value, ranks)
                self._check(late, [rank for rank in gone if rank in late], now_s - start_s)
                check_s = now_s + _CHECK_S

    def _late(self, counter: int, value: int, ranks: Sequence[int]) -> list[int]:
        words = self._words
        return [rank for rank in ranks if words[rank * _LINE_WORDS + counter] < value]

    def _gone(self) -> list[int]:
        """Ranks that have left, in whatever way."""
        ended = [self._pidfds.get(fd, -1) for fd, _ in self._ends.poll(0)]
        left = [r for r in self._others if self._words[r * _LINE_WORDS + _LEFT]]
        return sorted({*ended, *left})

    def _check(self, late: Sequence[int], gone: Sequence[int], waited_s: float) -> None:
        """Raises if a rank that is waited for is gone or too late, or if this one has left."""
        where = f"`all_reduce` on rank {self._rank} of {len(self._others) + 1} of this host"
        if self._words[self._rank * _LINE_WORDS + _LEFT]:
            raise PeerLostError(f"{where}: the communicator was aborted meanwhile.")
        if gone:
            raise PeerLostError(
                f"{where}: rank {gone[0]} left; it failed, timed out or was stopped. Look for "
                "the first error among the other ranks."
            )
        if late and waited_s > self._timeout_s:
            raise CollectiveTimeoutError(
                f"{where} did not finish within {self._timeout_s:g} s; missing: "
                f"{listed(late)}. Check that all ranks make the same calls in the same order, "
                "or raise `timeout_s`."
            )

    def close(self) -> None:
        """Tells the others that this rank comes to nothing any more."""
        self.set(_LEFT, 1)
        for pidfd in list(self._pidfds):
            with suppress(OSError, KeyError):
                self._ends.unregister(pidfd)
                os.close(pidfd)
        self._pidfds.clear()
