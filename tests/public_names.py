"""Every name that allstep offers; `python -m tests.public_names` writes them to a file.

The door and the `__init__` of a room say what they offer, and so do the few modules below a room
that are named here. All other modules are internal.
Attributes that only `__init__` sets are not seen.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).with_name("public_names.txt")
MODULES = [
    "allstep",
    "allstep.comm",
    "allstep.comm.algorithms",
    "allstep.comm.autograd",
    "allstep.comm.threads",
    "allstep.data",
    "allstep.data.image_folder",
    "allstep.data.image_shards",
    "allstep.data.text_folder",
    "allstep.doctor",
    "allstep.errors",
    "allstep.exchange",
    "allstep.exchange.wires",
    "allstep.nn",
    "allstep.nn.windows",
    "allstep.optim",
    "allstep.plan",
    "allstep.recipes",
    "allstep.train",
]


def public_names() -> list[str]:
    """Each name with its module; a class with its fields, properties and methods, once."""
    return [line for name in MODULES for line in _offered(importlib.import_module(name))]


def _offered(module: ModuleType) -> Iterator[str]:
    for name in sorted(getattr(module, "__all__", ())):
        full, value = f"{module.__name__}.{name}", getattr(module, name)
        yield full
        if inspect.isclass(value) and module.__name__ != "allstep":
            yield from (f"{full}.{member}" for member in sorted(_members(value)))


def _members(kind: type) -> set[str]:
    """What a class has from allstep; fields without a default are no attributes of it."""
    own = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("allstep")
        for name in vars(base)
    }
    if dataclasses.is_dataclass(kind):
        own |= {field.name for field in dataclasses.fields(kind)}
    return {name for name in own if not name.startswith("_")}


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in public_names()))
