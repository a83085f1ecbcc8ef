"""Messages that may be waited for again."""

from collections.abc import Callable
from concurrent.futures import Future

from allstep.comm.background import in_thread, result_of
from allstep.comm.wire import Posted

__all__ = ["PostedMessages"]


class PostedMessages(Posted):
    """Messages under way between CPU ranks.

    Gloo closes all connections when a wait for one of them runs out of time. So who waits for
    less than the wire's own time waits for a thread, which goes on.

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
