"""Data that installed packages hold, read without importing them."""

from importlib.util import find_spec
from pathlib import Path

from allstep import UsageError


def package_folder(recipe: str, module: str, distribution: str) -> Path:
    """An installed package's folder; it is not imported.

    Args:
        recipe: that needs it.
        module: the package's name in Python.
        distribution: its name for pip.

    Raises:
        UsageError: if it isn't installed; with what to install.
    """
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"Recipe `{recipe}` needs {distribution}: pip install {distribution}.")
    return Path(spec.submodule_search_locations[0])
