"""`allstep launch -- script.py ...`: a user's script on several hosts, or on elastic workers."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from allstep.cli import launch_elastic
from allstep.cli.hosts import HELP, split_host_options
from allstep.cli.run_on_hosts import run_on_hosts
from allstep.env import RUN_DIR
from allstep.errors import UsageError

_USAGE = f"""\
usage: allstep launch --hosts HOST:N,HOST:N [options] -- SCRIPT.py [arguments]
       allstep launch --elastic --workers N [options] -- SCRIPT.py [arguments]

Runs a script, which calls allstep.init or torch.distributed itself, as torchrun would.

  --elastic            on this machine: the others go on when a worker is lost, and others join;
                       the script uses allstep.Elastic
  --workers N          how many to start, with --elastic
  --min-workers N      with fewer an elastic script ends; 1
  --store HOST:PORT    of an `allstep store`, in which elastic workers find each other
  --run-dir DIR        have allstep.init leave there what `allstep why DIR` reads; with --elastic
                       what `allstep join DIR` does

{HELP}"""


def run(arguments: list[str]) -> int:
    """Runs a script on one worker of each rank."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=None if arguments else sys.stderr)
        return 0 if arguments else 2
    options, rest = split_host_options(arguments)
    cut = rest.index("--") if "--" in rest else len(rest)
    command = rest[cut + 1 :]
    if options is None and "--elastic" in rest[:cut]:
        _check_command(command, rest)
        return launch_elastic.run(rest[:cut], command)
    if options is None:
        raise UsageError(
            "`hosts` and `elastic` are missing; one says what to start. On this machine torchrun"
            " --nproc-per-node N script.py starts a script, and allstep launch --elastic --workers"
            " N -- script.py one that uses `allstep.Elastic`; on several hosts allstep launch"
            " --hosts alpha:2,beta:1 -- script.py does."
        )
    parser = argparse.ArgumentParser(prog="allstep launch", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path)
    known, unknown = parser.parse_known_args(rest[:cut])
    if "--elastic" in unknown:
        raise UsageError(
            "`elastic` is for workers of this machine: leave out `--hosts`, and give `--workers`."
        )
    _check_command([] if unknown else command, rest)
    if known.run_dir is not None:
        carried = {**options.carried, RUN_DIR: str(known.run_dir)}
        options = replace(options, carried=carried)
    return run_on_hosts(options, command, files=command[:1])


def _check_command(command: list[str], given: list[str]) -> None:
    if not command:
        is_elastic = "--elastic" in given
        example = "--elastic --workers 2" if is_elastic else "--hosts alpha:2,beta:1"
        raise UsageError(
            f"`launch` (={' '.join(given)}): give the script behind `--`, the flags of"
            f" `allstep launch` before it: allstep launch {example} -- script.py --its-own flags"
        )
