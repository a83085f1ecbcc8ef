"""How the kernel schedules threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def patient_threads() -> Iterator[None]:
    """Makes threads that are started inside wait for a free core, not preempt others on waking.

    Nothing changes where the system has no such policy, or where another policy is set already.

    >>> with patient_threads():
    ...     pass
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
