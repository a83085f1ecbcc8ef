"""Memory that ranks of one host share, and sums taken in it."""

from allstep.comm.shared_memory.block import Block
from allstep.comm.shared_memory.meeting import NotShared
from allstep.comm.shared_memory.segment import Segment

__all__ = ["Block", "NotShared", "Segment"]
