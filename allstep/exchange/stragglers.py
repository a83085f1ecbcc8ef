"""Names workers that keep the others waiting, while they run."""

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from allstep.comm import Communicator

_NUM_STEPS = 10  # behind a word
_LEAST_PAUSE = 20  # steps between two words; twice as many after each
_SLOWER = 1.25  # times the median of the others
_LEAST_S = 0.002  # and by so much a step
_FEW_TIMES = 0.7  # of the steps, at least: one pause is nobody's fault

_KINDS = ("data", "compute")
_DATA_CURE = "try more loader processes or a faster disk"
COMPUTE_CURE = "see what else runs on its machine"


class WorkerTimes(NamedTuple):
    """Where a worker's time went in one step; seconds.

    Attributes:
        data_s: waiting for samples.
        compute_s: in its micro-batches, without waiting for workers.
        wait_s: waiting for the exchange.
        num_micro_batches: that it ran.
    """

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    num_micro_batches: int = 0

    @property
    def busy_s(self) -> float:
        """What the others wait for."""
        return self.data_s + self.compute_s

    @property
    def micro_batch_s(self) -> float:
        """Of one micro-batch; 0 if there was none."""
        return self.compute_s / self.num_micro_batches if self.num_micro_batches else 0.0


class Stragglers:
    """Looks at the workers' times, and says who is slow and why, once while it stays so.

    Where one is slow and then another, as on busy machines, pauses between words get longer.

    Args:
        compute_cure: what helps a worker that computes slowly, in words; may be set later.

    Attributes:
        own_times: of this worker's last step, for the others to know.
        worker_times: of all workers, by rank, as they were told last; () until then.
        words: who is slow now and why, said before or not; empty if nobody is.

    >>> usual, slow = WorkerTimes(0.01, 0.1), WorkerTimes(0.01, 0.15)
    >>> stragglers = Stragglers()
    >>> said = [stragglers.see([usual, slow, usual]) for _ in range(20)]
    >>> print(*filter(None, said))
    rank 1 is 1.5x slower than the median: compute, 150 ms a step, not 100
    (see what else runs on its machine)
    """

    def __init__(self, compute_cure: str = COMPUTE_CURE) -> None:
        self.own_times = WorkerTimes()
        self.worker_times: Sequence[WorkerTimes] = ()
        self.compute_cure = compute_cure
        self.words = ""
        self._steps: deque[Sequence[WorkerTimes]] = deque(maxlen=_NUM_STEPS)
        self._named: tuple[int, str] | None = None
        self._num_seen, self._next, self._pause = 0, 0, _LEAST_PAUSE

    def note(self, times: Sequence[WorkerTimes], comm: Communicator) -> None:
        """Takes in what the workers told each other; rank 0 says who keeps the others waiting."""
        words = self.see(times)
        comm.activity.straggler = self.words
        if words and comm.rank == 0:
            logging.getLogger("allstep").warning(words)

    def see(self, times: Sequence[WorkerTimes]) -> str | None:
        """Takes in a step's times.

        Args:
            times: by rank.

        Returns:
            Words, if there is something new to say.
        """
        self.worker_times = times
        if len(times) < 2:
            return None
        self._steps.append(times)
        self._num_seen += 1
        if len(self._steps) < _NUM_STEPS:
            return None
        found = self._slowest()
        if found is None:
            self._named, self.words = None, ""
            return None
        rank, cause, words = found
        self.words = f"{words} ({_DATA_CURE if cause == 'data' else self.compute_cure})"
        if (rank, cause) == self._named or self._num_seen < self._next:
            return None
        self._named = rank, cause
        self._next, self._pause = self._num_seen + self._pause, 2 * self._pause
        return self.words

    def _slowest(self) -> tuple[int, str, str] | None:
        busy_s = [median(step[r].busy_s for step in self._steps) for r in self._ranks]
        rank = max(self._ranks, key=lambda r: busy_s[r])
        others = [r for r in self._ranks if r != rank]
        usual_s = median(busy_s[r] for r in others)
        num_slow = sum(
            step[rank].busy_s > _SLOWER * median(step[r].busy_s for r in others)
            for step in self._steps
        )
        excess_s = busy_s[rank] - usual_s
        if not (busy_s[rank] > _SLOWER * usual_s and excess_s > _LEAST_S):
            return None
        if num_slow < _FEW_TIMES * len(self._steps):
            return None
        spent = {kind: self._medians(kind) for kind in _KINDS}
        usual = {kind: median(s[r] for r in others) for kind, s in spent.items()}
        cause = max(_KINDS, key=lambda kind: spent[kind][rank] - usual[kind])
        factor = busy_s[rank] / usual_s if usual_s else float("inf")
        return (
            rank,
            cause,
            f"rank {rank} is {factor:.1f}x slower than the median: {cause},"
            f" {1000 * spent[cause][rank]:.0f} ms a step, not {1000 * usual[cause]:.0f}",
        )

    @property
    def _ranks(self) -> range:
        return range(len(self._steps[0]))

    def _medians(self, kind: str) -> list[float]:
        return [median(getattr(step[r], f"{kind}_s") for step in self._steps) for r in self._ranks]
