"""What follows from Gloo's closing all connections when a wait for a message runs out of time."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from allstep.comm.background import in_thread, result_of
from allstep.comm.failures import is_timeout
from allstep.comm.wire import Posted

__all__ = ["PostedMessages", "break_connections"]

_ABORT_TAG = (1 << 31) - 1


class PostedMessages(Posted):
    """Messages under way between CPU ranks, which may be waited for again.

    Who waits for less than the wire's own time waits for a thread, which goes on.

    Args:
        wait: for the messages, at most so many seconds.
        timeout_s: the wire's own.
        what: names them in errors.
    """

    def __init__(self, wait: Callable[[float | None], None], timeout_s: float, what: str) -> None:
        super().__init__(wait)
        self._timeout_s, self._what = timeout_s, what
        self._future: Future[None] | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._future is None:
            if timeout_s is None or timeout_s >= self._timeout_s:
                self._wait(timeout_s or self._timeout_s)
                return
            self._future = in_thread(lambda: self._wait(self._timeout_s), self._what)
        result_of(self._future, self._what, timeout_s)


def break_connections(group: dist.ProcessGroup) -> None:
    """Closes a group's connections, so that its other ranks fail at once.

    Gloo closes them itself when nobody holds the group any more, which cannot be known here. So
    let a call time out: the first that does closes all; on one that is closed already a call
    fails for that reason.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if is_timeout(error):
                break
