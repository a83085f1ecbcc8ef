"""A group of workers and what they can say to each other."""

from allstep.comm.communicator import Communicator
from allstep.comm.pending import Pending

__all__ = ["Communicator", "Pending"]
