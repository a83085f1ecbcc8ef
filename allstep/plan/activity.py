"""Keeps track of when the network is busy, and of the progress of compute meanwhile."""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Activity:
    """Successive intervals in which the network is busy and compute is slower for it.

    [Note: progress] The progress of compute is a piecewise linear function of time: it grows by a
    second per second while the network is idle, and by less while it is busy. Work adds its seconds
    to a worker's progress, so a clock that keeps progress instead of time only has to add. The
    network counts as idle after the last interval. A new interval may only begin after the present
    of every worker: otherwise, progress that has been made already would change.

    """

    _times: list[float] = field(default_factory=lambda: [0.0], init=False)
    _progress: list[float] = field(default_factory=lambda: [0.0], init=False)

    @property
    def free_s(self) -> float:
        """The time at which the network is free again."""
        return self._times[-1]

    def occupy(self, start_s: float, end_s: float, slowdown: float = 0.0) -> None:
        """Adds an interval after the last, in which compute takes 1 + `slowdown` times as long."""
        assert self.free_s <= start_s <= end_s
        before = self._progress[-1] + (start_s - self.free_s)
        self._times += [start_s, end_s]
        self._progress += [before, before + (end_s - start_s) / (1 + slowdown)]

    def forget_before(self, progress: float) -> None:
        """Drops the intervals that end before `progress`, which every worker has reached."""
        num_old = max(0, min(bisect_right(self._progress, progress), len(self._times)) - 1)
        del self._times[:num_old], self._progress[:num_old]

    def progress_at(self, time_s: float) -> float:
        """The progress that compute without pauses has reached at a time."""
        return _interpolate(time_s, self._times, self._progress)

    def time_at(self, progress: float) -> float:
        """The time at which compute without pauses reaches `progress`.

        >>> wire = Activity()
        >>> wire.occupy(1.0, 3.0, slowdown=1.0)
        >>> [wire.time_at(progress) for progress in (0.5, 1.5, 3.0)]
        [0.5, 2.0, 4.0]
        """
        return _interpolate(progress, self._progress, self._times)

    def times_at(self, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """`time_at`, elementwise."""
        ahead = max(0.0, float(progress.max()) - self._progress[-1]) + 1.0
        return np.interp(
            progress,
            [*self._progress, self._progress[-1] + ahead],
            [*self._times, self.free_s + ahead],
        )


def _interpolate(x: float, xs: list[float], ys: list[float]) -> float:
    """The value at `x` of a piecewise linear function that goes on with slope 1 at both ends."""
    index = bisect_right(xs, x)
    if index in (0, len(xs)):
        end = min(index, len(xs) - 1)
        return ys[end] + (x - xs[end])
    x0, x1, y0, y1 = xs[index - 1], xs[index], ys[index - 1], ys[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
