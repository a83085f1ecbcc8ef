"""Checks of files that commands write, before any work where possible."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from allstep.errors import UsageError


def check_writable(argument: str, path: Path) -> None:
    """Raises UsageError for a file that can't be written, before any work is done.

    Raises:
        UsageError: if its folder is missing or closed, or a folder is in its place.
    """
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "you may not write there"
    if reason is not None:
        raise UsageError(f"`{argument}` (={path}) can't be written: {reason}.")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_can_draw(argument: str) -> None:
    """Raises UsageError for a flag that needs matplotlib where it is not installed."""
    if not can_draw():
        raise UsageError(
            f"`{argument}` needs matplotlib: install it with `pip install 'allstep[plot]'`,"
            f" or leave `--{argument}` out."
        )


def new_figure(width: float = 7, height: float = 4.5) -> Any:
    """An empty figure of matplotlib's, with its size in inches."""
    figure = import_module("matplotlib.figure").Figure
    return figure(figsize=(width, height), layout="constrained")


def check_plot(path: Path) -> None:
    """Raises UsageError for `--plot` where the plot can't be drawn or written.

    Raises:
        UsageError: if it can't be written; or if there is nothing to draw with, or no such kind of
            picture.
    """
    check_writable("plot", path)
    check_can_draw("plot")
    canvas = import_module("matplotlib.backend_bases").FigureCanvasBase
    kinds = sorted(canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UsageError(f"`plot` (={path}) must end in a kind of picture: .{', .'.join(kinds)}.")


@contextmanager
def writing_errors(what: str) -> Iterator[None]:
    """A context around the writing of a file, which turns OSErrors into UsageErrors.

    Args:
        what: what is written, for the error: an argument with its value, or a path.

    Raises:
        UsageError: if the system refuses.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} can't be written ({error.strerror}); choose another.") from None
