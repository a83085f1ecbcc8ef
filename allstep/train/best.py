"""The best evaluation of a run by one of its metrics, and when to stop waiting for a better one."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from allstep.errors import UsageError, check_integer, nearest_names
from allstep.train.fitting import check_same


class BestMetric:
    """Follows one metric over a run's evaluations.

    It depends only on the evaluations' results, which are the same on every worker; so all workers
    choose the same best step and stop at the same step.

    Args:
        metric: name of the metric in the evaluation's results.
        mode: "max" if the largest value is best, "min" if the smallest is.
        patience: evaluations in a row without an improvement after which training stops; None for
            never.
        min_delta: smallest difference that counts as an improvement for `patience`; the best
            checkpoint is replaced at any better value.

    Attributes:
        value: the best value so far; None before the first that is a number.
        step: number of optimizer steps made when it was measured.

    Raises:
        UsageError: if an argument is out of range.

    >>> best = BestMetric("accuracy", "max", patience=2)
    >>> for step, accuracy in enumerate([0.5, 0.7, 0.6, 0.7]):
    ...     is_best = best.update(step, {"accuracy": accuracy})
    >>> best.step, best.value, best.is_exhausted
    (1, 0.7, True)
    """

    def __init__(
        self, metric: str, mode: str, *, patience: int | None = None, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(
                f"`best_mode` (={mode}) must be 'max' if more of `best_metric` (={metric}) is"
                " better, or 'min' if less is."
            )
        if patience is not None:
            check_integer("patience", patience, cure="leave it out to train all epochs")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"`min_delta` (={min_delta}) must be a number of 0 or more.")
        self.metric, self.patience = metric, patience
        self.value: float | None = None
        self.step: int | None = None
        self._mode, self._min_delta = mode, min_delta
        self._reference: float | None = None  # value of the last improvement
        self._num_without_gain = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether `patience` evaluations in a row brought no improvement."""
        return self.patience is not None and self._num_without_gain >= self.patience

    @property
    def summary(self) -> str:
        """The best value and its step, in words."""
        if self.step is None:
            return f"{self.metric} was never a number"
        return f"{self.metric} {self.value:.4f} at step {self.step}"

    def check_names(self, names: Iterable[str]) -> None:
        """Raises UsageError if the metric is not among `names`."""
        names = list(names)
        if self.metric not in names:
            cure = nearest_names(self.metric, names) if names else "it gives none."
            raise UsageError(
                f"`best_metric` (={self.metric!r}) is no metric of the evaluation; {cure}"
            )

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Records an evaluation; returns whether it is the best so far.

        NaN is never better, and counts as an evaluation without an improvement.

        Raises:
            UsageError: if the metric is missing; names the metrics that are there.
        """
        self.check_names(metrics)
        value = float(metrics[self.metric])
        if self._is_better(value, self._reference, self._min_delta):
            self._reference, self._num_without_gain = value, 0
        else:
            self._num_without_gain += 1
        is_best = self._is_better(value, self.value)
        if is_best:
            self.value, self.step = value, step
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decision depends on, except `patience` and `min_delta`."""
        return {
            "best_metric": self.metric,
            "best_mode": self._mode,
            "value": self.value,
            "step": self.step,
            "reference": self._reference,
            "num_without_gain": self._num_without_gain,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned.

        Raises:
            CheckpointError: if it was saved for another metric, whose values can't be compared.
        """
        self.take_saved(state)
        self._reference = state["reference"]
        self._num_without_gain = state["num_without_gain"]

    def take_saved(self, state: Mapping[str, Any] | None) -> None:
        """Takes value and step from the best checkpoint, which may be later than the newest one.

        A resumed run must improve on the checkpoint that is on the disk; `patience` is counted from
        `load_state_dict` only, so that the run stops where an uninterrupted one does.

        Args:
            state: what `state_dict` returned for it; None if there is no best checkpoint.

        Raises:
            CheckpointError: if it was saved for another metric.
        """
        if state is None:
            self.value = self.step = None
            return
        check_same(state, {"best_metric": self.metric, "best_mode": self._mode})
        self.value, self.step = state["value"], state["step"]

    def _is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        if than is None:
            return not math.isnan(value)
        return value > than + by if self._mode == "max" else value < than - by
