"""Ranks as threads."""

import gc
import subprocess
import sys

import pytest
import torch

from allstep.comm.threads import run_ranks
from allstep.errors import CommunicationError, DisagreementError, UsageError


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_run_ranks_returns_results_by_rank(n):
    assert run_ranks(n, lambda comm: (comm.rank, comm.size)) == [(r, n) for r in range(n)]


def test_run_ranks_on_several_nodes():
    def work(comm):
        return comm.node_rank, comm.num_nodes, comm.local_rank, comm.local_size

    assert run_ranks(4, work, local_size=2) == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_run_ranks_where_one_ends_first():
    def work(comm):
        x = comm.all_reduce(torch.ones(1))
        for _ in range(20):
            if comm.rank == 1:
                comm.send(x, 2)
            if comm.rank == 2:
                comm.recv(1)
        return x.item()

    assert run_ranks(3, work) == [3, 3, 3]


def test_run_ranks_raises_the_first_cause():
    def work(comm):
        if comm.rank == 0:
            raise DisagreementError("a consequence that came first")
        try:
            comm.barrier()
        except CommunicationError:
            if comm.rank == 2:
                raise KeyError("the cause") from None
            raise

    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(3, work)
    assert caught.value.__notes__ == ["on rank 2 of 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, r"`n` \(=0\) must be at least 1"),
        ({"n": 5, "local_size": 2}, r"`n` \(=5\) must be a multiple of `local_size` \(=2\).*4, 6"),
        ({"n": 5, "local_size": 0}, r"`local_size` \(=0\) must be at least 1"),
        ({"n": 1, "timeout_s": 0}, r"`timeout_s` \(=0\)"),
        ({"n": 1, "timeout_s": 1e10}, r"`timeout_s` \(=10000000000.0\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        run_ranks(fn=lambda comm: None, **arguments)


def test_run_ranks_leaves_the_collector_as_it_was():
    def fail(comm):
        raise ZeroDivisionError(f"on purpose, {gc.isenabled()}")

    assert run_ranks(2, lambda comm: gc.isenabled()) == [False, False]
    with pytest.raises(ZeroDivisionError, match="False"):
        run_ranks(2, fail)
    assert gc.isenabled()


ASK_FOR_RANDOM_STATE = """
import gc, sys, weakref
import torch
from allstep.comm.threads import run_ranks

class Cyclic:
    def __init__(self):
        self.own = self

def work(comm):
    kept = []
    for _ in range(3000):
        kept.append(weakref.ref(Cyclic(), lambda _: sum(range(200))))
        torch.get_rng_state()

sys.setswitchinterval(1e-6)
gc.set_threshold(5)
run_ranks(3, work)
"""


@pytest.mark.process
def test_ranks_ask_for_the_random_state_while_garbage_is_made():
    """As fast as they can, with a collection at every moment, if there were any."""
    subprocess.run([sys.executable, "-c", ASK_FOR_RANDOM_STATE], timeout=120, check=True)
