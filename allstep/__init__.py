"""Scale a PyTorch training from one process to a cluster: one model, any number of workers.

Nothing is imported before it is used, so that `import allstep` costs nothing.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The stub lists the public names, for type checkers and for this module: name -> its module.
_LINES = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
_MODULE_OF = {
    line.split()[-1]: line.split()[1] for line in _LINES if line.startswith("from allstep")
}

__all__ = ["__version__", *(name for name in _MODULE_OF if _MODULE_OF[name] != __name__)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'allstep' has no attribute {name!r}")
    if _MODULE_OF[name] == __name__:
        return import_module(f"allstep.{name}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({"__version__", *_MODULE_OF})
