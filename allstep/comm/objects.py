"""Collectives and messages of plain data; see [Note: safe encoding] in codec.py."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from allstep.comm.base import PRIVATE_TAG, CommunicatorBase
from allstep.comm.codec import decode, encode
from allstep.errors import DisagreementError


class ObjectCollectives(CommunicatorBase):
    """Collectives and point-to-point messages of plain data; nothing is ever unpickled.

    An object is None, a bool, int, float, complex, str, bytes, numpy array or scalar, CPU tensor,
    or a list, tuple, set or dict of objects.
    """

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """The root's object, on all ranks; `obj` of the other ranks is ignored.

        >>> from allstep.comm import Communicator
        >>> Communicator.single_process().broadcast_object({"lr": 0.1})
        {'lr': 0.1}
        """
        self._check_rank("root", root)
        body = encode(obj) if self.rank == root else None
        return decode(self.messages.broadcast(body, root, "broadcast_object"))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, on all ranks: a list with one entry per rank."""
        return [decode(b) for b in self.messages.all_gather(encode(obj), "all_gather_object")]

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Every rank's object, on the root: a list with one entry per rank; None elsewhere."""
        self._check_rank("root", root)
        body = encode(obj)
        if self.rank != root:
            self.messages.send(body, root, PRIVATE_TAG, "gather_object").wait()
            return None
        verb = "gather_object"
        bodies = {rank: self.messages.recv(rank, PRIVATE_TAG, verb, verb) for rank in self._others}
        bodies[root] = body
        return [decode(bodies[rank]) for rank in range(self.size)]

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """This rank's entry of the root's `objs`, which has `size` entries."""
        self._check_rank("root", root)
        if self.rank != root:
            verb = "scatter_object"
            return decode(self.messages.recv(root, PRIVATE_TAG, verb, verb))
        bodies = [encode(obj) for obj in self._check_one_per_rank("objs", objs)]
        posted = [
            self.messages.send(bodies[rank], rank, PRIVATE_TAG, "scatter_object")
            for rank in self._others
        ]
        for call in posted:
            call.wait()
        return decode(bodies[root])

    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object to another rank, which calls `recv_object`."""
        self._check_peer("dest", dest, tag)
        self.messages.send(encode(obj), dest, tag, "send_object").wait()

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """Receives what another rank sends by `send_object`."""
        self._check_peer("source", source, tag)

        def receive() -> Any:
            return decode(self.messages.recv(source, tag, "recv_object", "send_object"))

        return self._inbox.receive(source, tag, receive)

    def all_reduce_object(self, obj: Any) -> Any:
        """The sum over ranks, in rank order, on all of them: `obj_0 + obj_1 + ...`.

        Args:
            obj: an object with a `+`: numbers, arrays, tensors, lists and strings (which are
                joined); dicts are added value by value.

        Raises:
            DisagreementError: if ranks pass dicts with different keys, or objects that cannot be
                added.

        >>> from allstep.comm import Communicator
        >>> Communicator.single_process().all_reduce_object({"correct": 3, "total": 4})
        {'correct': 3, 'total': 4}
        """
        everyone = self.all_gather_object(obj)
        for rank, other in enumerate(everyone):
            if set(_keys(other)) != set(_keys(obj)):
                raise DisagreementError(
                    f"`all_reduce_object`: {self._named(self.rank)} has keys {_keys(obj)}, "
                    f"{self._named(rank)} {_keys(other)}; pass the same keys on all ranks."
                )
        try:
            return reduce(_add, everyone)
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = [type(other).__name__ for other in everyone]
            raise DisagreementError(
                f"`all_reduce_object`: the ranks' values cannot be added ({error}); their types "
                f"are {kinds}."
            ) from error


def _keys(obj: Any) -> list[Any]:
    return list(obj) if isinstance(obj, dict) else []


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            raise ValueError(f"keys {list(left)} and {list(right)}")
        return {key: _add(left[key], right[key]) for key in left}
    return left + right
