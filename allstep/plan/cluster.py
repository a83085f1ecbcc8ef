"""Where workers sit and what joins them: a cluster as a handful of numbers."""

import math
from dataclasses import dataclass, replace
from numbers import Real

from allstep.errors import UsageError
from allstep.plan.measured_collective import MeasuredCollective

__all__ = ["Cluster", "Link"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message costs: seconds = latency_s + 8 * num_bytes / bandwidth_bps.

    Args:
        bandwidth_bps: bits per second in each direction at once, as achieved, not as sold.
        latency_s: seconds of an empty message.

    Raises:
        UsageError: for a bandwidth that isn't positive or a latency that is negative.

    >>> Link(bandwidth_bps=10e9, latency_s=30e-6).seconds(1_250_000)
    0.00103
    """

    bandwidth_bps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("bandwidth_bps", self.bandwidth_bps, "10e9 is 10 Gbit/s")
        check_not_negative("latency_s", self.latency_s, "30e-6 is usual for Ethernet")

    def seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        """Seconds of messages sent one after the other.

        num_messages * latency_s + 8 * num_bytes / bandwidth_bps

        Args:
            num_bytes: of all messages together.
            num_messages: each of which takes the latency.

        Returns:
            Seconds until the last has arrived.
        """
        return num_messages * self.latency_s + 8 * num_bytes / self.bandwidth_bps


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes with equal workers.

    Args:
        name: for tables.
        num_nodes, workers_per_node: at least 1.
        intra: the link of each worker to its neighbours in the node.
        inter: the link of each *node* to the others, shared by its workers; None for one node.
        copy_bytes_per_s: memory bandwidth of a worker, in bytes copied.
        has_shared_memory: whether the workers of a node are CPU processes that share memory.
        samples_per_s: throughput of one worker on `workload`, where known.
        workload: what `samples_per_s` was measured on.
        compute_slowdown: how much longer compute takes while a worker communicates; 0.1 is 10 %.
        communication_slowdown: how much longer communication takes while workers compute.
        source: where the numbers come from, and how far they can be trusted.
        burst_s: by how many seconds a link may get ahead of its bandwidth while it is idle, as
            behind a token bucket of a cloud or a shaper; 0 for a plain cable.
        bucketing_s_per_byte: seconds of a worker's compute to copy a byte of the gradient into
            its bucket, or out of it.
        gradient_s: seconds of a worker's compute to take up a gradient, whatever its size.
        collectives: measured on all of these workers; they go before the formulas.

    Raises:
        UsageError: for numbers out of range or that contradict each other.
    """

    name: str
    num_nodes: int
    workers_per_node: int
    intra: Link
    inter: Link | None = None
    copy_bytes_per_s: float = 10e9
    has_shared_memory: bool = False
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
        for name in ("num_nodes", "workers_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"`{name}` (={value}) must be a whole number of at least 1.")
        check_positive("copy_bytes_per_s", self.copy_bytes_per_s, "10e9 is 10 GB/s")
        if self.samples_per_s is not None:
            check_positive("samples_per_s", self.samples_per_s, "leave it out if it isn't known")
        for name in ("compute_slowdown", "communication_slowdown"):
            check_not_negative(name, getattr(self, name), "0.1 means 10 % slower")
        for name in ("burst_s", "bucketing_s_per_byte", "gradient_s"):
            check_not_negative(name, getattr(self, name), "0 if it isn't known")
        if self.num_nodes > 1 and self.inter is None:
            raise UsageError(
                f"`inter` is missing, but `num_nodes` is {self.num_nodes}:"
                " say what joins the nodes, or give one node."
            )

    @property
    def num_workers(self) -> int:
        """Workers of the whole cluster."""
        return self.num_nodes * self.workers_per_node

    @property
    def reduce_s_per_byte(self) -> float:
        """Seconds to add a byte to another: two are read and one is written."""
        return 1.5 / self.copy_bytes_per_s

    def of(self, num_workers: int, *, argument: str = "num_workers") -> "Cluster":
        """The part that `num_workers` fill, node by node.

        Args:
            num_workers: 1 to all of them; beyond one node a multiple of `workers_per_node`.
            argument: what the caller names it, for messages.

        Raises:
            UsageError: if there aren't as many, or they would leave a node half filled.

        >>> node = Link(bandwidth_bps=80e9)
        >>> four = Cluster(name="four", num_nodes=4, workers_per_node=8, intra=node, inter=node)
        >>> four.of(16).num_nodes, four.of(4).workers_per_node
        (2, 4)
        """
        if not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(f"`{argument}` (={num_workers}) must be a whole number of at least 1.")
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
        """What was measured of a format and an algorithm, if anything was."""
        wanted = (compression, algorithm)
        return next((c for c in self.collectives if (c.compression, c.algorithm) == wanted), None)


def check_positive(name: str, value: float, example: str) -> None:
    """Refuses zero, negative and infinite values, NaN and what is no number."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise UsageError(f"`{name}` (={value}) must be above 0 and finite; {example}.")


def check_not_negative(name: str, value: float, example: str) -> None:
    """Refuses negative and infinite values, NaN and what is no number."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise UsageError(f"`{name}` (={value}) must be 0 or more, and finite; {example}.")


def _is_number(value: object) -> bool:
    """Whether it can be compared with one; what comes out of a file may be anything."""
    return isinstance(value, Real) and not isinstance(value, bool)
