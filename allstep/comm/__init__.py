"""A group of workers and what they can say to each other.

`__all__` is for users; what is imported under the same name again, for the rooms above.
"""

from allstep.comm.communicator import Communicator
from allstep.comm.group import Topology as Topology
from allstep.comm.initialise import init
from allstep.comm.mesh import Mesh
from allstep.comm.reduce_ops import ReduceOp
from allstep.comm.wire import Wire as Wire
from allstep.comm.work import CompletedWork as CompletedWork
from allstep.comm.work import JoinedWork as JoinedWork
from allstep.comm.work import Work

__all__ = ["Communicator", "Mesh", "ReduceOp", "Work", "init"]
