"""A cluster in figures: its nodes, its speed, and what was measured on it."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_integer, check_not_negative, check_positive
from allstep.plan.measured_collective import MeasuredCollective
from allstep.plan.nodes import Nodes


@dataclass(frozen=True, kw_only=True)
class Cluster(Nodes):
    """Equal nodes with equal workers, how fast they are, and what slows them.

    Args:
        name: name to show in tables.
        num_nodes, workers_per_node, intra, inter, copy_bytes_per_s, has_shared_memory: as in
            `Nodes`.
        samples_per_s: throughput of one worker on `workload`; None if it is unknown.
        workload: description of the training on which `samples_per_s` was measured.
        compute_slowdown: how much longer compute takes while a worker communicates; 0.1 is 10 %.
        communication_slowdown: how much longer communication takes while workers compute.
        source: where the numbers come from, and how far they can be trusted.
        burst_s: seconds of credit that an idle link may collect, to exceed its bandwidth
            afterwards, as with the token bucket of a cloud or of a traffic shaper; 0 for a plain
            cable.
        bucketing_s_per_byte: seconds of a worker's compute to copy a byte of the gradient into
            its bucket, or out of it.
        gradient_s: seconds of a worker's compute to handle a gradient, whatever its size.
        collectives: times measured on all of these workers; they take precedence over formulas.

    Raises:
        UsageError: for numbers that are out of range or contradict each other.
    """

    name: str
    samples_per_s: float | None = None
    workload: str = ""
    compute_slowdown: float = 0.0
    communication_slowdown: float = 0.0
    source: str = ""
    burst_s: float = 0.0
    bucketing_s_per_byte: float = 0.0
    gradient_s: float = 0.0
    collectives: tuple[MeasuredCollective, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_s is not None:
            check_positive("samples_per_s", self.samples_per_s, "leave it out if it isn't known")
        for name in ("compute_slowdown", "communication_slowdown"):
            check_not_negative(name, getattr(self, name), "0.1 means 10 % slower")
        for name in ("burst_s", "bucketing_s_per_byte", "gradient_s"):
            check_not_negative(name, getattr(self, name), "0 if it isn't known")

    def of(self, num_workers: int, *, argument: str = "num_workers") -> "Cluster":
        """The part of the cluster that `num_workers` fill, node by node.

        Args:
            num_workers: number of workers; if more than one node, a multiple of `workers_per_node`.
            argument: the caller's name of `num_workers`, for error messages.

        Raises:
            UsageError: if the cluster has fewer workers, or they would fill a node in part only.

        >>> from allstep.plan.nodes import Link
        >>> node = Link(bandwidth_bps=80e9)
        >>> four = Cluster(name="four", num_nodes=4, workers_per_node=8, intra=node, inter=node)
        >>> four.of(16).num_nodes, four.of(4).workers_per_node
        (2, 4)
        """
        check_integer(argument, num_workers)
        if num_workers > self.num_workers:
            raise UsageError(
                f"`{argument}` (={num_workers}) exceeds the {self.num_workers} of cluster"
                f" {self.name} ({self.num_nodes} nodes x {self.workers_per_node})."
            )
        per_node = self.workers_per_node
        if num_workers == self.num_workers:
            return self
        part = replace(self, collectives=())  # they were measured on all workers
        if num_workers <= per_node:
            return replace(part, num_nodes=1, workers_per_node=num_workers)
        if num_workers % per_node:
            below = num_workers // per_node * per_node
            raise UsageError(
                f"`{argument}` (={num_workers}) must fill nodes of {per_node} workers;"
                f" nearest: {below}, {below + per_node}."
            )
        return replace(part, num_nodes=num_workers // per_node)

    def measured(self, compression: str, algorithm: str) -> MeasuredCollective | None:
        """The measurement of a format and an algorithm; None if there is none."""
        wanted = (compression, algorithm)
        return next((c for c in self.collectives if (c.compression, c.algorithm) == wanted), None)
