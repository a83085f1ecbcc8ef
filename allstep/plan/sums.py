"""How much the busiest worker adds up in an all-reduce."""

from collections.abc import Callable, Mapping

from allstep.plan.cluster import Cluster
from allstep.plan.traffic import ALGORITHMS

__all__ = ["num_sums"]


def num_sums(algorithm: str, cluster: Cluster) -> float:
    """How often the busiest worker adds a whole tensor's bytes to others.

    Args:
        algorithm: one of `ALGORITHMS`.
        cluster: all of it takes part.

    >>> from allstep.plan.cluster import Link
    >>> eight = Cluster(name="", num_nodes=1, workers_per_node=8, intra=Link(bandwidth_bps=80e9))
    >>> num_sums("ring", eight), num_sums("hierarchical", eight)
    (0.875, 7.0)
    """
    return _SUMS[algorithm](cluster)


def _own_part(size: int) -> float:
    """Of `size` workers each adds up an equal part."""
    return (size - 1) / size


def _divided(cluster: Cluster) -> float:
    return _own_part(cluster.num_workers)


def _halving_doubling(cluster: Cluster) -> float:
    power, num_folds = _power_and_folds(cluster.num_workers)
    return _own_part(power) + num_folds


def _recursive_doubling(cluster: Cluster) -> float:
    power, num_folds = _power_and_folds(cluster.num_workers)
    return power.bit_length() - 1 + num_folds


def _power_and_folds(size: int) -> tuple[int, int]:
    """The largest power of two, and 1 if there are workers beyond, whose tensors come first."""
    power = 1 << (size.bit_length() - 1)
    return power, int(power < size)


def _hierarchical(cluster: Cluster) -> float:
    """Without shared memory the node's first worker adds all the others' tensors."""
    local = cluster.workers_per_node
    inside = _own_part(local) if cluster.has_shared_memory else local - 1
    return inside + _own_part(cluster.num_nodes)


_SUMS: Mapping[str, Callable[[Cluster], float]] = {
    "native": _divided,
    "ring": _divided,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "hierarchical": _hierarchical,
    "two_dimensional": _divided,
    "shared_memory": _divided,
    "dummy": lambda cluster: 0,
}
assert set(_SUMS) == set(ALGORITHMS)
