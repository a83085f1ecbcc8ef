"""A group of workers and what they can say to each other."""

from allstep.comm.communicator import Communicator
from allstep.comm.initialise import init
from allstep.comm.pending import Pending
from allstep.comm.reduce_ops import ReduceOp

__all__ = ["Communicator", "Pending", "ReduceOp", "init"]
