"""The gradient noise scale: the batch up to which more samples per step save steps."""

import math
from typing import Any

from allstep.errors import UsageError, check_not_negative, check_positive, check_share


def noise_and_signal(
    *,
    micro_squared_norm: float,
    global_squared_norm: float,
    micro_batch: float,
    global_batch: float,
) -> tuple[float, float]:
    """Unbiased estimates of tr(Sigma) and |G|^2 from one step.

    E |g_b|^2 = |G|^2 + tr(Sigma) / b for the gradient g_b of any b samples, so that two batch
    sizes give two equations:

    noise = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)
    signal = (B |g_B|^2 - b |g_b|^2) / (B - b)

    Args:
        micro_squared_norm: |g_b|^2, squared norm of a micro-batch's mean gradient; the mean over
            several micro-batches of the step makes it less noisy.
        global_squared_norm: |g_B|^2, squared norm of the step's mean gradient.
        micro_batch, global_batch: the batch sizes b < B in samples.

    Returns:
        noise and signal; either may be negative by chance.

    Raises:
        UsageError: if a norm is negative or not finite, or b is not below B.

    >>> noise_and_signal(
    ...     micro_squared_norm=9.0, global_squared_norm=2.0, micro_batch=1, global_batch=8)
    (8.0, 1.0)

    Source: McCandlish et al., 2018, arXiv:1812.06162, appendix A.1.
    """
    check_not_negative("micro_squared_norm", micro_squared_norm, "skip such a step")
    check_not_negative("global_squared_norm", global_squared_norm, "skip such a step")
    check_positive("micro_batch", micro_batch, "it counts samples")
    if not micro_batch < global_batch:
        raise UsageError(
            f"`micro_batch` (={micro_batch}) must be below `global_batch` (={global_batch}):"
            " one micro-batch a step shows no noise; use a smaller one."
        )
    noise = (micro_squared_norm - global_squared_norm) / (1 / micro_batch - 1 / global_batch)
    signal = (global_batch * global_squared_norm - micro_batch * micro_squared_norm) / (
        global_batch - micro_batch
    )
    return noise, signal


class NoiseScale:
    """B_simple = tr(Sigma) / |G|^2, with numerator and denominator averaged separately.

    The mean of ratios would be biased, and infinite now and then. Up to about B_simple samples
    per step, twice the batch takes nearly half the steps; far beyond it, as many steps.

    Args:
        decay: decay per update of the exponential averages: 0.99 averages over about 100 updates.
            None gives all updates the same weight. The noise scale grows during training, so a long
            run needs a decay.

    Raises:
        UsageError: if `decay` is not between 0 and 1.

    >>> scale = NoiseScale()
    >>> scale.update(
    ...     micro_squared_norm=9.0, global_squared_norm=2.0, micro_batch=1, global_batch=8)
    >>> scale.value
    8.0

    Source: McCandlish et al., 2018, arXiv:1812.06162, section 2.2 and appendix A.1.
    """

    def __init__(self, decay: float | None = None) -> None:
        if decay is not None:
            check_share("decay", decay, "(0, 1)", "0.99 is usual")
        self._decay = decay
        self._num_updates = 0
        self._noise = 0.0
        self._signal = 0.0

    def update(
        self,
        *,
        micro_squared_norm: float,
        global_squared_norm: float,
        micro_batch: float,
        global_batch: float,
    ) -> None:
        """Adds a step to the averages; arguments and errors are those of `noise_and_signal`."""
        noise, signal = noise_and_signal(
            micro_squared_norm=micro_squared_norm,
            global_squared_norm=global_squared_norm,
            micro_batch=micro_batch,
            global_batch=global_batch,
        )
        self._num_updates += 1
        weight = self._weight()
        self._noise += weight * (noise - self._noise)
        self._signal += weight * (signal - self._signal)

    def _weight(self) -> float:
        """The weight of the newest step: 1 / n, or with a decay Adam's bias-corrected weight."""
        if self._decay is None:
            return 1 / self._num_updates
        return (1 - self._decay) / (1 - self._decay**self._num_updates)

    @property
    def num_updates(self) -> int:
        """Number of steps in the averages."""
        return self._num_updates

    @property
    def value(self) -> float | None:
        """The noise scale in samples; inf if the signal isn't positive; None before any update."""
        if not self._num_updates:
            return None
        if self._signal <= 0:
            return math.inf
        return max(0.0, self._noise) / self._signal

    def summary(self, micro_batch: int) -> str:
        """The noise scale as a sentence for users.

        Args:
            micro_batch: samples of a worker's pass through the model.

        >>> scale = NoiseScale()
        >>> scale.update(micro_squared_norm=3.0, global_squared_norm=1.0,
        ...     micro_batch=1000, global_batch=4000)
        >>> scale.summary(32)
        'useful up to about B = 8,000, that is 250 workers of 32'
        """
        value = self.value
        if value is None:
            return "the noise scale has not been measured yet"
        if value == math.inf:
            return "the gradient is all noise so far: no useful limit of the batch can be given"
        batch = round_to_two_digits(value)
        if not batch:
            return "no noise was seen so far: a larger batch would save no steps"
        num_workers = int(batch // micro_batch)
        if num_workers <= 1:
            return f"useful up to about B = {batch:,}: one worker of {micro_batch} is enough"
        return f"useful up to about B = {batch:,}, that is {num_workers:,} workers of {micro_batch}"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {
            "decay": self._decay,
            "num_updates": self._num_updates,
            "noise": self._noise,
            "signal": self._signal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            UsageError: if it was averaged with another decay.
        """
        if state["decay"] != self._decay:
            raise UsageError(
                f"`decay` (={self._decay}) differs from the checkpoint's ({state['decay']});"
                " use that one, or start the estimate afresh."
            )
        self._num_updates = int(state["num_updates"])
        self._noise = float(state["noise"])
        self._signal = float(state["signal"])


def round_to_two_digits(value: float) -> int:
    """The nearest integer with at most two significant digits.

    >>> round_to_two_digits(1987.6), round_to_two_digits(31.4), round_to_two_digits(0.2)
    (2000, 31, 0)
    """
    whole = round(value)
    return round(whole, 2 - len(str(whole)))
