"""Which workers have the experts of a layer, and where they meet."""

from typing import Any
from weakref import WeakKeyDictionary

from allstep.comm import Communicator
from allstep.errors import DisagreementError


class Rounds:
    """Where the layers of some workers meet.

    They have a group of their own, for in a backward pass the exchange uses the given one, and a
    worker without samples may come to it earlier than the others.

    Args:
        comm: the workers; all of them must call this.
    """

    def __init__(self, comm: Communicator) -> None:
        self.channel = _split(comm, 0)
        self._num_layers = 0

    def new_number(self) -> int:
        """Of one more layer."""
        self._num_layers += 1
        return self._num_layers - 1

    def gather(self, place: str, told: object) -> list[Any]:
        """What the workers tell each other where they meet, by rank. Collective.

        Args:
            place: which call this is, in words.
            told: plain data.

        Raises:
            DisagreementError: on every worker, if they come for different calls.
        """
        found = self.channel.all_gather_object((place, told))
        if any(other != place for other, _ in found):
            places = "; ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(found))
            raise DisagreementError(
                f"Workers came to different calls ({places}; layers are numbered as they were"
                " made). Call the same layers on all workers, all in train mode with gradients or"
                " all in eval mode without. Where workers have different numbers of micro-batches,"
                " call each layer once for each, in the order in which the model holds them, and"
                " set the model's mode before."
            )
        return [told for _, told in found]


class ExpertWorkers:
    """The workers that have a copy of all experts, this one among them.

    Args:
        comm: all workers; all of them must call this.
        num: of copies.

    Attributes:
        comm: those with this worker's copy; None if there is only one.
        copies: those with this worker's experts; None if it alone has them.
        rounds: where the layers of `comm` meet.
    """

    def __init__(self, comm: Communicator, num: int) -> None:
        size = comm.size // num
        self.comm = None if num == 1 else _split(comm, comm.rank // size)
        self.copies = None if num == 1 else _split(comm, comm.rank % size)
        self.rounds = Rounds(self.comm or comm)

    @classmethod
    def of(cls, comm: Communicator, num: int) -> "ExpertWorkers":
        """That which all layers over these workers share. Collective."""
        groups = _groups_of.setdefault(comm, {})
        if num not in groups:
            groups[num] = cls(comm, num)
        return groups[num]


_groups_of: WeakKeyDictionary[Communicator, dict[int, ExpertWorkers]] = WeakKeyDictionary()


def _split(comm: Communicator, color: int) -> Communicator:
    """The workers of one color. Collective."""
    found = comm.split(color, key=comm.rank)
    assert found is not None
    return found
