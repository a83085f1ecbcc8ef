"""Memory that ranks of one host share; sums taken in it and messages through it."""

from allstep.comm.shared_memory.block import Block
from allstep.comm.shared_memory.boxes import Boxes
from allstep.comm.shared_memory.meeting import NotShared
from allstep.comm.shared_memory.segment import Segment

__all__ = ["Block", "Boxes", "NotShared", "Segment"]
