"""`--hosts alpha:2,beta:1`: the options, and the commands for each host."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.env import read_carried
from allstep.errors import UsageError

HELP = """\
  --hosts HOST:N,...   start N workers on each host, by ssh; rank 0 is on the first
  --env NAME[=VALUE]   carry a variable to all hosts; may be given again
  --remote-dir DIR     be there in DIR instead of this folder
  --python PATH        run that Python there instead of this one's path
  --ssh COMMAND        instead of `ssh`, such as 'ssh -p 2222'
  --max-restarts N     let torchrun start the workers again after a failure, up to N times
  --dry-run            print what to type on each host, and start nothing"""
_DRY_PORT = 29_500


@dataclass(frozen=True)
class Host:
    """A host and its number of workers."""

    name: str
    num_workers: int


@dataclass(frozen=True)
class HostOptions:
    """The hosts on which workers start, and how to reach them.

    Attributes:
        hosts: in the order of their ranks.
        ssh: the command and its options.
        python: the interpreter's path on the hosts.
        folder: the working folder there.
        carried: variables that the hosts' workers get.
        max_restarts: of torchrun.
        is_dry: print only.
    """

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    python: str
    folder: str
    carried: Mapping[str, str]
    max_restarts: int
    is_dry: bool


def split_host_options(arguments: Sequence[str]) -> tuple[HostOptions | None, list[str]]:
    """Splits a command line into the options for hosts, None without `--hosts`, and the rest.

    What follows `--` is left as it is.
    """
    own, rest = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, rest = own[:cut], own[cut:]
    if not any(word == "--hosts" or word.startswith("--hosts=") for word in own):
        return None, [*own, *rest]
    parser = argparse.ArgumentParser(
        prog="allstep", usage=argparse.SUPPRESS, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--ssh", default="ssh")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--remote-dir", default=str(Path.cwd()))
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    known, others = parser.parse_known_args(own)
    options = HostOptions(
        parse_hosts(known.hosts),
        _words_of(known.ssh),
        known.python,
        known.remote_dir,
        read_carried(known.env),
        known.max_restarts,
        known.dry_run,
    )
    return options, [*others, *rest]


def _words_of(ssh: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(ssh))
    except ValueError as error:
        raise UsageError(f"`ssh` (={ssh}): {error}.") from None
    if not words:
        raise UsageError("`ssh` (='') is empty; leave it out, or give a command.")
    return words


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts and their numbers of workers, one by default.

    >>> parse_hosts("alpha:2,me@beta")
    (Host(name='alpha', num_workers=2), Host(name='me@beta', num_workers=1))
    """
    hosts = []
    for item in text.split(","):
        name, has_number, number = item.strip().partition(":")
        if not name or name.startswith("-") or name.endswith("@") or len(name.split()) > 1:
            raise UsageError(f"`hosts` (={text}): {item!r} names no host; give HOST:N,HOST:N.")
        if has_number and not (number.isdecimal() and int(number) > 0):
            raise UsageError(
                f"`hosts` (={text}): {name} shall have {number!r} workers; give a number of at "
                f"least 1, such as {name}:2."
            )
        hosts.append(Host(name, int(number) if has_number else 1))
    twice = [host.name for host in hosts if [h.name for h in hosts].count(host.name) > 1]
    if twice:
        raise UsageError(f"`hosts` (={text}): {twice[0]} comes twice; give it once, as HOST:N.")
    return tuple(hosts)


def agent_arguments(
    options: HostOptions, number: int, address: str, port: int, command: Sequence[str]
) -> list[str]:
    """Python's arguments on a host: torchrun's agent and the command that it starts.

    Args:
        options: all hosts.
        number: of the host.
        address, port: where rank 0's host listens.
        command: of each worker, such as `-m allstep train digits`.
    """
    return [
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(len(options.hosts)), "--node-rank", str(number)),
        *("--nproc-per-node", str(options.hosts[number].num_workers)),
        *("--master-addr", address, "--master-port", str(port)),
        *("--max-restarts", str(options.max_restarts)),
        *command,
    ]


def print_commands(options: HostOptions, command: Sequence[str]) -> None:
    """Prints the command for each host."""
    address = options.hosts[0].name.rpartition("@")[2]
    variables = "".join(f"{n}={shlex.quote(value)} " for n, value in options.carried.items())
    if "OMP_NUM_THREADS" not in options.carried:
        print("# OMP_NUM_THREADS: the same on all hosts, so that all sums are rounded alike")
    for number, host in enumerate(options.hosts):
        arguments = agent_arguments(options, number, address, _DRY_PORT, command)
        line = shlex.join([options.python, *arguments])
        print(f"# on {host.name}")
        print(f"cd {shlex.quote(options.folder)} && {variables}{line}")
