"""Python's collector of cyclic garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns off the collector of cyclic garbage inside, also in processes that are forked there.

    [Note: collector and random state] `torch.get_rng_state` allocates a tensor while it holds the
    generator's lock. This can start a collection, which may run a weak reference's callback, during
    which the interpreter may switch to another thread. If that thread asks for the random state
    too, it waits for the generator's lock while it holds the GIL: a deadlock of all threads, in
    which no timeout takes effect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
