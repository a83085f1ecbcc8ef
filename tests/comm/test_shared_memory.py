"""Sums in shared memory: their bits, their pieces, and what happens when ranks go away."""

import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from allstep.comm.algorithms import SharedMemory
from allstep.comm.shared_memory import Block, Mailboxes, NotShared, SharedBuffer
from allstep.comm.shared_memory.sums import SMALL_BYTES, default_slot_bytes
from allstep.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    DisagreementError,
    PeerLostError,
)
from tests.helpers.processes import names_in_dev_shm, run_processes, start_processes
from tests.helpers.ranks import run_ranks

SLOT_BYTES = 1 << 12
SIZES = (1, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 16_384, 16_385, 50_001)


def values(rank, num_elements, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_elements, generator=generator).to(dtype)


def in_order(num_ranks, num_elements, dtype):
    """The ranks' values, added one rank after the other."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = values(0, num_elements, dtype).to(wide)
    for rank in range(1, num_ranks):
        total += values(rank, num_elements, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_shared_sums_add_in_rank_order_for_every_size(n, dtype):
    def work(comm):
        results = []
        for slot_bytes in (SLOT_BYTES, 1 << 20):
            buffer = SharedBuffer.create(comm, slot_bytes)
            for num_elements in SIZES:
                x = values(comm.rank, num_elements, dtype)
                buffer.sum_(x)
                results.append(x)
            buffer.close()
        return results

    expected = [in_order(n, num_elements, dtype) for num_elements in SIZES] * 2
    for results in run_ranks(n, work):
        assert all(map(torch.equal, results, expected))
    backwards = sum((values(r, 50_001) for r in reversed(range(5))), torch.zeros(50_001))
    assert not torch.equal(backwards, in_order(5, 50_001, torch.float32))


def test_shared_sums_and_broadcasts_in_turn():
    def work(comm):
        buffer = SharedBuffer.create(comm, SLOT_BYTES)
        seen = []
        for turn in range(40):
            x = torch.full((10 if turn % 3 else 10_000 + 700 * turn,), float(comm.rank + turn))
            if turn % 4 == 3:
                buffer.broadcast_(x, root=turn % comm.size)
                expected = turn % comm.size + turn
            else:
                buffer.sum_(x)
                expected = 3 * turn + 3
            seen.append(bool((x == expected).all()))
        return seen

    assert run_ranks(3, work) == [[True] * 40] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_shared_sums_in_place_equal_shared_sums(n, dtype):
    """Also where slices are empty, or cut in several chunks, and beside sums through slots."""
    sizes = (1, 7, 50_001, 300_001)

    def work(comm):
        buffer, block = SharedBuffer.create(comm, SLOT_BYTES), Block(comm, 1 << 22)
        offset, results = 0, []
        for num_elements in sizes:
            num_bytes = num_elements * dtype.itemsize
            x = block.own[offset : offset + num_bytes].view(dtype)
            x.copy_(values(comm.rank, num_elements, dtype))
            assert block.holds(x) and not block.holds(x.clone())
            buffer.sum_in_place_(x, block)
            beside = values(comm.rank, 3000, dtype)
            buffer.sum_(beside)
            results += [x.clone(), beside]
            offset += -(-num_bytes // 64) * 64
        return results

    expected = [in_order(n, k, dtype) for size in sizes for k in (size, 3000)]
    for results in run_ranks(n, work):
        assert all(map(torch.equal, results, expected))


def test_block_made_in_another_thread_during_a_sum():
    """As the main thread makes one while the exchange's sums; the new one is not looked at."""

    def work(comm):
        memory = SharedMemory(comm)
        blocks = [memory.new_block(64) for _ in range(2)]

        def holds(flat):
            blocks.append(memory.new_block(64))
            return False

        blocks[0].holds = holds
        x = torch.ones(3)
        memory.reduce_(x)
        return x.tolist(), len(blocks)

    assert run_ranks(2, work) == [([2.0] * 3, 3)] * 2


def test_default_slot_bytes_by_number_of_cores():
    assert default_slot_bytes(1) < default_slot_bytes(1 + len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("pinned", [0, 1])
def test_shared_sums_with_different_cores_a_rank(monkeypatch, pinned):
    """The first rank's cores count for all: slots of different sizes lie in different places."""

    def cores(pid):
        return {0} if threading.current_thread().name == f"rank {pinned}" else {0, 1}

    monkeypatch.setattr(os, "sched_getaffinity", cores)

    def work(comm):
        own_bytes = default_slot_bytes(comm.size)
        x = values(comm.rank, 100_001)
        return own_bytes, comm.all_reduce(x, algorithm="shared_memory")

    results = run_ranks(2, work)
    assert results[0][0] != results[1][0]  # without an agreement
    assert all(torch.equal(x, in_order(2, 100_001, torch.float32)) for _, x in results)


def test_shared_buffer_uses_the_first_ranks_slot_bytes():
    def work(comm):
        buffer = SharedBuffer.create(comm, SLOT_BYTES << comm.rank)
        x = values(comm.rank, 50_001)
        buffer.sum_(x)
        return x

    for x in run_ranks(3, work):
        assert torch.equal(x, in_order(3, 50_001, torch.float32))


@pytest.mark.parametrize("make", [Block, Mailboxes.create])
def test_share_memory_refuses_different_sizes(make):
    """A view of another size would show each rank other places of the same memory."""

    def work(comm):
        with pytest.raises(
            DisagreementError, match=r"ranks 0, 1 want: share .*rank 2 wants: share"
        ):
            make(comm, SLOT_BYTES << (comm.rank == 2))
        comm.barrier()

    run_ranks(3, work)


# -- who is missing ------------------------------------------------------------------------------


def test_shared_sum_timeout_names_the_missing_rank():
    is_over = threading.Barrier(3)

    def work(comm):
        memory = SharedMemory(comm)
        comm.barrier()
        if comm.rank == 1:  # until the others have failed
            is_over.wait(20)
            return
        comm.set_timeout(0.5)
        with pytest.raises(CommunicationError) as caught:
            memory.reduce_(torch.ones(10))
        if isinstance(caught.value, CollectiveTimeoutError):
            assert "did not finish within 0.5 s; missing: rank 1." in str(caught.value)
        else:  # the other one's timeout was noticed first
            assert "left" in str(caught.value)
        is_over.wait(20)

    run_ranks(3, work)


def test_shared_sum_ends_when_a_rank_closes():
    def work(comm):
        memory = SharedMemory(comm)
        if comm.rank == 1:
            memory.close()
            return
        with pytest.raises(PeerLostError, match=r"rank 1 left; it failed, timed out or was"):
            memory.reduce_(torch.ones(10))
        with pytest.raises(PeerLostError, match="the communicator was aborted"):
            memory.reduce_(torch.ones(10))  # and the algorithm is over

    run_ranks(2, work, timeout_s=20)


def test_shared_sum_ends_when_a_communicator_aborts():
    def work(comm):
        inner = comm.split(0)
        memory = SharedMemory(inner)
        if comm.rank == 1:
            comm.abort()
            return
        with pytest.raises(PeerLostError):
            memory.reduce_(torch.ones(10))

    run_ranks(2, work, timeout_s=20)


def sum_for_ever(comm, folder):
    """Until rank 1 is lost; then writes how many seconds after it was killed."""
    x = torch.zeros(1 << 20)
    comm.all_reduce(x, algorithm="shared_memory")
    (Path(folder) / f"rank {comm.rank}").touch()
    with pytest.raises(PeerLostError, match=r"rank 1 \(process \d+ on .+\) left; .* start all"):
        while True:
            comm.all_reduce(x, algorithm="shared_memory")
    waited_s = time.time() - (Path(folder) / "killed").stat().st_mtime
    (Path(folder) / f"seconds {comm.rank}").write_text(str(waited_s))


def wait_for(folder, kind, count, within_s=60):
    """Waits until ranks have written so many files of a kind, and a little longer."""
    deadline_s = time.monotonic() + within_s
    while len(list(folder.glob(f"{kind} *"))) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.2)


@pytest.mark.process
def test_shared_sum_ends_when_a_rank_is_killed(tmp_path):
    before = names_in_dev_shm()
    with start_processes(3, sum_for_ever, str(tmp_path), timeout_s=60) as workers:
        wait_for(tmp_path, "rank", 3)
        assert names_in_dev_shm() <= before  # nothing there even while they sum
        (tmp_path / "killed").touch()
        workers.kill(1)
        wait_for(tmp_path, "seconds", 2)
    assert all(float(path.read_text()) < 5 for path in tmp_path.glob("seconds *"))
    assert names_in_dev_shm() <= before


def sum_where_the_first_leaves(comm, folder):
    """Rank 0 has filled its slot when it leaves, so rank 2 waits for rank 1 only, which idles."""
    memory = SharedMemory(comm)
    (Path(folder) / f"rank {comm.rank}").touch()
    if comm.rank == 1:
        time.sleep(60)
    if comm.rank == 0:
        threading.Timer(0.2, memory.close).start()
    with pytest.raises(PeerLostError, match=["was aborted", "", r"rank 1 \(.+\) left"][comm.rank]):
        memory.reduce_(torch.ones(10))
    (Path(folder) / f"seconds {comm.rank}").touch()


@pytest.mark.process
def test_shared_sum_ends_when_a_second_rank_is_killed(tmp_path):
    with start_processes(3, sum_where_the_first_leaves, str(tmp_path)) as workers:
        wait_for(tmp_path, "rank", 3)
        wait_for(tmp_path, "seconds", 1)
        workers.kill(1)
        wait_for(tmp_path, "seconds", 2, within_s=10)


@pytest.mark.process
def test_killed_ranks_leave_no_shared_memory(tmp_path):
    before = names_in_dev_shm()
    with start_processes(2, sum_for_ever, str(tmp_path), timeout_s=60) as workers:
        wait_for(tmp_path, "rank", 2)
        workers.kill()
        assert workers.join(10) == [-9, -9]
    assert names_in_dev_shm() <= before


def sum_values(comm, num_elements):
    return comm.all_reduce(values(comm.rank, num_elements), algorithm="shared_memory")


@pytest.mark.process
def test_shared_sums_between_processes():
    for result in run_processes(3, sum_values, 100_001):
        assert torch.equal(result, in_order(3, 100_001, torch.float32))


# -- where memory cannot be shared ---------------------------------------------------------------


def test_shared_memory_falls_back_between_hosts(caplog):
    def work(comm):
        memory = SharedMemory(comm)
        x = torch.full((5,), comm.rank + 1.0)
        memory.reduce_(x)
        return x.tolist(), memory.fallback.name, memory.sent_bytes

    with caplog.at_level(logging.WARNING, "allstep"):
        assert run_ranks(2, work, local_size=1) == [([3.0] * 5, "native", 20)] * 2
    assert [record.message for record in caplog.records] == [
        "all-reduces use the network, not shared memory: ranks 0 and 1 are not CPU ranks of one "
        "host"
    ]


def test_falls_back_without_memory(caplog, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    def work(comm):
        memory = SharedMemory(comm, slot_bytes=1 << 20)
        x = torch.ones(5)
        memory.reduce_(x)
        return x.tolist()

    with caplog.at_level(logging.WARNING, "allstep"):
        assert run_ranks(3, work) == [[3.0] * 5] * 3
    assert [record.message for record in caplog.records] == [
        "all-reduces use the network, not shared memory: no 12 MiB of memory to share "
        "([Errno 28] No space left on device)"
    ]


def test_falls_back_where_a_mapping_fails(monkeypatch):
    """As where the first rank's file has been cut."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: os.ftruncate(fd, 1))

    def work(comm):
        with pytest.raises(NotShared, match=r"rank 0 cannot map memory of another: mmap length"):
            SharedBuffer.create(comm)

    run_ranks(2, work)


def test_falls_back_where_one_rank_cannot_map(monkeypatch):
    open_file = os.open

    def refuse(path, *flags):
        if "/fd/" in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return open_file(path, *flags)

    monkeypatch.setattr(os, "open", refuse)

    def work(comm):
        with pytest.raises(NotShared, match=r"rank 0 cannot map memory of another: .*permitted"):
            SharedBuffer.create(comm)

    run_ranks(2, work)
