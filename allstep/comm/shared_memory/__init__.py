"""Memory that ranks of one host share; sums in it and messages through it."""

from allstep.comm.shared_memory.mailboxes import Mailboxes
from allstep.comm.shared_memory.mapping import NotShared
from allstep.comm.shared_memory.sums import Block, SharedBuffer

__all__ = ["Block", "Mailboxes", "NotShared", "SharedBuffer"]
