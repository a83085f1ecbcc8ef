"""Strangers who connect to the ports of workers in the middle of their work."""

import contextlib
import itertools
import socket
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.processes import start_processes

GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096)


@pytest.mark.process
def test_strangers_on_all_ports_of_working_workers_change_nothing(tmp_path):
    """Each port of a worker gets connections that say nothing, close, or send garbage.

    But for those of groups that are being made: while Gloo connects, it takes the first number that
    it gets for a worker's.
    """
    attacked = tmp_path / "attacked"
    with start_processes(2, sum_until, attacked) as workers, contextlib.ExitStack() as held:
        wait_for_rounds(workers, tmp_path, 1)
        ports = {port for pid in workers.pids for port in listening(pid)}
        wait_for_rounds(workers, tmp_path, 2)  # whose groups have ports of their own
        ports &= {port for pid in workers.pids for port in listening(pid)}
        num_strangers = 0
        for port, garbage in itertools.product(ports, GARBAGE * 5):
            with contextlib.suppress(ConnectionError):  # to a group that has ended
                stranger = socket.create_connection(("127.0.0.1", port))
                held.callback(stranger.close)
                num_strangers += 1
                stranger.sendall(garbage)
                if garbage == GARBAGE[-1]:
                    stranger.close()
        attacked.touch()
        assert num_strangers >= 2 * len(GARBAGE) * 5  # each worker's first group has a port
        assert all(workers.results())


def wait_for_rounds(workers, folder, count):
    """Until that many more have begun on each worker."""
    files = [folder / f"round-{rank}" for rank in range(2)]
    ends = [count + (len(file.read_bytes()) if file.exists() else 0) for file in files]
    pairs = list(zip(files, ends, strict=True))
    while not all(file.exists() and len(file.read_bytes()) >= end for file, end in pairs):
        assert not workers.wait(0.05)


def listening(pid):
    return {
        c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"
    }


def sum_until(comm, attacked: Path):
    """Sums numbers, on new groups too, until some rounds after the attack; whether all is right."""
    left = 10
    while left:
        is_over = attacked.exists()
        with (attacked.parent / f"round-{comm.rank}").open("ab") as rounds:
            rounds.write(b".")
        group = comm.split(0, comm.rank)
        for each in (comm, group):
            x = torch.full((100_000,), 1.0 + each.rank)
            if not torch.equal(each.all_reduce(x, "sum"), torch.full((100_000,), 3.0)):
                return False
        group.close()
        left -= comm.all_reduce(torch.tensor(float(is_over)), "sum").item() == comm.size
    return True
