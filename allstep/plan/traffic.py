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
    """A worker's place among `num_nodes` x `local_size` workers, counted node by node.

    Attributes:
        rank: of the worker.
        local_size: workers of a node.
        num_nodes: all of `local_size` workers.
        has_shared_memory: whether a node's workers are CPU processes, which need no messages.
    """

    rank: int
    local_size: int
    num_nodes: int = 1
    has_shared_memory: bool = False

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
    if group.size == 1 or not num_elements:
        return Traffic()
    return ALGORITHMS[algorithm](group, num_elements, element_bytes)


def split_evenly(num_elements: int, parts: int) -> list[int]:
    """Sizes of `torch.tensor_split` and `numpy.array_split`.

    >>> split_evenly(10, 4)
    [3, 3, 2, 2]
    """
    return [_chunk(num_elements, parts, index) for index in range(parts)]


def _chunk(num_elements: int, parts: int, index: int) -> int:
    return num_elements // parts + (index % parts < num_elements % parts)


def _message(num_bytes: int) -> Traffic:
    """Empty messages are not sent."""
    return Traffic(num_bytes, 1) if num_bytes else Traffic()


def _ring(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """All chunks but one, twice: rank r doesn't send chunk r + 1, and then not chunk r + 2."""
    num_filled = min(num_elements, group.size)
    kept = [_chunk(num_elements, group.size, group.rank + offset) for offset in (1, 2)]
    return Traffic(
        (2 * num_elements - sum(kept)) * element_bytes,
        2 * num_filled - sum(chunk > 0 for chunk in kept),
    )


def _halving_doubling(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """Halves to ever nearer partners and back; ranks beyond the power of two fold in first."""
    size, rank = group.size, group.rank
    power = 1 << (size.bit_length() - 1)
    everything = _message(num_elements * element_bytes)
    if rank >= power:
        return everything
    total = everything if rank < size - power else Traffic()
    own, distance = num_elements, power // 2
    while distance:
        low, high = _chunk(own, 2, 0), _chunk(own, 2, 1)
        own, other = (high, low) if rank & distance else (low, high)
        total += _message(other * element_bytes) + _message(own * element_bytes)
        distance //= 2
    return total


def _recursive_doubling(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """All to each partner; ranks beyond the power of two fold in first."""
    size, rank = group.size, group.rank
    power = 1 << (size.bit_length() - 1)
    num_messages = 1 if rank >= power else power.bit_length() - 1 + (rank < size - power)
    return Traffic(num_messages * num_elements * element_bytes, num_messages)


def _hierarchical(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """To the node's first rank, between those, and back; nothing inside with shared memory."""
    everything = _message(num_elements * element_bytes)
    if group.local_rank:
        return Traffic() if group.has_shared_memory else everything
    inside = Traffic()
    if not group.has_shared_memory:
        inside = sum((everything for _ in range(group.local_size - 1)), start=inside)
    return inside + _across(group, num_elements, element_bytes)


def _two_dimensional(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """A ring in the node, and its sums across nodes."""
    inside = Group(rank=group.local_rank, local_size=group.local_size)
    own = _chunk(num_elements, group.local_size, group.local_rank + 1)
    total = _across(group, own, element_bytes)
    if inside.size > 1:
        total += _ring(inside, num_elements, element_bytes)
    return total


def _across(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    across = Group(rank=group.node_rank, local_size=group.num_nodes)
    return all_reduce_traffic("native", across, num_elements, element_bytes)


def _shared_memory(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    """Nothing on one node; the backend's own all-reduce where memory can't be shared."""
    if group.num_nodes == 1:
        return Traffic()
    return _ring(group, num_elements, element_bytes)


def _nothing(group: Group, num_elements: int, element_bytes: int) -> Traffic:
    return Traffic()


ALGORITHMS: Mapping[str, Callable[[Group, int, int], Traffic]] = {
    "native": _ring,  # backends don't tell; the least bytes that an algorithm can do with
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "hierarchical": _hierarchical,
    "two_dimensional": _two_dimensional,
    "shared_memory": _shared_memory,
    "dummy": _nothing,
}
