"""Counters in shared memory by which ranks tell each other their progress.

[Note: ordering] Each rank has a line of counters that only it writes; the others poll them. A
counter is an aligned 64-bit word, read and written as a whole. A rank that has read a counter must
see everything that was written before the counter. x86 keeps the order of writes and that of reads.
aarch64 does not; there `_fence` is called before each counter's write and after its read. Acquiring
and releasing a lock is an atomic operation with acquire order and one with release order. Since no
acquire moves before an earlier release, doing both twice lets no read or write pass in either
direction. Values only grow, so a stale read costs another read and no more.

[Note: waiting] Peers are late by microseconds within a sum, and by any time before it. So a wait
first polls for a moment, yielding to other threads between two reads if there are more ranks than
cores. Then it marks itself as asleep, reads once more, and blocks until a peer writes to its pipe
or a peer's process ends. A rank that sets a counter checks for sleepers afterwards, so at least one
of the two sees the other ([Note: ordering]: the fence lets no later read pass an earlier write
either). Blocked ranks take no time from those that compute, and wake up sooner than ranks that only
yield.
"""

import ctypes
import mmap
import select
import threading
import time
from collections.abc import Callable, Sequence

from allstep.comm.failures import START_AGAIN
from allstep.comm.missing import MissingRanks, find_missing_ranks, listed
from allstep.comm.shared_memory.mapping import SharedMapping
from allstep.env import num_cores
from allstep.errors import CollectiveTimeoutError, PeerLostError

_ASLEEP, _LEFT, FIRST_FREE = range(3)  # words of a rank's line; those from FIRST_FREE are free
FILLED, REDUCED, EMPTIED, NUM_SUM_WORDS = range(FIRST_FREE, FIRST_FREE + 4)  # used by sums

_SPIN_S = 5e-5
_GIVE_WAY_S = 2e-4
_LONGEST_SLEEP_S = 0.1  # limited in case a wake-up is missed

# Python's os.sched_yield holds the GIL before 3.13.
_sched_yield = ctypes.CDLL(None).sched_yield


def lines_bytes(num_ranks: int, num_words: int) -> int:
    """Size of all ranks' counters, in whole pages."""
    return -(-num_ranks * _line_bytes(num_words) // mmap.PAGESIZE) * mmap.PAGESIZE


def _line_bytes(num_words: int) -> int:
    """Size of one rank's counters, in whole pairs of cache lines, as processors fetch them."""
    return -(-8 * num_words // 128) * 128


class Flags:
    """This rank's counters and a view of the others'.

    Args:
        mapping: the ranks' shared mapping; its memory begins with all ranks' lines of counters.
        rank: this rank.
        timeout_s: function that returns the longest duration of a wait.
        num_words: number of words of a line that are in use.

    Attributes:
        verb: name of the call, for errors.
        limit_s: longest duration of a wait if it differs from `timeout_s`; after a shorter one the
            caller may wait again.
    """

    def __init__(
        self,
        mapping: SharedMapping,
        rank: int,
        timeout_s: Callable[[], float],
        num_words: int,
    ) -> None:
        self.verb = "all_reduce"
        self.limit_s: float | None = None
        pids, wakeups = mapping.pids, mapping.wakeups
        self._names = mapping.names
        self._words = memoryview(mapping.memory)[: lines_bytes(len(pids), num_words)].cast("q")
        self._line_words = _line_bytes(num_words) // 8
        self._rank = rank
        self._others = [other for other in range(len(pids)) if other != rank]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wakeups = wakeups
        self._gives_way = not len(set(pids)) == len(pids) <= num_cores()
        self._ended: set[int] = set()  # ranks whose process has ended
        self._events = select.poll()
        for fd in (wakeups.read_fd, *wakeups.pidfds):
            self._events.register(fd, select.POLLIN)

    def set(self, counter: int, value: int, ranks: Sequence[int] | None = None) -> None:
        """Sets this rank's counter, and wakes those of `ranks` (all others if None) that sleep.

        [Note: ordering]
        """
        self._fence()
        self._words[self._word(self._rank, counter)] = value
        self._fence()
        for rank in self._others if ranks is None else ranks:
            if self._words[self._word(rank, _ASLEEP)]:
                self._wakeups.wake(rank)

    def wait(
        self,
        counter: int,
        value: int,
        ranks: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when a counter of each of `ranks` has reached `value`.

        Args:
            counter, value: the counter, and the value that it must reach.
            ranks: the ranks whose counters are read; all other ranks if None.
            meanwhile: called again and again during the wait.
        """
        ranks = self._others if ranks is None else ranks
        if self._late(counter, value, ranks):
            self._wait_for(counter, value, ranks, meanwhile)
        self._fence()

    def has_come(self, rank: int, counter: int, value: int) -> bool:
        """Whether a rank's counter has reached `value`."""
        late = self._late(counter, value, (rank,))
        self._fence()
        return not late

    def _word(self, rank: int, counter: int) -> int:
        return rank * self._line_words + counter

    def _fence(self) -> None:
        """Keeps earlier reads and writes before later ones. [Note: ordering]"""
        lock = self._lock
        lock.acquire()
        lock.release()
        lock.acquire()
        lock.release()

    def _wait_for(
        self, counter: int, value: int, ranks: Sequence[int], meanwhile: Callable[[], None]
    ) -> None:
        """Polls for a moment, then sleeps, until the counters have come. [Note: waiting]"""
        start_s = time.monotonic()
        stop_s = start_s + (_GIVE_WAY_S if self._gives_way else _SPIN_S)
        while self._late(counter, value, ranks) and time.monotonic() < stop_s:
            if self._gives_way:
                _sched_yield()
        if not self._late(counter, value, ranks):
            return
        with self._names.activity.call(self.verb):
            while self._late(counter, value, ranks):
                meanwhile()
                self._sleep(counter, value, ranks)
                # Read again: a rank that has come and then left is not late.
                late = self._late(counter, value, ranks)
                self._check(late, self._gone(late), time.monotonic() - start_s)

    def _sleep(self, counter: int, value: int, ranks: Sequence[int]) -> None:
        """Blocks until something happens, unless an awaited rank is gone."""
        asleep = self._word(self._rank, _ASLEEP)
        self._words[asleep] = 1
        self._fence()
        late = self._late(counter, value, ranks)
        if late and not self._gone(late):
            for fd, _ in self._events.poll(1000 * min(_LONGEST_SLEEP_S, self._longest_s())):
                if fd != self._wakeups.read_fd:
                    self._events.unregister(fd)
                    self._ended.add(self._wakeups.pidfds[fd])
        self._words[asleep] = 0
        self._wakeups.clear()

    def _late(self, counter: int, value: int, ranks: Sequence[int]) -> list[int]:
        words, step = self._words, self._line_words
        return [rank for rank in ranks if words[rank * step + counter] < value]

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that will set no counter any more, because they left or ended."""
        return [r for r in ranks if r in self._ended or self._words[self._word(r, _LEFT)]]

    def _longest_s(self) -> float:
        return self.limit_s or self._timeout_s()

    def _check(self, late: Sequence[int], gone: Sequence[int], waited_s: float) -> None:
        """Raises if an awaited rank is gone or too late, or if this rank has left."""
        where = f"`{self.verb}` on {self._names.own}"
        if self._words[self._word(self._rank, _LEFT)]:
            raise PeerLostError(f"{where}: the communicator was aborted meanwhile.")
        if gone:
            self._names.report_stuck(self.verb)
            raise PeerLostError(
                f"{where}: {self._names.placed(self._names.numbers[gone[0]])} left; it failed, "
                f"timed out or was stopped. {START_AGAIN}"
            )
        if late and waited_s > self._longest_s():
            raise self._timed_out(where, late)

    def _timed_out(self, where: str, late: Sequence[int]) -> CollectiveTimeoutError:
        """The error that names the missing ranks: a late rank may itself wait for another one."""
        numbers = [self._names.numbers[rank] for rank in late]
        missing = MissingRanks({}, numbers)
        if self.limit_s is None or self.limit_s >= self._timeout_s():
            missing = find_missing_ranks(self._names, self.verb)
        who = "missing" if set(numbers) <= set(missing.missing) else "it waited for"
        return CollectiveTimeoutError(
            f"{where} did not finish within {self._longest_s():g} s; {who}: {listed(numbers)}. "
            "Check that all ranks make the same calls in the same order, or raise `timeout_s`. "
            f"{missing}".rstrip()
        )

    def close(self) -> None:
        """Tells the others that this rank will set no counter any more."""
        self.set(_LEFT, 1)
        self._wakeups.wake(self._rank)  # in case another thread of this rank waits
