"""`allstep launch --hosts alpha:2,beta:1 -- script.py ...`: a user's script on several hosts."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from allstep.cli.hosts import HELP, split_host_options
from allstep.cli.run_on_hosts import run_on_hosts
from allstep.env import RUN_DIR
from allstep.errors import UsageError

_USAGE = f"""\
usage: allstep launch --hosts HOST:N,HOST:N [options] -- SCRIPT.py [arguments]

Runs a script, which calls allstep.init or torch.distributed itself, as torchrun would.

  --run-dir DIR        have allstep.init leave there what `allstep why DIR` reads

{HELP}"""


def run(arguments: list[str]) -> int:
    """Runs a script as one worker of each rank on the hosts."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=None if arguments else sys.stderr)
        return 0 if arguments else 2
    options, rest = split_host_options(arguments)
    if options is None:
        raise UsageError(
            "`hosts` is missing: allstep launch --hosts alpha:2,beta:1 -- script.py; on one machine"
            " torchrun --nproc-per-node N script.py starts it."
        )
    parser = argparse.ArgumentParser(prog="allstep launch", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path)
    cut = rest.index("--") if "--" in rest else len(rest)
    known, unknown = parser.parse_known_args(rest[:cut])
    command = rest[cut + 1 :]
    if unknown or not command:
        raise UsageError(
            f"`launch` (={' '.join(rest)}): give the script behind `--`: allstep launch --hosts"
            " alpha:2,beta:1 -- script.py --its-own flags"
        )
    if known.run_dir is not None:
        carried = {**options.carried, RUN_DIR: str(known.run_dir)}
        options = replace(options, carried=carried)
    return run_on_hosts(options, command, files=command[:1])
