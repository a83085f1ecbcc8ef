"""A group of workers and what they can say to each other."""

from allstep.comm.communicator import Communicator
from allstep.comm.initialise import init
from allstep.comm.reduce_ops import ReduceOp
from allstep.comm.work import Work

__all__ = ["Communicator", "ReduceOp", "Work", "init"]
