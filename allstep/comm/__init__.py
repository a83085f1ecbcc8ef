"""A group of workers and the calls by which they communicate.

`__all__` lists what users call; names imported `as` themselves are for the rooms above.
"""

from allstep.comm.activity import Activity as Activity
from allstep.comm.communicator import Communicator
from allstep.comm.divided import AlongAxis as AlongAxis
from allstep.comm.divided import DividedModules as DividedModules
from allstep.comm.divided import PartOfArray as PartOfArray
from allstep.comm.divided import Shard as Shard
from allstep.comm.divided import ShardHook as ShardHook
from allstep.comm.divided import StageModules as StageModules
from allstep.comm.divided import arrays_of as arrays_of
from allstep.comm.divided import divided_modules as divided_modules
from allstep.comm.divided import divided_prefixes as divided_prefixes
from allstep.comm.divided import fsdp_modules as fsdp_modules
from allstep.comm.divided import local_parameters as local_parameters
from allstep.comm.divided import parts_along_axes as parts_along_axes
from allstep.comm.divided import prefixes_of as prefixes_of
from allstep.comm.divided import shards_of as shards_of
from allstep.comm.divided import stages_of as stages_of
from allstep.comm.divided import workers_of_parts as workers_of_parts
from allstep.comm.generations import await_others as await_others
from allstep.comm.generations import note_ended as note_ended
from allstep.comm.group import Topology as Topology
from allstep.comm.initialise import init
from allstep.comm.mesh import Mesh
from allstep.comm.places import Place as Place
from allstep.comm.reduce_ops import ReduceOp
from allstep.comm.system import open_store as open_store
from allstep.comm.wire import Wire as Wire
from allstep.comm.work import CompletedWork as CompletedWork
from allstep.comm.work import JoinedWork as JoinedWork
from allstep.comm.work import Work
from allstep.comm.worker_state import EXITED as EXITED
from allstep.comm.worker_state import FAILED as FAILED
from allstep.comm.worker_state import LOST_PEER as LOST_PEER
from allstep.comm.worker_state import SIGNALLED as SIGNALLED
from allstep.comm.worker_state import TIMED_OUT as TIMED_OUT
from allstep.comm.worker_state import WELL as WELL
from allstep.comm.worker_state import WorkerState as WorkerState
from allstep.comm.worker_state import read_states as read_states
from allstep.comm.worker_state import state_folder as state_folder

__all__ = ["Communicator", "Mesh", "ReduceOp", "Work", "init"]
