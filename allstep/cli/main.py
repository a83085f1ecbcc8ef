"""Runs the chosen command, and turns allstep's own errors into a message and an exit code."""

import errno
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from allstep import __version__
from allstep.cli.imports import import_at_start
from allstep.cli.interruptible import SIGNALS, Interrupted, signals_handled
from allstep.env import read_launch
from allstep.errors import AllstepError, UsageError, nearest_names

_COMMANDS = {
    "train": "train a recipe on any number of workers, or continue a run",
    "sweep": "train a recipe with several values of its flags, and compare them",
    "curve": "say what more training data would bring, from trainings on parts of it",
    "join": "bring workers to a run that is being trained with --elastic",
    "store": "serve the store in which workers of --elastic find each other",
    "launch": "start a script of your own on several hosts, or with --elastic",
    "cluster": "write a template of nodes in a cloud that train together",
    "recipes": "list the recipes, or show one with all its fields",
    "evaluate": "evaluate a run's newest checkpoint on its whole test set",
    "sharpness": "measure how sharp the minimum is that a run is in",
    "advise": "say whether scaling pays, how, and up to how many workers",
    "doctor": "say what is wrong with hosts and their network, and the cure",
    "demo": "measure large batches, the same model, a slow wire and scaling on this machine",
    "watch": "show a run's progress and its workers live",
    "why": "say what happened first in a run that died or hangs, and what to do",
    "verify": "say whether a script trains the same model on any number of workers, or why not",
}
_HIDDEN = ("worker", "host")  # what the others start; not for people
_MODULES = {"launch": "launch_script"}  # where a command's module has another name
_OF_A_PATH = (errno.EACCES, errno.ENAMETOOLONG)  # what the system says of one that was given


def main(argv: Sequence[str] | None = None, **stand_ins: Any) -> int:
    """Runs a command line and returns its exit code.

    Args:
        argv: what follows `allstep`; this process's own arguments when None.
        stand_ins: what the command shall use in place of its own, by the name of its `run`.

    Returns:
        0; 1 if a worker failed, or nobody reads what is printed; 2 for a mistake of the caller's;
        130 after Ctrl-C and 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _quiet_signals():
        try:
            code = _dispatch(arguments, stand_ins)
            sys.stdout.flush()
            return code
        except AllstepError as error:
            if _speaks():
                print(f"error: {error}", file=sys.stderr)
            return 2
        except Interrupted as stop:
            return 128 + stop.number
        except BrokenPipeError:
            if not _is_output_closed():
                raise
            return 1  # as rich does
        except OSError as error:
            if error.errno not in _OF_A_PATH or error.filename is None:
                raise
            if _speaks():
                print(f"error: {error.filename} can't be used ({error.strerror})", file=sys.stderr)
            return 2


def _dispatch(arguments: list[str], stand_ins: Mapping[str, Any]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"allstep {__version__}")
        return 0
    if command not in (*_COMMANDS, *_HIDDEN):
        raise UsageError(f"There is no command `{command}`; {nearest_names(command, _COMMANDS)}")
    module = import_at_start(f"allstep.cli.{_MODULES.get(command, command)}")
    code: int = module.run(rest, **stand_ins)
    return code


def _is_output_closed() -> bool:
    """Whether the reader of the output has ended, as `head` does; discards the rest then."""
    output, poll = sys.stdout.fileno(), select.poll()
    poll.register(output, 0)
    is_closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed


def _speaks() -> bool:
    """Whether this worker prints errors: rank 0, as the others have the same ones."""
    try:
        return read_launch().rank == 0
    except UsageError:  # the environment contradicts itself
        return True


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in _COMMANDS.items()]
    usage = "usage: allstep COMMAND ... | --version | --help"
    return "\n".join([usage, "", *lines, "", "For a start: allstep train digits --workers 2"])


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Makes Ctrl-C end this process without a traceback, unless a handler is set."""
    with signals_handled(lambda number, frame: os._exit(128 + number)):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a worker starts with them blocked
        yield
