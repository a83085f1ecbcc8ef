"""Starts a command's workers on several hosts, after checking that the hosts agree.

ssh carries the messages and torchrun's agent keeps the workers; see [Note: host protocol].
"""

import contextlib
import queue
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from allstep.cli.host import facts_of
from allstep.cli.host_link import Event, HostLink, open_links
from allstep.cli.hosts import HostOptions, agent_arguments, print_commands
from allstep.cli.launch import signals_noted
from allstep.env import is_loopback
from allstep.errors import UsageError
from allstep.train import FAILED

_POLL_S = 0.1
_GRACE_S = 15.0  # of the other hosts after one has failed
_END_S = 45.0  # then; torchrun gives its workers 30 s
_SAME = {"python": "Python", "torch": "torch", "allstep": "allstep", "code": "code (its hash)"}


def run_on_hosts(
    options: HostOptions,
    command: Sequence[str],
    *,
    paths: Sequence[str] = (),
    files: Sequence[str] = (),
) -> int:
    """Runs a command as a worker of each rank on all hosts; returns the exit code.

    Args:
        options: the hosts.
        command: what torchrun's agents start, such as `-m allstep train digits`.
        paths: what the training reads; looked for on all hosts before the start.
        files: scripts that must be the same on all hosts.

    Returns:
        0; 1 if a host failed; 128 + the signal that this process got.
    """
    if options.is_dry:
        print_commands(options, command)
        return 0
    events: queue.Queue[Event] = queue.Queue()
    with signals_noted() as came, open_links(options, events) as links:
        facts = _check_hosts(links, list(paths), list(files))
        address, port = _find_address(links)
        environ = dict(options.carried)
        environ.setdefault("OMP_NUM_THREADS", str(_num_threads(options, facts)))
        _tell(links, facts[0], address, port, environ)
        if came:
            return 128 + came[0]
        for number, link in enumerate(links):
            arguments = agent_arguments(options, number, address, port, command)
            logs = ["--tee", "3", "--log-dir", "LOG_FOLDER"]
            link.send(start=[*arguments[:2], *logs, *arguments[2:]], environ=environ)
        return _watch(links, events, came)


def _check_hosts(links: Sequence[HostLink], paths: list[str], files: list[str]) -> list[Any]:
    """The hosts' facts; raises UsageError if they differ or a host lacks something."""
    facts = [link.ask("facts", paths=paths, files=files) for link in links]
    for link, own in zip(links, facts, strict=True):
        if "error" in own:
            raise UsageError(f"`hosts`: {link.name}: {own['error']}; install it there.")
        for key, what in _SAME.items():
            if own[key] != facts[0][key]:
                raise UsageError(
                    f"`hosts`: {link.name} has {what} {own[key]}, {links[0].name} has "
                    f"{facts[0][key]}: gradients would differ. Make them equal (`--python` and "
                    "`--remote-dir` say what is used there)."
                )
        if own["missing"]:
            raise UsageError(
                f"`hosts`: {link.name} has no {own['missing'][0]}, which the training reads; copy "
                "it there, or mount it at the same path."
            )
    here = facts_of([], files)["code"]
    if facts[0]["code"] != here:
        raise UsageError(
            f"`hosts`: {links[0].name} has code {facts[0]['code']}, this machine {here}; bring the "
            "hosts up to date, or start from one of them."
        )
    return facts


def _find_address(links: Sequence[HostLink]) -> tuple[str, int]:
    """An address of the first host that all other hosts reach."""
    others = links[1:]
    peer = next(filter(None, map(_outer, others)), None)
    found = links[0].ask("listen", towards=peer, port=0)
    if "error" in found:
        raise UsageError(f"`hosts`: {links[0].name} can't open a port: {found['error']}.")
    for link in others:
        answer = link.ask("connect", address=found["address"], port=found["port"])
        if "error" in answer:
            raise UsageError(
                f"`hosts`: {link.name} can't reach {links[0].name} at {found['address']}, port "
                f"{found['port']} ({answer['error']}): a firewall, or an address that only this "
                "machine can use. Name the hosts by addresses of the network that joins them, and "
                "let them open all TCP connections to each other."
            )
    return str(found["address"]), int(found["port"])


def _outer(link: HostLink) -> str | None:
    """The address of a host, unless it is its own loopback."""
    found = link.ask("listen", towards=None, port=0)
    address = str(found.get("address", "127.0.0.1"))
    return None if is_loopback(address) else address


def _num_threads(options: HostOptions, facts: Sequence[Any]) -> int:
    """A number of threads for all workers: another number may round sums differently."""
    shares = [
        int(own["num_cores"]) // host.num_workers
        for own, host in zip(facts, options.hosts, strict=True)
    ]
    return max(1, min(shares))


def _tell(
    links: Sequence[HostLink], facts: Any, address: str, port: int, environ: dict[str, str]
) -> None:
    versions = ", ".join(f"{what.split()[0]} {facts[key]}" for key, what in _SAME.items())
    carried = ", ".join(f"{name}={value}" for name, value in environ.items())
    names = ", ".join(link.name for link in links)
    print(f"{names}: {versions}; rank 0 at {address}:{port}; carried: {carried}", flush=True)


def _watch(links: Sequence[HostLink], events: "queue.Queue[Event]", came: Sequence[int]) -> int:
    """Prints the hosts' output until all have ended; ends all if one fails or a signal comes."""
    running = set(links)
    num_sent, has_failed = 0, False
    stages = [(_GRACE_S, signal.SIGTERM), (_END_S, signal.SIGKILL), (_END_S, None)]
    due_s = float("inf")
    while running:
        with contextlib.suppress(queue.Empty):
            link, kind, content = events.get(timeout=_POLL_S)
            if kind == "line":
                print(_marked(link.name, content), flush=True)
            elif link in running:
                running.remove(link)
                failure = _failure(link, kind, content)
                if failure and not has_failed:
                    has_failed, due_s = True, time.monotonic() + stages[0][0]
                    if not came:
                        print(f"[{link.name}] {failure}", file=sys.stderr, flush=True)
        while num_sent < len(came):
            ending = came[num_sent] if num_sent == 0 else signal.SIGKILL
            for link in links:
                link.send(signal=int(ending))
            num_sent += 1
        if time.monotonic() > due_s:
            _, ending_signal = stages.pop(0)
            if ending_signal is None:
                break
            for link in running:
                link.send(signal=int(ending_signal))
            due_s = time.monotonic() + stages[0][0]
    return 128 + came[0] if came else FAILED if has_failed else 0


def _failure(link: HostLink, kind: str, content: Any) -> str:
    """An error message for a host's end; empty if it ended well."""
    if kind == "lost":
        return (
            f"the connection to {link.name} is lost (ssh: {link.last_words()}); its workers end, "
            "and so do the others"
        )
    return f"its workers failed; the first error above says why ({content})" if content else ""


def _marked(name: str, line: str) -> str:
    """A line with its host and, where it comes from a worker, its rank.

    >>> _marked("beta", "[rank 2] hello"), _marked("beta", "hello")
    ('[beta rank 2] hello', '[beta] hello')
    """
    return f"[{name} {line[1:]}" if line.startswith("[rank ") else f"[{name}] {line}"
