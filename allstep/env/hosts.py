"""Environment variables for other hosts' workers, and this host's address as ssh reached it."""

import os
from collections.abc import Mapping, Sequence

from allstep.env.variables import Variables
from allstep.env.worker import forget_launch
from allstep.errors import UsageError

# Variables that are passed to other hosts without being asked for, if they are set.
CARRIED = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")
_LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def read_carried(wanted: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that this host passes to the workers of all hosts.

    Args:
        wanted: variables beyond `CARRIED`, each `NAME` or `NAME=VALUE`.
        environ: variables to read; the process's own if None.

    Raises:
        UsageError: if one of `wanted` has no value, or is not the name of a variable.

    >>> read_carried(["A", "B=2"], {"A": "1", "C": "3"})
    {'A': '1', 'B': '2'}
    """
    variables = os.environ if environ is None else environ
    found = {name: variables[name] for name in CARRIED if name in variables}
    for item in wanted:
        name, is_given, value = item.partition("=")
        if not name.isidentifier():
            raise UsageError(f"`env` (={item}) names no variable; give NAME, or NAME=VALUE.")
        if not is_given and name not in variables:
            raise UsageError(f"`env` (={item}) is not set here; set it, or give {name}=VALUE.")
        found[name] = value if is_given else variables[name]
    return found


def environment_of_agent(carried: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for torchrun's agent; its workers' lines begin with their ranks."""
    environ = dict(os.environ)
    forget_launch(environ)
    return environ | {"PYTHONUNBUFFERED": "1", _LINE_PREFIX: "[rank ${rank}] "} | dict(carried)


def read_ssh_address(environ: Mapping[str, str] | None = None) -> str | None:
    """This host's address in the ssh session that this process runs in; None without one.

    >>> read_ssh_address({"SSH_CONNECTION": "10.0.0.9 51234 10.0.0.1 22"})
    '10.0.0.1'
    """
    text = Variables(environ).text("SSH_CONNECTION")
    words = (text or "").split()
    return words[2] if len(words) == 4 else None
