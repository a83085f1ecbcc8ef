"""When the wire is busy, and how far compute gets meanwhile."""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Activity:
    """Intervals in which the wire is busy, one after the other, and compute is slower for it.

    [Note: progress] Compute progresses along a broken line through time: by a second in a second
    while the wire is idle, by less while it is busy. Work is a step up along that line, so that
    whoever keeps progress instead of time just adds. What lies ahead counts as idle until an
    interval is put there; that may only be after everyone's present, or progress made already
    would change.

    """

    _times: list[float] = field(default_factory=lambda: [0.0], init=False)
    _progress: list[float] = field(default_factory=lambda: [0.0], init=False)

    @property
    def free_s(self) -> float:
        """When the wire is free again."""
        return self._times[-1]

    def occupy(self, start_s: float, end_s: float, slowdown: float = 0.0) -> None:
        """Adds an interval after all others, in which compute takes longer by `slowdown`."""
        assert self.free_s <= start_s <= end_s
        before = self._progress[-1] + (start_s - self.free_s)
        self._times += [start_s, end_s]
        self._progress += [before, before + (end_s - start_s) / (1 + slowdown)]

    def forget_before(self, progress: float) -> None:
        """Drops the intervals that everyone's progress has left behind."""
        num_old = max(0, min(bisect_right(self._progress, progress), len(self._times)) - 1)
        del self._times[:num_old], self._progress[:num_old]

    def progress_at(self, time_s: float) -> float:
        """How far compute without pause is at a time."""
        return _interpolate(time_s, self._times, self._progress)

    def time_at(self, progress: float) -> float:
        """When compute without pause is that far.

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
    """Along a broken line that goes on with slope 1 at both ends."""
    index = bisect_right(xs, x)
    if index in (0, len(xs)):
        end = min(index, len(xs) - 1)
        return ys[end] + (x - xs[end])
    x0, x1, y0, y1 = xs[index - 1], xs[index], ys[index - 1], ys[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
