"""Messages between the ranks of one host, through memory that they share.

[Note: mailboxes] Each ordered pair of ranks has a few slots. The sender copies message n into slot
n modulo their number and counts it as sent; the receiver copies it out and counts it as taken. A
rank that waits for a free slot meanwhile takes messages that are sent to it, so ranks that post
many messages before they wait for any do not block each other.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory.flags import FIRST_FREE, Flags, lines_bytes
from allstep.comm.shared_memory.mapping import SharedMapping, map_shared
from allstep.errors import DisagreementError

NUM_SLOTS = 4
_HEADER_BYTES = 64  # the message's size, padded for alignment
_MAX_SLOT_BYTES = 1 << 22
_MAX_TOTAL_BYTES = 1 << 26


class Mailboxes:
    """Slots for each pair of ranks; see [Note: mailboxes].

    Args:
        mapping: the ranks' shared mapping.
        rank: this rank.
        timeout_s: function that returns the longest duration of a wait.

    Attributes:
        message_bytes: size of the longest possible message.
    """

    def __init__(self, mapping: SharedMapping, rank: int, timeout_s: Callable[[], float]) -> None:
        self.rank, self.size = rank, len(mapping.pids)
        self._slots_start = lines_bytes(self.size, _num_words(self.size))
        self._flags = Flags(mapping, rank, timeout_s, _num_words(self.size))
        self._names = mapping.names
        self._words = memoryview(mapping.memory).cast("q")
        self._slots = torch.frombuffer(mapping.memory, dtype=torch.uint8)[self._slots_start :].view(
            self.size, self.size - 1, NUM_SLOTS, -1
        )
        self.message_bytes = self._slots.shape[3] - _HEADER_BYTES
        self._num_sent = [0] * self.size
        self._num_taken = [0] * self.size
        self._rooms: list[deque[Tensor]] = [deque() for _ in range(self.size)]

    @classmethod
    def create(cls, comm: WorkerGroup, slot_bytes: int | None = None) -> "Mailboxes":
        """Maps memory that all ranks of `comm` share. Collective.

        Args:
            comm: at least two CPU ranks of one host.
            slot_bytes: size of a slot with its header, a multiple of 64; None for 4 MiB, or less
                among many ranks.

        Raises:
            NotShared: on every rank, if one of them cannot share memory.
        """
        num_slots = comm.size * (comm.size - 1) * NUM_SLOTS
        if slot_bytes is None:
            slot_bytes = min(_MAX_SLOT_BYTES, _MAX_TOTAL_BYTES // num_slots // 64 * 64)
        num_bytes = lines_bytes(comm.size, _num_words(comm.size)) + num_slots * slot_bytes
        mapping = map_shared(comm, num_bytes, populate=False)  # most pairs send no messages
        return cls(mapping, comm.rank, lambda: comm.timeout_s)

    def post(self, x: Tensor, peer: int, verb: str) -> None:
        """Sends a tensor of at most `message_bytes`; `x` may change as soon as this returns."""
        number = self._num_sent[peer] = self._num_sent[peer] + 1
        self._flags.verb, self._flags.limit_s = verb, None
        free = number - NUM_SLOTS
        self._flags.wait(self._taken_from(self.rank), free, [peer], meanwhile=self._take_arrived)
        word, slot = self._slot(self.rank, peer, number)
        self._words[word] = x.nbytes
        slot[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        self._flags.set(self._sent_to(peer), number, [peer])

    def expect(self, room: Tensor, peer: int, verb: str) -> "Arrival":
        """Provides a contiguous tensor for a rank's next message; errors call the call `verb`."""
        self._rooms[peer].append(room)
        return Arrival(self, peer, self._num_taken[peer] + len(self._rooms[peer]), verb)

    def has_taken(self, peer: int, number: int) -> bool:
        """Whether a rank's messages up to a number have been copied to their tensors."""
        self._take_arrived()
        return self._num_taken[peer] >= number

    def wait(self, peer: int, number: int, verb: str, timeout_s: float | None = None) -> None:
        """Returns when a rank's messages up to a number have been copied to their tensors.

        Args:
            peer, number: the rank that sends, and the number of its last message to wait for.
            verb: name of the call, for errors.
            timeout_s: longest time to wait; None for that of the mailboxes.

        Raises:
            CollectiveTimeoutError: if it took too long.
            PeerLostError: if that rank ended.
            DisagreementError: if the sizes of a message and its tensor differ.
        """
        self._flags.verb, self._flags.limit_s = verb, timeout_s
        while self._num_taken[peer] < number:
            self._flags.wait(self._sent_to(self.rank), self._num_taken[peer] + 1, [peer])
            self._take(peer)

    def _take(self, peer: int) -> None:
        """Copies a rank's next message out of its slot."""
        number = self._num_taken[peer] + 1
        word, slot = self._slot(peer, self.rank, number)
        room = self._rooms[peer][0]
        if self._words[word] != room.nbytes:
            raise DisagreementError(
                f"`{self._flags.verb}`: rank {self._names.number} expected {room.nbytes} "
                f"bytes of {self._names.named(peer)}, which sent {self._words[word]}; make "
                "the same calls in the same order on all ranks."
            )
        room.copy_(slot[: room.nbytes].view(room.dtype).view(room.shape))
        self._rooms[peer].popleft()
        self._num_taken[peer] = number
        self._flags.set(self._taken_from(peer), number, [peer])

    def _take_arrived(self) -> None:
        """Copies all messages that have arrived out of their slots."""
        for peer, rooms in enumerate(self._rooms):
            while rooms and self._flags.has_come(
                peer, self._sent_to(self.rank), self._num_taken[peer] + 1
            ):
                self._take(peer)

    def _slot(self, sender: int, receiver: int, number: int) -> tuple[int, Tensor]:
        """The index of the word that holds a message's size, and the memory of the message."""
        place = receiver - (receiver > sender)
        slot = self._slots[sender, place, number % NUM_SLOTS]
        index = (sender * (self.size - 1) + place) * NUM_SLOTS + number % NUM_SLOTS
        return (self._slots_start + index * slot.nbytes) // 8, slot[_HEADER_BYTES:]

    def _sent_to(self, rank: int) -> int:
        """The counter of messages sent to a rank."""
        return FIRST_FREE + rank

    def _taken_from(self, rank: int) -> int:
        """The counter of messages taken from a rank."""
        return FIRST_FREE + self.size + rank

    def abort(self) -> None:
        """Tells the others that this rank takes part no more."""
        self._flags.close()


class Arrival:
    """The `Work` of a message that is expected.

    Args:
        mailboxes: the mailboxes through which it arrives.
        peer, number: the rank that sends it, and the message's number.
        verb: name of the call, for errors.
    """

    def __init__(self, mailboxes: Mailboxes, peer: int, number: int, verb: str) -> None:
        self._mailboxes, self._peer, self._number, self._verb = mailboxes, peer, number, verb

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the message has been copied to its tensor."""
        self._mailboxes.wait(self._peer, self._number, self._verb, timeout_s)

    def is_completed(self) -> bool:
        """Whether the message has been copied to its tensor."""
        return self._mailboxes.has_taken(self._peer, self._number)


def _num_words(num_ranks: int) -> int:
    """Words of a rank's line, which counts messages sent to and taken from each rank."""
    return FIRST_FREE + 2 * num_ranks
