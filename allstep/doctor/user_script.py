"""A user's script, run in this process as `python SCRIPT` would, and watched from `attach` on."""

import contextlib
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import allstep

__all__ = ["Attach", "frames_of_script", "frames_of_user", "run_as_main"]

Attach = Callable[..., Any]


def run_as_main(script: Path, arguments: Sequence[str], wrap: Callable[[Attach], Attach]) -> None:
    """Runs a script to its end, or until it raises.

    Args:
        script: any Python file.
        arguments: the script's own.
        wrap: makes of `allstep.attach` what the script finds in its place. Who has taken it from
            its room before doesn't find it: import little before.
    """
    with _in_place_of_attach(wrap), _as_main(script, arguments):
        runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _in_place_of_attach(wrap: Callable[[Attach], Attach]) -> Iterator[None]:
    room = importlib.import_module("allstep.exchange")
    attach = room.attach
    vars(room)["attach"] = wrap(attach)
    try:
        yield
    finally:
        vars(room)["attach"] = attach


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def frames_of_script(stack: traceback.StackSummary, script: Path) -> traceback.StackSummary:
    """From where the script begins."""
    names = [os.path.realpath(frame.filename) for frame in stack]
    mine = os.path.realpath(script)
    start = names.index(mine) if mine in names else len(names)
    return traceback.StackSummary.from_list(stack[start:])


def frames_of_user(stack: traceback.StackSummary, script: Path) -> traceback.StackSummary:
    """From there up to where it calls torch or allstep."""
    frames = frames_of_script(stack, script)
    libraries = tuple(os.path.dirname(module.__file__ or "") for module in (torch, allstep))
    inside = (i for i, frame in enumerate(frames) if frame.filename.startswith(libraries))
    return traceback.StackSummary.from_list(frames[: next(inside, len(frames))])
