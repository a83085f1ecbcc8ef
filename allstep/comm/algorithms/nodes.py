"""Algorithms that use which ranks share a node."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from allstep.comm.algorithms.base import AllReduce, Messenger
from allstep.comm.algorithms.native import Native
from allstep.comm.algorithms.ring import Ring
from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory import NotShared, SharedBuffer
from allstep.device import is_accelerator
from allstep.errors import UsageError


class _OverNodes(AllReduce):
    """The base of both: groups of the ranks in this node and of ranks across nodes.

    Args:
        comm: the workers.
        across: color of this rank's group across nodes; None for a rank in none.
        inner: function that makes the algorithm across nodes from a group.
    """

    def __init__(
        self,
        comm: WorkerGroup,
        across: int | None,
        inner: Callable[[WorkerGroup], AllReduce],
    ) -> None:
        super().__init__(comm)
        inside, outside = comm.split(comm.node_rank), comm.split(across)
        assert inside is not None
        self._groups = [group for group in (inside, outside) if group is not None]
        self._inside = inside
        self._across = None if outside is None else inner(outside)

    @property
    def _parts(self) -> list[AllReduce]:
        return [] if self._across is None else [self._across]

    def _note_meeting(self) -> None:
        super()._note_meeting()
        for group in self._groups:
            group.wire.names.last_call = "all_reduce"

    def close(self) -> None:
        super().close()
        for group in self._groups:
            group.close()

    def abort(self) -> None:
        for group in self._groups:
            group.abort()
        super().abort()


class Hierarchical(_OverNodes):
    """Sums within each node, then between the nodes' first ranks, then sends the sum to the others.

    Only one rank per node uses the network. Within a node CPU ranks share memory; other ranks send
    to the first one, which adds in the order of ranks (half precision in float32).

    Args:
        comm: the workers.
        inner: function that makes the algorithm between the nodes from a group.
        share_memory: False to send messages within a node even if memory could be shared.
    """

    name: ClassVar[str] = "hierarchical"

    def __init__(
        self,
        comm: WorkerGroup,
        inner: Callable[[WorkerGroup], AllReduce] = Native,
        *,
        share_memory: bool = True,
    ) -> None:
        super().__init__(comm, None if comm.local_rank else 0, inner)
        self._messenger = Messenger(self._inside)
        self._buffer = self._share() if share_memory else None

    def _share(self) -> SharedBuffer | None:
        if self._inside.size == 1:
            return None
        try:
            return SharedBuffer.create(self._inside)
        except NotShared as reason:
            if not is_accelerator(self.comm.device):
                reason.tell(self.comm.rank, "messages go inside a node too, not shared memory")
            return None

    def _reduce_(self, flat: Tensor) -> None:
        if self._buffer is None:
            self._reduce_to_first(flat)
        else:
            self._buffer.sum_(flat)
        if self._across is not None:
            self._across.reduce_(flat)
        if self._buffer is None:
            self._hand_out(flat)
        elif self.comm.num_nodes > 1:
            self._buffer.broadcast_(flat)

    def _reduce_to_first(self, flat: Tensor) -> None:
        """Adds up this node's tensors on its first rank."""
        if self._inside.rank:
            self._messenger.send(flat, 0).wait()
            return
        total = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        arrived = torch.empty_like(flat)
        for other in range(1, self._inside.size):
            self._messenger.recv(arrived, other).wait()
            total.add_(arrived)
        flat.copy_(total)

    def _hand_out(self, flat: Tensor) -> None:
        """Sends the first rank's values to the node's other ranks."""
        if self._inside.rank:
            self._messenger.recv(flat, 0).wait()
            return
        posted = [self._messenger.send(flat, other) for other in range(1, self._inside.size)]
        for message in posted:
            message.wait()

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        super().close()


class TwoDimensional(_OverNodes):
    """Reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

    All ranks use the network at the same time, each for its own part of the tensor; this helps
    where one connection can't fill a node's link.

    Args:
        comm: the workers, equally many on every node.
        inner: function that makes the algorithm across nodes, between ranks of equal local rank,
            from a group.

    Raises:
        UsageError: if nodes have different numbers of ranks.
    """

    name: ClassVar[str] = "two_dimensional"

    def __init__(
        self, comm: WorkerGroup, inner: Callable[[WorkerGroup], AllReduce] = Native
    ) -> None:
        local_sizes = comm.all_gather_object(comm.local_size)
        if len(set(local_sizes)) > 1:
            odd = next(r for r in range(comm.size) if local_sizes[r] != local_sizes[0])
            raise UsageError(
                "`algorithm` (='two_dimensional') needs equally many ranks on every node, but "
                f"there are {local_sizes[0]} on rank 0's and {local_sizes[odd]} on rank {odd}'s; "
                "use 'hierarchical'."
            )
        super().__init__(comm, comm.local_rank, inner)
        self._ring = Ring(self._inside)

    @property
    def _parts(self) -> list[AllReduce]:
        return [*super()._parts, self._ring]

    def _reduce_(self, flat: Tensor) -> None:
        assert self._across is not None
        chunks = flat.tensor_split(self._inside.size)
        own = self._ring.reduce_scatter_(chunks)
        self._across.reduce_(own)
        self._ring.all_gather_(chunks)
