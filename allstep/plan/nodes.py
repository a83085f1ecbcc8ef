"""Nodes, their workers and the links between them."""

from dataclasses import dataclass

from allstep.errors import UsageError, check_integer, check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link, where a message takes latency_s + 8 * num_bytes / bandwidth_bps seconds.

    Args:
        bandwidth_bps: bits per second in both directions at the same time, as achieved, not as
            sold.
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
            num_bytes: total size of all messages.
            num_messages: number of messages.

        Returns:
            Seconds until the last message has arrived.
        """
        return num_messages * self.latency_s + 8 * num_bytes / self.bandwidth_bps


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Equal nodes with equal workers, described by what the cost of an all-reduce depends on.

    Args:
        num_nodes, workers_per_node: number of nodes, and of workers on each; at least 1.
        intra: the link of each worker to its neighbours in the node.
        inter: the link of each *node* to the others, shared by its workers; None for one node.
        copy_bytes_per_s: memory bandwidth of a worker, in bytes copied per second.
        has_shared_memory: whether the workers of a node are CPU processes that share memory.

    Raises:
        UsageError: for numbers that are out of range or contradict each other.
    """

    num_nodes: int
    workers_per_node: int
    intra: Link
    inter: Link | None = None
    copy_bytes_per_s: float = 10e9
    has_shared_memory: bool = False

    def __post_init__(self) -> None:
        for name in ("num_nodes", "workers_per_node"):
            check_integer(name, getattr(self, name))
        check_positive("copy_bytes_per_s", self.copy_bytes_per_s, "10e9 is 10 GB/s")
        if self.num_nodes > 1 and self.inter is None:
            raise UsageError(
                f"`inter` is missing, but `num_nodes` is {self.num_nodes}:"
                " say what joins the nodes, or give one node."
            )

    @property
    def num_workers(self) -> int:
        """Number of workers on all nodes."""
        return self.num_nodes * self.workers_per_node

    @property
    def between(self) -> Link | None:
        """The link between nodes; None if there is only one node."""
        return self.inter if self.num_nodes > 1 else None

    @property
    def reduce_s_per_byte(self) -> float:
        """Seconds per byte of an addition, which reads two bytes and writes one."""
        return 1.5 / self.copy_bytes_per_s
