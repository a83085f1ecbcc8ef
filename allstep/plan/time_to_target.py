"""What a larger batch costs in samples: epochs and time to the same quality.

(S / S_min - 1) (E / E_min - 1) = 1

for S steps and E samples: at the batch B_crit = E_min / S_min both are twice their minimum.
"""

from dataclasses import dataclass

from allstep.errors import check_positive
from allstep.plan.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class Target:
    """A quality that is reached after `num_samples` samples with `known_batch`.

    Args:
        critical_batch: B_crit in samples; the noise scale is an estimate of it, within a factor
            of three for most tasks of McCandlish et al., but far off for autoencoders.
        num_samples: samples to the target at `known_batch`.
        known_batch: the batch at which they were counted.

    Raises:
        UsageError: for numbers that aren't positive.

    >>> target = Target(critical_batch=1000, num_samples=110_000, known_batch=100)
    >>> round(target.samples(1000)), round(target.steps(1000))  # both twice their least
    (200000, 200)
    >>> round(target.min_samples), round(target.min_steps)
    (100000, 100)

    Source: McCandlish et al., 2018, arXiv:1812.06162, equation 2.11 and section 2.3.
    """

    critical_batch: float
    num_samples: float = 1.0
    known_batch: float = 1.0

    def __post_init__(self) -> None:
        check_positive("critical_batch", self.critical_batch, "2000 is usual for small pictures")
        check_positive("num_samples", self.num_samples, "epochs times samples of the training set")
        check_positive("known_batch", self.known_batch, "the batch that reached the target")

    @property
    def min_samples(self) -> float:
        """Samples that a tiny batch would take."""
        return self.num_samples / (1 + self.known_batch / self.critical_batch)

    @property
    def min_steps(self) -> float:
        """Steps that a huge batch would take."""
        return self.min_samples / self.critical_batch

    def samples(self, batch: float) -> float:
        """Samples to the target at a batch."""
        return self.min_samples * (1 + batch / self.critical_batch)

    def steps(self, batch: float) -> float:
        """Steps to the target at a batch."""
        return self.samples(batch) / batch

    def seconds(self, prediction: Prediction) -> float:
        """Seconds to the target at a prediction's batch and speed."""
        return self.samples(prediction.global_batch) / prediction.samples_per_s

    def speed_up(self, prediction: Prediction) -> float:
        """One worker's time to the target divided by the prediction's."""
        lone_s = (
            self.samples(prediction.single_worker_batch) / prediction.single_worker_samples_per_s
        )
        return lone_s / self.seconds(prediction)
