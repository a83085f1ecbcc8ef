"""Workers that ask to join an elastic training, as its store has them."""

from torch._C._distributed_c10d import TCPStore

from allstep.comm.generations import Generation, joiners, signal_to_stop, stored_in


def num_joiners(port: int) -> int:
    """How many have asked so far.

    Args:
        port: of the launcher's store, on this machine.
    """
    return len(joiners(stored_in(TCPStore("127.0.0.1", port))))


def has_generation(port: int, number: int) -> bool:
    """Whether it is written who is in a generation."""
    return Generation.read(stored_in(TCPStore("127.0.0.1", port)), number) is not None


def asks_to_stop(port: int) -> bool:
    """Whether the launcher asks all workers to stop."""
    return signal_to_stop(stored_in(TCPStore("127.0.0.1", port))) is not None
