"""Messages through shared memory: that all arrive, in order, and who is missed."""

import errno
import logging
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from allstep.comm.batched_send_recv import BatchedSendRecv
from allstep.comm.shared_memory import Mailboxes
from allstep.errors import CollectiveTimeoutError, DisagreementError, PeerLostError
from tests.helpers.processes import run_processes, start_processes
from tests.helpers.ranks import run_ranks

SLOT_BYTES = 1 << 12


def message(sender, receiver, number):
    """Another shape and dtype each time; every second one is not contiguous."""
    generator = torch.Generator().manual_seed(100 * sender + 10 * receiver + number)
    dtype = (torch.float64, torch.float32, torch.bfloat16)[number % 3]
    x = torch.randn(5 + number % 4, 3 + sender, 2, generator=generator).to(dtype)
    return x.transpose(0, 1) if number % 2 else x


def room_for(x):
    return torch.empty(x.shape, dtype=x.dtype)


def test_mailboxes_keep_order_with_more_messages_than_slots():
    """20 messages to each, and 4 slots: without taking while they wait, all would wait forever."""

    def work(comm):
        mailboxes = Mailboxes.create(comm, SLOT_BYTES)
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        expected = [
            (peer, message(peer, comm.rank, number)) for number in range(20) for peer in peers
        ]
        rooms = [(peer, x, room_for(x)) for peer, x in expected]
        works = [mailboxes.expect(room, peer, "fetch") for peer, _, room in rooms]
        for number in range(20):
            for peer in peers:
                mailboxes.post(message(comm.rank, peer, number), peer, "fetch")
        for arrival in reversed(works):
            arrival.wait()
            assert arrival.is_completed()
        return all(torch.equal(room, x) for _, x, room in rooms)

    assert run_ranks(4, work, timeout_s=30) == [True] * 4


def test_mailboxes_copy_what_is_posted():
    def work(comm):
        mailboxes = Mailboxes.create(comm, SLOT_BYTES)
        if comm.rank == 0:
            x = torch.zeros(10)
            for _ in range(9):
                mailboxes.post(x, 1, "fetch")
                x += 1
            return []
        rooms = [torch.empty(10) for _ in range(9)]
        works = [mailboxes.expect(room, 0, "fetch") for room in rooms]
        works[-1].wait()
        return [room.unique().item() for room in rooms]

    assert run_ranks(2, work)[1] == list(range(9))


def test_mailboxes_refuse_a_message_of_another_size():
    def work(comm):
        mailboxes = Mailboxes.create(comm, SLOT_BYTES)
        if comm.rank == 0:
            mailboxes.post(torch.ones(3), 1, "deliver")
            return
        arrival = mailboxes.expect(torch.empty(4), 0, "fetch")
        with pytest.raises(DisagreementError, match=r"`fetch`.* 16 bytes of rank 0, which sent 12"):
            arrival.wait()

    run_ranks(2, work)


def test_mailboxes_timeout_names_the_sender_and_can_be_repeated():
    def work(comm):
        mailboxes = Mailboxes.create(comm, SLOT_BYTES)
        if comm.rank == 1:
            time.sleep(0.5)
            mailboxes.post(torch.ones(2), 0, "fetch")
            comm.barrier()
            return
        room = torch.empty(2)
        arrival = mailboxes.expect(room, 1, "fetch")
        with pytest.raises(CollectiveTimeoutError, match=r"`fetch` .* missing: rank 1\."):
            arrival.wait(timeout_s=0.05)
        assert not arrival.is_completed()
        arrival.wait()
        assert room.tolist() == [1, 1]
        comm.barrier()

    run_ranks(2, work, timeout_s=20)


def test_mailboxes_abort_ends_the_wait_of_others():
    def work(comm):
        mailboxes = Mailboxes.create(comm, SLOT_BYTES)
        comm.add_dependent(mailboxes)
        if comm.rank == 1:
            comm.abort()
            return
        arrival = mailboxes.expect(torch.empty(2), 1, "fetch")
        with pytest.raises(PeerLostError, match="rank 1 left"):
            arrival.wait()

    run_ranks(2, work, timeout_s=20)


def exchange(comm, length):
    """With both neighbours in a ring; returns what came, and how many bytes went by the wire."""
    parcels, wired_bytes = BatchedSendRecv(comm), 0
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    options = {"dtype": torch.float64, "device": torch.device("cpu"), "verb": "fetch"}
    x = torch.arange(length, dtype=torch.float64) + comm.rank
    parcels.exchange({}, {}, **options).wait()  # here they meet
    plain = type(comm.wire)

    class Counted(plain):
        def send(self, buffer, *arguments):
            nonlocal wired_bytes
            wired_bytes += buffer.nbytes
            return super().send(buffer, *arguments)

    comm.wire.__class__ = Counted
    outgoing = {before: x, after: x[::2]}
    incoming = {before: ((length + 1) // 2,), after: (length,)}
    came = parcels.exchange(outgoing, incoming, **options).wait()
    comm.wire.__class__ = plain
    return came[before].tolist(), came[after].tolist(), wired_bytes


@pytest.mark.process
@pytest.mark.parametrize(("length", "by_wire"), [(1001, 0), (500_001, 500_001 * 8)])
def test_batched_send_recv_uses_mailboxes_for_what_fits(length, by_wire):
    """Of the larger tensors a half still fits."""
    for rank, (half, full, wired_bytes) in enumerate(run_processes(3, exchange, length)):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        assert half == [float(i + before) for i in range(0, length, 2)]
        assert full == [float(i + after) for i in range(length)]
        assert wired_bytes == by_wire


def exchange_on_a_full_machine(comm, length):
    """As `exchange`, where no memory can be shared; and what the log says."""

    def refuse(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("allstep").addHandler(handler)
    _, full, wired_bytes = exchange(comm, length)
    return full, wired_bytes, [record.getMessage() for record in said]


@pytest.mark.process
def test_falls_back_without_memory():
    answers = run_processes(3, exchange_on_a_full_machine, 11)
    for rank, (full, wired_bytes, messages) in enumerate(answers):
        assert full == [float(i + (rank + 1) % 3) for i in range(11)]
        assert wired_bytes == 8 * (11 + 6)
        assert len(messages) == (rank == 0)
    assert "messages use the network, not shared memory: no " in answers[0][2][0]


def test_batched_send_recv_between_threads_uses_the_wire():
    """So do ranks of several hosts."""
    for options in ({}, {"local_size": 1}):
        for _, full, wired_bytes in run_ranks(3, partial(exchange, length=11), **options):
            assert len(full) == 11
            assert wired_bytes == 8 * (11 + 6)


def wait_for_a_dead_rank(comm, folder):
    """Writes how many seconds it waited after rank 1 was about to die."""
    mailboxes = Mailboxes.create(comm)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    arrival = mailboxes.expect(torch.empty(1), 1, "fetch")
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match=r"rank 1 \(.+\) left"):
        arrival.wait()
    (Path(folder) / "seconds").write_text(str(time.monotonic() - start_s))


@pytest.mark.process
def test_mailboxes_wait_ends_when_a_rank_is_killed(tmp_path):
    with start_processes(2, wait_for_a_dead_rank, str(tmp_path)) as workers:
        workers.join(30)
    assert float((tmp_path / "seconds").read_text()) < 30  # half of the time limit
