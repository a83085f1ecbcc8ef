"""Python's collector of garbage in cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Collects no garbage in cycles; a process that is forked meanwhile doesn't, either.

    [Note: collector and random state] `torch.get_rng_state` makes a tensor while it holds the
    generator's lock. A collection begins there now and then, and may run a weak reference's
    callback, in which the interpreter may go on with another thread; if that asks for the random
    state too, it waits for the lock and keeps the interpreter's own: no thread ever goes on, and
    no timeout is noticed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
