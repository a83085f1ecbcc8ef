"""Imports of torch and its modules at the start of a process."""

import gc
import sys
from importlib import import_module
from types import ModuleType

from allstep.env import without_collector


def import_at_start(name: str) -> ModuleType:
    """Imports a module and excludes its objects, and those of torch, from garbage collection.

    It finds nothing among them; else a command would take half as long again to start and to end.
    In a program that has imported torch already, this is a plain import: its objects are its own.

    Args:
        name: of the module.

    Returns:
        The module.

    >>> import_at_start("os.path").basename("a/b")
    'b'
    """
    if "torch" in sys.modules:
        return import_module(name)
    with without_collector():
        module = import_module(name)
        gc.freeze()
    return module
