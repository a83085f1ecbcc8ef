"""The end of a backward pass, as seen from the hooks that are called during it."""

from collections.abc import Callable
from weakref import ref

from torch.autograd import Variable


class BackwardPass:
    """Calls a function at the end of each backward pass that requests it. [Note: end of backward]

    autograd runs a queued callback at the end of the pass in which it was queued, and keeps it
    alive until then. So a weak reference to it is enough: while the callback is alive, the pass is
    running; once it is dead, the pass has ended, possibly with an exception.

    Reentrant activation checkpointing runs passes within the pass, and the callback must be
    queued in the outermost one, or it would run before the outermost has ended. A hook on the
    model's outputs runs in the outermost pass before any hook of an inner one: it calls `enter`.

    Args:
        begin: called without arguments in the first hook of a pass.
        finish: called without arguments at the end of each pass that requested it.
    """

    def __init__(self, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        self._begin_pass, self._finish = begin, finish
        self._end: ref[_End] | None = None

    def enter(self) -> None:
        """Called in a backward pass that may be the outermost of several."""
        if self._end is None or self._end() is None:
            self._begin()

    def request(self) -> None:
        """Requests that `finish` is called at the end of the running pass, once."""
        end = None if self._end is None else self._end()
        (self._begin() if end is None else end).is_requested = True

    def _begin(self) -> "_End":
        end = _End(self)
        self._end = ref(end)
        Variable._execution_engine.queue_callback(end)
        self._begin_pass()
        return end

    def finish(self, is_requested: bool) -> None:
        """Called by autograd; drops the callback first, which a traceback could keep alive."""
        self._end = None
        if is_requested:
            self._finish()


class _End:
    """The callback of one pass."""

    def __init__(self, backward_pass: BackwardPass) -> None:
        self._backward_pass = backward_pass
        self.is_requested = False

    def __call__(self) -> None:
        self._backward_pass.finish(self.is_requested)
