"""What a seed decides, checked; a failure names the seed and its faults."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.simulation.saving import Lives
from tests.helpers.simulation.scratch import scratch
from tests.helpers.simulation.training import Simulation

_CHUNK = 50  # in one test


def chosen(number: int) -> list[range]:
    """Seeds to check, some at a time; `make simulate` sets others than so many from 0 on."""
    first, number = int(os.environ.get("SEED", "0")), int(os.environ.get("SEEDS", str(number)))
    end = first + number
    return [range(start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK)]


def check_training(seed: int) -> None:
    """A training whose processes and connections fail.

    Raises:
        AssertionError: naming the seed.
    """
    simulation = Simulation(seed)
    try:
        with one_core():
            simulation.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {simulation.faults}: {error}") from error


def check_checkpoints(seed: int) -> None:
    """One whose disk fails, too, and which is resumed.

    Raises:
        AssertionError: naming the seed.
    """
    with scratch() as folder:
        lives = Lives(seed, folder)
        try:
            with one_core():
                lives.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {lives.faults}: {error}") from error


@contextmanager
def one_core() -> Iterator[None]:
    """Keeps threads of which one runs at a time on the core where this one is.

    On several each would wait for the next core to wake, and miss what is in the last one's caches.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


CHECKS = {"training": check_training, "checkpoints": check_checkpoints}
