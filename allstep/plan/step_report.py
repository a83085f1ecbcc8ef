"""The result of a simulated step."""

from dataclasses import dataclass, field

from allstep.plan.phases import Traffic


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        lane: "compute", "wait" or "wire".
        name: what it was.
        start_s, end_s: of the slowest worker, from the beginning of the round.
    """

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step in the long run; of local SGD the mean over `sync_every` steps.

    Attributes:
        step_s: seconds from step to step.
        compute_s: seconds of one worker's compute if it had nothing to wait for.
        exposed_s: seconds in which even the slowest worker waits for the wire.
        straggler_s: seconds in which a worker waits for slower ones, in the mean.
        wire_s: seconds in which the wire is busy.
        traffic: what rank 0 sends in one exchange.
        timeline: of the last exchange and the compute before it.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    straggler_s: float
    wire_s: float
    traffic: Traffic
    timeline: tuple[Span, ...] = field(repr=False)

    @property
    def efficiency(self) -> float:
        """Share of the step that a single worker would need."""
        return self.compute_s / self.step_s

    @property
    def exchange_share(self) -> float:
        """Share of the step that the exchange adds: waits, copies, and slower compute beside it."""
        return max(0.0, 1 - (self.compute_s + self.straggler_s) / self.step_s)
