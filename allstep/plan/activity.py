"""When the wire is busy, and how far compute gets meanwhile."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Activity"]


@dataclass
class Activity:
    """Intervals in which the wire is busy, one after the other, and compute is slower for it.

    Args:
        slowdown: how much longer compute takes while the wire is busy.
    """

    slowdown: float = 0.0
    _times: list[float] = field(default_factory=lambda: [0.0], init=False)
    _progress: list[float] = field(default_factory=lambda: [0.0], init=False)

    @property
    def free_s(self) -> float:
        """When the wire is free again."""
        return self._times[-1]

    def occupy(self, start_s: float, end_s: float) -> None:
        """Adds an interval after all others."""
        assert self.free_s <= start_s <= end_s
        lead_s = start_s - self.free_s
        self._times += [start_s, end_s]
        before = self._progress[-1] + lead_s
        self._progress += [before, before + (end_s - start_s) / (1 + self.slowdown)]

    def forget_before(self, time_s: float) -> None:
        """Drops intervals that ended before `time_s`, when no worker is there any more."""
        num_old = int(np.searchsorted(self._times, time_s, side="right")) - 1
        num_old = min(max(num_old, 0), len(self._times) - 1)
        del self._times[:num_old], self._progress[:num_old]

    def finish(
        self, start_s: NDArray[np.float64], work_s: NDArray[np.float64] | float
    ) -> NDArray[np.float64]:
        """When work that takes `work_s` on an idle wire is done; elementwise.

        Progress is a broken line through time: steep while the wire is idle, flatter while it
        is busy. Work is a step up along it.

        >>> wire = Activity(slowdown=1.0)
        >>> wire.occupy(1.0, 3.0)
        >>> wire.finish(np.array([0.0, 2.0, 5.0]), 1.5)
        array([2. , 4. , 6.5])
        """
        if not self.slowdown:
            return start_s + work_s
        # Beyond the last interval the wire is idle, as far as is known.
        far_s = 1.0 + max(float(start_s.max()) - self.free_s, 0.0) + float(np.max(work_s))
        times = [*self._times, self.free_s + far_s]
        progress = [*self._progress, self._progress[-1] + far_s]
        target = np.interp(start_s, times, progress) + work_s
        return np.interp(target, progress, times)
