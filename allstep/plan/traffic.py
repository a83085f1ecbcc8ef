"""What each all-reduce algorithm sends: exact bytes and messages of one worker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allstep.errors import UsageError, nearest_names

__all__ = ["ALGORITHMS", "Group", "Traffic", "all_reduce_traffic", "split_evenly"]


@dataclass(frozen=True)
class Traffic:
    """What a worker sends.

    >>> Traffic(10, 1) + Traffic(5, 2)
    Traffic(sent_bytes=15, num_messages=3)
    """

    sent_bytes: int = 0
    num_messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent_bytes + other.sent_bytes, self.num_messages + other.num_messages)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A worker's place among `num_nodes` x `local_size` workers, counted node by node."""

    rank: int
    local_size: int
    num_nodes: int = 1

    @property
    def size(self) -> int:
        """All workers."""
        return self.local_size * self.num_nodes

    @property
    def local_rank(self) -> int:
        """The place in the node."""
        return self.rank % self.local_size

    @property
    def node_rank(self) -> int:
        """The node's number."""
        return self.rank // self.local_size


def all_reduce_traffic(
    algorithm: str, group: Group, num_elements: int, element_bytes: int
) -> Traffic:
    """What one worker sends in an all-reduce.

    Args:
        algorithm: one of `ALGORITHMS`.
        group: the worker's place.
        num_elements: of the tensor that is summed.
        element_bytes: bytes of each on the wire.

    Raises:
        UsageError: for an unknown algorithm.

    >>> all_reduce_traffic("ring", Group(rank=0, local_size=4), 1000, 4)
    Traffic(sent_bytes=6000, num_messages=6)
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"`algorithm` (={algorithm!r}): {nearest_names(algorithm, ALGORITHMS)}")
    if group.size == 1:
        return Traffic()
    elements = ALGORITHMS[algorithm](group, num_elements)
    return Traffic(elements.sent_bytes * element_bytes, elements.num_messages)


def split_evenly(num_elements: int, parts: int) -> list[int]:
    """Sizes of `torch.tensor_split` and `numpy.array_split`.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    return [_chunk(num_elements, parts, index) for index in range(parts)]


def _chunk(num_elements: int, parts: int, index: int) -> int:
    return num_elements // parts + (index % parts < num_elements % parts)


def _ring(group: Group, num_elements: int) -> Traffic:
    """All chunks but one, twice: rank r never sends chunk r + 1, then never chunk r + 2."""
    size = group.size
    missing = sum(_chunk(num_elements, size, group.rank + offset) for offset in (1, 2))
    return Traffic(2 * num_elements - missing, 2 * (size - 1))


def _halving_doubling(group: Group, num_elements: int) -> Traffic:
    """Halves to ever nearer partners and back; ranks beyond the power of two fold in first."""
    size, rank = group.size, group.rank
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        return Traffic(num_elements, 1)
    folded = Traffic(num_elements, 1) if rank < size - power else Traffic()
    halving, length = Traffic(), num_elements
    kept = []
    distance = power // 2
    while distance:
        low = _chunk(length, 2, 0)
        keeps_low = not rank & distance
        sent = length - low if keeps_low else low
        length -= sent
        kept.append(length)
        halving += Traffic(sent, 1)
        distance //= 2
    doubling = sum((Traffic(length, 1) for length in kept), start=Traffic())
    return folded + halving + doubling


def _hierarchical(group: Group, num_elements: int) -> Traffic:
    """Everything to the node's leader, around the ring of leaders, and back from it."""
    if group.local_rank:
        return Traffic(num_elements, 1)
    others = group.local_size - 1
    leaders = Group(rank=group.node_rank, local_size=group.num_nodes)
    between = _ring(leaders, num_elements) if group.num_nodes > 1 else Traffic()
    return Traffic(others * num_elements, others) + between


def _two_dimensional(group: Group, num_elements: int) -> Traffic:
    """A ring in the node on everything, and one between nodes on the chunk that is left."""
    inside = Group(rank=group.local_rank, local_size=group.local_size)
    across = Group(rank=group.node_rank, local_size=group.num_nodes)
    own = _chunk(num_elements, group.local_size, group.local_rank + 1)
    total = Traffic()
    if inside.size > 1:
        total += _ring(inside, num_elements)
    if across.size > 1:
        total += _ring(across, own)
    return total


def _shared_memory(group: Group, num_elements: int) -> Traffic:
    """Nothing inside a node; leaders go around their ring."""
    if group.local_rank or group.num_nodes == 1:
        return Traffic()
    return _ring(Group(rank=group.node_rank, local_size=group.num_nodes), num_elements)


ALGORITHMS: Mapping[str, Callable[[Group, int], Traffic]] = {
    "native": _ring,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "hierarchical": _hierarchical,
    "two_dimensional": _two_dimensional,
    "shared_memory": _shared_memory,
}
