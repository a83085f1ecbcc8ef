"""How ranks tell each other through shared memory how far they are.

[Note: ordering] Each rank has a line of counters that only it writes; the others poll them. A
counter is an aligned 64-bit word, read and written whole. What was written before a counter
must be seen by whoever has read the counter. x86 keeps the order of writes and that of reads.
aarch64 does not; there `_fence` stands before each counter's write and after its read: taking
and releasing a lock is an atomic operation with acquire order and one with release order, and
since no acquire passes a release that stands before it, doing so twice lets nothing pass in
either direction. Values only grow, so a stale read costs another look and no more.

[Note: waiting] Peers are late by microseconds inside a sum and by anything before it. So a wait
first looks again and again for a moment, giving way to other threads between two looks where
there are more ranks than cores. Then it says that it is asleep, looks once more, and blocks
until a peer writes to its pipe, or a peer's process ends. Who sets a counter looks for
sleepers after that, so one of the two sees the other ([Note: ordering]: the fence lets no later
read pass an earlier write either). Blocked ranks take no time from those that compute, and wake
up sooner than ranks that only gave way to them.
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

_ASLEEP, _LEFT, FIRST_FREE = range(3)  # the words of a rank's line; from there on as users like
FILLED, REDUCED, EMPTIED, NUM_SUM_WORDS = range(FIRST_FREE, FIRST_FREE + 4)  # of sums

_SPIN_S = 5e-5
_GIVE_WAY_S = 2e-4
_LONGEST_SLEEP_S = 0.1  # in case a wake-up is missed

# Python's own os.sched_yield holds the interpreter's lock before 3.13.
_sched_yield = ctypes.CDLL(None).sched_yield


def lines_bytes(num_ranks: int, num_words: int) -> int:
    """Of all ranks' counters, in whole pages."""
    return -(-num_ranks * _line_bytes(num_words) // mmap.PAGESIZE) * mmap.PAGESIZE


def _line_bytes(num_words: int) -> int:
    """Of a rank's counters: whole pairs of cache lines, which is how processors fetch them."""
    return -(-8 * num_words // 128) * 128


class Flags:
    """This rank's counters and a view of the others'.

    Args:
        mapping: what the ranks share; its memory begins with the lines of all of them.
        rank: this one.
        timeout_s: tells how long a wait may take.
        num_words: how many words of a line are in use.

    Attributes:
        verb: names the call in errors.
        limit_s: how long to wait if that isn't `timeout_s`; who waits for less may wait again.
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
        self._ended: set[int] = set()  # ranks whose process has
        self._events = select.poll()
        for fd in (wakeups.read_fd, *wakeups.pidfds):
            self._events.register(fd, select.POLLIN)

    def set(self, counter: int, value: int, ranks: Sequence[int] | None = None) -> None:
        """Tells some ranks, all others if None, that this one has come to `value`.

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
        """Returns when some ranks, all others if None, have come to `value`.

        Args:
            counter, value: which of their counters, and how far.
            ranks: which.
            meanwhile: called again and again until then.
        """
        ranks = self._others if ranks is None else ranks
        if self._late(counter, value, ranks):
            self._wait_for(counter, value, ranks, meanwhile)
        self._fence()

    def has_come(self, rank: int, counter: int, value: int) -> bool:
        """Whether a rank has come to `value`."""
        late = self._late(counter, value, (rank,))
        self._fence()
        return not late

    def _word(self, rank: int, counter: int) -> int:
        return rank * self._line_words + counter

    def _fence(self) -> None:
        """Keeps reads and writes before it from those after it. [Note: ordering]"""
        lock = self._lock
        lock.acquire()
        lock.release()
        lock.acquire()
        lock.release()

    def _wait_for(
        self, counter: int, value: int, ranks: Sequence[int], meanwhile: Callable[[], None]
    ) -> None:
        """[Note: waiting]"""
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
                # Looked at anew: one that has come and left since is not missed.
                late = self._late(counter, value, ranks)
                self._check(late, self._gone(late), time.monotonic() - start_s)

    def _sleep(self, counter: int, value: int, ranks: Sequence[int]) -> None:
        """Blocks until something happens, unless a rank that is waited for is gone."""
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
        """Those that come to nothing any more, in whatever way."""
        return [r for r in ranks if r in self._ended or self._words[self._word(r, _LEFT)]]

    def _longest_s(self) -> float:
        return self.limit_s or self._timeout_s()

    def _check(self, late: Sequence[int], gone: Sequence[int], waited_s: float) -> None:
        """Raises if a rank that is waited for is gone or too late, or if this one has left."""
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
        """What says who is missing: a late rank may only wait for another one, elsewhere."""
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
        """Tells the others that this rank comes to nothing any more."""
        self.set(_LEFT, 1)
        self._wakeups.wake(self._rank)  # for a thread of this rank that waits
