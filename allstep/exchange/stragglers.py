"""Names workers that keep the others waiting, while they run."""

import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.comm import Communicator

_NUM_STEPS = 10  # that are looked at together
_LEAST_PAUSE = 20  # steps between two words; twice as many after each
_SLOWER = 1.25  # times the median of the others
_LEAST_S = 0.002  # and by so much a step
_FEW_TIMES = 0.7  # of the steps, at least: one pause is nobody's fault

NUM_TIME_DIGITS = 11  # below 128, of what a worker tells the others
_BASE = 128
_NUM_DURATIONS = 3
_NUM_SECONDS = 3  # digits of a duration: two of its mantissa, one of its exponent
_MANTISSA_BITS = 14
_EXPONENT = 64

_KINDS = ("data", "compute")  # the first of `WorkerTimes`
_DATA_CURE = "try more loader processes or a faster disk"
COMPUTE_CURE = "see what else runs on its machine"


class WorkerTimes(NamedTuple):
    """A worker's times in one step, in seconds.

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
    def micro_batch_s(self) -> float:
        """The time of one micro-batch; 0 if there was none."""
        return self.compute_s / self.num_micro_batches if self.num_micro_batches else 0.0

    def digits(self) -> list[int]:
        """[NUM_TIME_DIGITS], rounded down; `times_of` reads them."""
        seconds = (self.data_s, self.compute_s, self.wait_s)
        num = min(self.num_micro_batches, _BASE**2 - 1)
        return [*(digit for s in seconds for digit in _digits_of(s)), num % _BASE, num // _BASE]


def times_of(digits: Tensor) -> Tensor:
    """Times as `WorkerTimes` has them, [..., 4], float64 on the CPU.

    Args:
        digits: [..., NUM_TIME_DIGITS].

    >>> told = [WorkerTimes(0.25, 0.5, 0.0, 300), WorkerTimes(0.0, 1.0, 2.0, 1)]
    >>> times_of(torch.tensor([times.digits() for times in told])).tolist()
    [[0.25, 0.5, 0.0, 300.0], [0.0, 1.0, 2.0, 1.0]]
    """
    digits = digits.to("cpu", torch.float64)
    of_durations = digits[..., :-2].reshape(*digits.shape[:-1], _NUM_DURATIONS, _NUM_SECONDS)
    low, high, exponent = of_durations.unbind(-1)
    seconds = torch.ldexp(low + _BASE * high, exponent - _EXPONENT - _MANTISSA_BITS)
    num_micro_batches = digits[..., -2:-1] + _BASE * digits[..., -1:]
    return torch.cat((seconds, num_micro_batches), -1)


def _digits_of(seconds: float) -> list[int]:
    if not seconds > 0:
        return [0, 0, 0]
    mantissa, exponent = math.frexp(seconds)
    whole = int(mantissa * 2**_MANTISSA_BITS)
    return [whole % _BASE, whole // _BASE, min(max(exponent + _EXPONENT, 0), _BASE - 1)]


class Stragglers:
    """Looks at the workers' times, and says who is slow and why, once while it stays so.

    Where one is slow and then another, as on busy machines, pauses between words get longer.

    Args:
        compute_cure: what helps a worker that computes slowly, in words; may be set later.

    Attributes:
        own_times: of this worker's last step, for the others to know.
        words: who is slow now and why, said before or not; empty if nobody is.

    >>> usual, slow = WorkerTimes(0.01, 0.1, 0.0, 1), WorkerTimes(0.01, 0.15, 0.0, 1)
    >>> stragglers = Stragglers()
    >>> told = torch.tensor([times.digits() for times in (usual, slow, usual)])
    >>> said = [stragglers.see(told) for _ in range(20)]
    >>> print(*filter(None, said))
    rank 1 is 1.5x slower than the median: compute, 150 ms a step, not 100
    (see what else runs on its machine)
    """

    def __init__(self, compute_cure: str = COMPUTE_CURE) -> None:
        self.own_times = WorkerTimes()
        self.compute_cure = compute_cure
        self.words = ""
        self._last = torch.empty(0, NUM_TIME_DIGITS)
        self._steps: list[Tensor] = []  # since the last look
        self._named: tuple[int, str] | None = None
        self._num_seen, self._next, self._pause = 0, 0, _LEAST_PAUSE

    @property
    def worker_times(self) -> list[WorkerTimes]:
        """The last times that the workers have told each other, by rank; [] until then."""
        rows = times_of(self._last).tolist()
        return [WorkerTimes._make((*seconds, int(num))) for *seconds, num in rows]

    def note(self, told: Tensor, comm: Communicator) -> None:
        """Takes in what the workers told each other; rank 0 says who keeps the others waiting."""
        words = self.see(told)
        comm.activity.straggler = self.words
        if words and comm.rank == 0:
            logging.getLogger("allstep").warning(words)

    def see(self, told: Tensor) -> str | None:
        """Takes in a step's times; they are looked at once there are those of ten steps.

        Args:
            told: digits by rank, [workers, NUM_TIME_DIGITS]; nobody else writes there any more.

        Returns:
            Words, if there is something new to say.
        """
        self._last = told
        if len(told) < 2:
            return None
        self._steps.append(told)
        self._num_seen += 1
        if len(self._steps) < _NUM_STEPS:
            return None
        found = _slowest(times_of(torch.stack(self._steps)))
        self._steps.clear()
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


def _slowest(times: Tensor) -> tuple[int, str, str] | None:
    """Rank, cause and words of times, [steps, workers, 4]."""
    spent_s = times[..., : len(_KINDS)]
    busy_s = spent_s.sum(-1)  # what the others wait for
    of_workers_s = _median(busy_s, 0)
    rank = int(of_workers_s.argmax())
    num_run = times[..., len(_KINDS) + 1]
    are_used = (_median(num_run, 0) > 0).tolist()  # not where there are fewer micro-batches
    others = [r for r, is_used in enumerate(are_used) if is_used and r != rank]
    if not others:
        return None
    slow_s, usual_s = float(of_workers_s[rank]), float(_median(of_workers_s[others], 0))
    is_slow = busy_s[:, rank] > _SLOWER * _median(busy_s[:, others], 1)
    if not (slow_s > _SLOWER * usual_s and slow_s - usual_s > _LEAST_S):
        return None
    if is_slow.sum() < _FEW_TIMES * len(times):
        return None
    of_one_s = _median(busy_s / num_run.clamp(min=1), 0)
    if not of_one_s[rank] > _SLOWER * _median(of_one_s[others], 0):  # it has more of them
        return None
    spent_s = _median(spent_s, 0)
    own_s, usual_spent_s = spent_s[rank], _median(spent_s[others], 0)
    kind = int((own_s - usual_spent_s).argmax())
    factor = slow_s / usual_s if usual_s else float("inf")
    return (
        rank,
        _KINDS[kind],
        f"rank {rank} is {factor:.1f}x slower than the median: {_KINDS[kind]},"
        f" {1000 * own_s[kind]:.0f} ms a step, not {1000 * usual_spent_s[kind]:.0f}",
    )


def _median(x: Tensor, dim: int) -> Tensor:
    return x.quantile(0.5, dim)  # of an even number the mean of two; `median` takes one of them
