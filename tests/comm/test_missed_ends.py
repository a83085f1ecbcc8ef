"""The end of a rank in the middle of others' calls. [Note: missed ends]"""

import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from allstep.comm import Communicator
from allstep.comm.connections import Connections
from allstep.comm.work import BackendWork
from allstep.errors import CommunicationError, PeerLostError
from tests.helpers.ranks import run_ranks

_LONG_BYTES = 128 << 20  # longer than to notice that a message has begun to come


@pytest.mark.parametrize("sender", [0, 1])
def test_rank_that_fails_amid_a_message_is_named_to_who_sends_or_receives_it(sender: int) -> None:
    """Rank 0 fails; Gloo itself lets rank 1 wait for its timeout."""
    received = torch.zeros(_LONG_BYTES, dtype=torch.uint8)

    def worker(comm: Communicator) -> None:
        if comm.rank == sender:
            sent = torch.ones(_LONG_BYTES, dtype=torch.uint8)
            work = comm.wire.send(sent, 1 - comm.rank, 3, "send")
        else:
            work = comm.wire.recv(received, 1 - comm.rank, 3, "recv")
        if comm.rank == 0:
            while not received[0]:
                time.sleep(0.0001)
            comm.abort()
            return
        with pytest.raises(PeerLostError, match="rank 0 closed its connection"):
            work.wait()

    run_ranks(2, worker, timeout_s=9)


def test_rank_that_gave_up_reports_no_other_as_missing() -> None:
    """Its own call ends by that; the others would look for somebody else to blame."""

    def worker(comm: Communicator) -> bool:
        if comm.rank == 0:
            call = threading.Thread(target=lambda: _wait(comm))
            call.start()
            while comm.activity.oldest_call() is None:
                time.sleep(0.001)
            comm.abort()
            call.join()
            return comm.wire.names.report_of(0) is None
        with suppress(CommunicationError):
            comm.recv(0)
        return True

    assert run_ranks(2, worker) == [True, True]


def _wait(comm: Communicator) -> None:
    with suppress(CommunicationError):
        comm.recv(1)


@pytest.mark.parametrize("ends_well", [True, False])
def test_only_a_rank_that_has_not_left_well_is_missed(ends_well: bool) -> None:
    has_left, has_looked = threading.Event(), threading.Event()

    def worker(comm: Communicator) -> bool:
        comm.barrier()
        if comm.rank == 0:
            group = comm.process_group  # held, as by those who still use it
            assert group is not None
            connections = Connections(group)
            comm.close() if ends_well else comm.abort()
            connections.close()
            has_left.set()
            assert has_looked.wait(20)
            return True
        assert comm.process_group is not None
        connections = Connections(comm.process_group)
        assert has_left.wait(20)
        try:
            for _ in range(100):
                connections.check([0])
                time.sleep(0.001)
            return ends_well
        except RuntimeError:
            return not ends_well
        finally:
            has_looked.set()

    assert run_ranks(2, worker) == [True, True]


def test_calls_that_nobody_waits_for_are_looked_at_a_few_times_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_calls, num_looks = 300, 0
    has_ended = BackendWork.has_ended

    def counted(work: BackendWork) -> bool:
        nonlocal num_looks
        num_looks += 1
        return bool(has_ended.__get__(work))

    monkeypatch.setattr(BackendWork, "has_ended", property(counted))

    def worker(comm: Communicator) -> None:
        x = torch.ones(1)
        works = [comm.wire.send(x.view(torch.uint8), 1, 3, "send") for _ in range(num_calls)]
        comm.barrier()
        assert num_looks < 8 * num_calls
        del works

    def other(comm: Communicator) -> None:
        comm.barrier()

    run_ranks(2, lambda comm: (worker if comm.rank == 0 else other)(comm), timeout_s=10)


def test_sum_that_a_failed_rank_began_ends_at_once_on_all_others() -> None:
    """As often as not Gloo itself does it."""

    def worker(comm: Communicator) -> None:
        x = torch.ones(1 << 20)
        comm.barrier()
        if comm.rank == 0:
            comm.wire.all_reduce(x, dist.ReduceOp.SUM, "all_reduce")
            comm.abort()
            return
        with pytest.raises(PeerLostError):
            for _ in range(1000):
                comm.wire.all_reduce(x, dist.ReduceOp.SUM, "all_reduce").wait()

    run_ranks(3, worker, timeout_s=9)
