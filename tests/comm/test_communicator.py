"""Groups within groups, ends, timeouts and failures."""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import ALGORITHMS
from allstep.comm.failures import translated
from allstep.comm.missing import RankNames, find_missing_ranks
from allstep.comm.shared_memory import Mailboxes
from allstep.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    DisagreementError,
    PeerLostError,
    UsageError,
)
from tests.helpers.ranks import run_ranks


def test_split_orders_by_key_then_rank_and_none_joins_nothing():
    def work(comm):
        color = None if comm.rank == 4 else comm.rank % 2
        part = comm.split(color, key=-comm.rank if comm.rank < 4 else 0)
        if part is None:
            return None
        return part.rank, part.size, part.all_gather_object(comm.rank)

    even, odd = [2, 0], [3, 1, 5]  # keys: 0, -1, -2, -3, none, 0
    expected = [(1, 2, even), (1, 3, odd), (0, 2, even), (0, 3, odd), None, (2, 3, odd)]
    assert run_ranks(6, work) == expected


def test_a_bool_is_the_color_that_its_number_is():
    def work(comm):
        return comm.split(comm.rank == 1 if comm.rank < 2 else comm.rank - 2).all_gather_object(
            comm.rank
        )

    assert run_ranks(4, work, timeout_s=5.0) == [[0, 2], [1, 3]] * 2


def test_a_split_of_a_split_knows_its_nodes_and_works():
    def work(comm):
        half = comm.split(comm.rank // 4)
        pair = half.split(half.rank % 2)
        again = half.split(half.rank % 2)  # the same question twice: another group
        total = pair.all_reduce(torch.tensor(comm.rank)).item()
        assert again.all_gather_object(comm.rank) == pair.all_gather_object(comm.rank)
        comm.barrier()
        return total, pair.node_rank, pair.num_nodes, pair.local_rank, pair.local_size

    results = run_ranks(8, work, local_size=2)
    assert [r[0] for r in results] == [2, 4, 2, 4, 10, 12, 10, 12]
    first, second = (0, 2, 0, 1), (1, 2, 0, 1)
    assert [r[1:] for r in results] == [first, first, second, second] * 2


def test_split_by_node():
    def work(comm):
        node = comm.split(comm.node_rank)
        return node.rank == comm.local_rank and node.size == node.local_size == comm.local_size

    assert all(run_ranks(6, work, local_size=3))


def test_threads_of_gloo_are_patient():
    """[Note: Gloo's threads]"""
    before = set(os.listdir("/proc/self/task"))

    def policies(comm):
        comm.barrier()  # all ranks' threads are there
        names = {
            task: Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")
        }
        of_gloo = [t for t, name in names.items() if "gloo" in name.read_text() and t not in before]
        found = [os.sched_getscheduler(int(task)) for task in of_gloo]
        comm.barrier()
        return os.sched_getscheduler(0), set(found)

    assert run_ranks(2, policies) == 2 * [(os.SCHED_OTHER, {os.SCHED_BATCH})]


def test_split_of_a_single_process():
    comm = Communicator.single_process()
    assert comm.split(None) is None
    assert comm.split(3).all_reduce(torch.ones(1)).item() == 1


@pytest.mark.parametrize("arguments", [("red",), (0, "first"), (0, None)])
def test_split_refuses_what_is_no_number(arguments):
    with pytest.raises(UsageError, match=r"`(color|key)` \(=.*\) must be an int"):
        Communicator.single_process().split(*arguments)


def test_close_ends_a_communicator():
    def work(comm):
        part = comm.split(0)
        assert part.process_group is not None
        with part:
            part.barrier()
        assert part.process_group is None
        part.close()
        with pytest.raises(UsageError, match="`all_reduce` was called on a closed communicator"):
            part.all_reduce(torch.ones(1))
        with pytest.raises(UsageError, match="`split` was called on a closed communicator"):
            part.split(0)
        comm.barrier()

    run_ranks(2, work)


def test_a_context_left_by_an_error_aborts():
    def work(comm):
        with comm:
            if comm.rank == 1:
                raise KeyError("mine")
            comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, work)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_an_error_on_one_rank_ends_the_others_at_once(n):
    seen: list[BaseException] = []

    def work(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("rank 1")
        try:
            while True:
                comm.barrier()
        except CommunicationError as error:
            seen.append(error)
            raise

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1") as caught:
        run_ranks(n, work, timeout_s=60)
    assert time.monotonic() - start < 5
    assert caught.value.__notes__ == [f"on rank 1 of {n}"]
    assert [type(error) for error in seen] == [PeerLostError] * (n - 1)
    assert "`barrier` on rank" in str(seen[0])
    assert re.search(r": (rank 1|one of rank .*) closed its connection; it failed", str(seen[0]))
    assert "then start all workers again; a run that keeps checkpoints goes on" in str(seen[0])


def test_an_error_on_one_rank_ends_receives_from_it():
    def work(comm):
        if comm.rank == 0:
            raise ZeroDivisionError
        comm.recv(0)

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, work, timeout_s=60)


def test_timeout_names_the_late_rank():
    late = threading.Event()

    def work(comm):
        if comm.rank == 2:
            late.wait(20)
            return
        try:
            if comm.rank == 0:
                comm.all_reduce(torch.ones(2))
            else:
                comm.barrier()
        finally:
            late.set()

    with pytest.raises(CollectiveTimeoutError) as caught:
        run_ranks(3, work, timeout_s=2)
    message = str(caught.value)
    assert "did not finish within 2 s" in message
    assert "raise `timeout_s`" in message
    assert "missing: rank 2." in message


def test_a_call_that_ends_with_one_that_timed_out_says_who_is_missing():
    """Gloo ends all calls of a process when one times out; the later of two is waited for first."""
    is_over = threading.Event()

    def work(comm):
        if comm.rank == 1:
            is_over.wait(20)
            return ""
        first = comm.all_reduce(torch.ones(2), async_op=True, check=False)
        time.sleep(0.1)
        second = comm.all_reduce(torch.ones(2), async_op=True, check=False)
        with pytest.raises(CollectiveTimeoutError) as caught:
            second.wait()
        with pytest.raises(CollectiveTimeoutError):
            first.wait()
        is_over.set()
        return str(caught.value)

    message = run_ranks(2, work, timeout_s=0.5)[0]
    assert "did not finish within 0.5 s" in message and "missing: rank 1." in message


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("recv", lambda comm: comm.recv(1)),
        ("recv", lambda comm: comm.recv(1, async_op=True).wait()),
        ("send", lambda comm: comm.send(torch.zeros(1 << 22), 1)),
        ("gather", lambda comm: comm.gather(torch.zeros(1))),
        ("broadcast_object", lambda comm: comm.broadcast_object(root=1)),
        ("all_to_all", lambda comm: comm.all_to_all([torch.zeros(1)] * 2)),
        ("reduce_scatter", lambda comm: comm.reduce_scatter(torch.zeros(2))),
        ("split", lambda comm: comm.split(0)),
    ],
)
def test_every_verb_ends_after_timeout_s(verb, call):
    late = threading.Event()

    def work(comm):
        if comm.rank == 1:
            late.wait(20)
            return
        try:
            call(comm)
        finally:
            late.set()

    with pytest.raises(CollectiveTimeoutError, match=f"`{verb}` on rank 0 of 2"):
        run_ranks(2, work, timeout_s=0.3)


def test_an_interrupted_call_is_no_timeout():
    """Whoever interrupts knows of a rank that is lost."""
    is_over = threading.Event()

    def work(comm):
        if comm.rank == 1:
            is_over.wait(20)
            return
        interrupting = threading.Timer(0.1, comm.interrupt)
        interrupting.start()
        with pytest.raises(PeerLostError, match=r"`recv` on rank 0 of 2: rank 1 closed"):
            comm.recv(1)
        is_over.set()
        interrupting.join()

    run_ranks(2, work)


def test_all_reduce_work_can_be_waited_for_again():
    go = threading.Event()

    def work(comm):
        x = torch.ones(3)
        comm.all_reduce(x)
        if comm.rank == 1:
            go.wait(20)
        work = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"within 0\.05 s"):
                work.wait(timeout_s=0.05)
            go.set()
        return work.wait().tolist()

    assert run_ranks(2, work) == [[4, 4, 4]] * 2


def test_mean_work_waited_for_again_divides_once():
    """Of two tensors the first has come when the wait for the second is given up, three times."""
    first_came, go = threading.Event(), threading.Event()

    def work(comm):
        x, y = torch.ones(2), torch.ones(3)
        for known in ((x, y), x, y):
            comm.all_reduce(known, "mean")  # agreed on from now on
        x, y = torch.full((2,), 1.0 + comm.rank), torch.full((3,), 3.0 + comm.rank)
        if comm.rank == 1:
            comm.all_reduce(x, "mean")
            first_came.set()
            go.wait(20)
            comm.all_reduce(y, "mean")
            return None
        work = comm.all_reduce((x, y), "mean", async_op=True)
        first_came.wait(20)
        for _ in range(3):
            with pytest.raises(CollectiveTimeoutError, match=r"within 0\.2 s"):
                work.wait(timeout_s=0.2)
        go.set()
        return [z.tolist() for z in work.wait()]

    assert run_ranks(2, work)[0] == [[1.5] * 2, [3.5] * 3]


def test_recv_work_can_be_waited_for_again():
    go = threading.Event()

    def work(comm):
        if comm.rank == 1:
            go.wait(20)
            comm.send(torch.ones(1), 0)
            return
        work = comm.recv(1, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"`recv` from rank 1.*0\.05 s.*again"):
            work.wait(timeout_s=0.05)
        go.set()
        assert work.wait().item() == 1

    run_ranks(2, work)


def test_send_work_can_be_waited_for_again():
    """And the connection lives on."""
    go = threading.Event()

    def work(comm):
        x = torch.ones(1 << 22)  # more than what lies between two sockets
        if comm.rank == 1:
            go.wait(20)
            assert comm.recv(0).sum() == len(x)
            comm.send(x[:1], 0)
            return
        work = comm.send(x, 1, async_op=True)
        for timeout_s in (0.05, 0.1):
            with pytest.raises(CollectiveTimeoutError, match=r"`send` on rank 0.*0\.\d+ s.*again"):
                work.wait(timeout_s)
        go.set()
        work.wait(20)
        work.wait()
        assert comm.recv(1).item() == 1

    run_ranks(2, work)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5", True, None])
def test_timeout_s_must_be_positive(timeout_s):
    with pytest.raises(UsageError, match=r"`timeout_s` \(=.*\) must be above 0"):
        Communicator.single_process(timeout_s=timeout_s)


def test_other_errors_of_a_backend_pass_as_they_are():
    with pytest.raises(RuntimeError, match="out of cheese"), translated("x", 0, 1, 1.0):
        raise RuntimeError("out of cheese")


class DeadStore:
    def set(self, key, value):
        raise RuntimeError("gone")

    def check(self, keys):
        raise RuntimeError("gone")


def test_find_missing_ranks_with_a_dead_store_finds_nothing():
    assert str(find_missing_ranks(RankNames(range(2), 0, 2, DeadStore()), "barrier")) == ""


# -- who is missing, where groups have ranks of their own ------------------------------------------


def test_missing_rank_of_a_split_group_has_its_first_number():
    """And nobody who is not asked for: the others are in no call, and need not be."""
    is_over = threading.Event()

    def work(comm):
        pair = comm.split(comm.rank // 2)
        if comm.rank != 2:
            is_over.wait(20)
            return ""
        pair.set_timeout(0.5)
        with pytest.raises(CollectiveTimeoutError) as caught:
            pair.barrier()
        is_over.set()
        return str(caught.value)

    message = run_ranks(4, work)[2]
    assert message.startswith("`barrier` on rank 2 of 4 did not finish within 0.5 s")
    assert message.endswith(
        "Waiting: rank 2 in `barrier`; missing: rank 3. Last met: rank 3 in `split`."
    )


@pytest.mark.parametrize("absent", [2, 3])
@pytest.mark.parametrize("algorithm", ["hierarchical", "two_dimensional"])
def test_every_rank_of_every_node_names_the_missing_rank(algorithm, absent):
    """Some wait for it, some for those who wait for it; the timeout is the one set last."""
    is_over, others_are_here = threading.Barrier(4), threading.Barrier(3)

    def work(comm):
        channel = comm.split(0)
        sums = ALGORITHMS[algorithm](channel)
        sums.reduce_(torch.ones(1001))
        comm.set_timeout(3)
        error = None
        if comm.rank != absent:
            others_are_here.wait(60)
            with pytest.raises(CommunicationError) as caught:
                sums.reduce_(torch.ones(1001))
            error = caught.value
        is_over.wait(60)
        return error

    errors = run_ranks(4, work, local_size=2, timeout_s=60)
    for rank in {0, 1, 2, 3} - {absent}:
        message = str(errors[rank])
        assert f"`all_reduce` on rank {rank} of 4" in message
        if not isinstance(errors[rank], PeerLostError):  # of a rank whose time was over before
            assert "did not finish within 3 s" in message
            assert f"; missing: rank {absent}. Last met: rank {absent} in `all_reduce`." in message
    assert any(isinstance(error, CollectiveTimeoutError) for error in errors)


def test_missing_rank_that_was_stuck_before():
    is_over = threading.Event()

    def work(comm):
        first = comm.split(0)
        first.set_timeout(0.3)
        with pytest.raises(CommunicationError):
            first.barrier() if comm.rank else first.broadcast_object(1)
        again = comm.split(0)
        again.set_timeout(0.3)
        if comm.rank == 1:
            is_over.wait(20)
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            again.barrier()
        is_over.set()
        return str(caught.value)

    assert "missing: rank 1." in run_ranks(2, work, timeout_s=20)[0]


def test_disagreement_in_a_split_group_has_first_numbers():
    def work(comm):
        pair = comm.split(comm.rank // 2)
        if comm.rank < 2:
            return
        with pytest.raises(DisagreementError, match=r"rank 2 wants: .* rank 3 wants: `all_reduce`"):
            pair.all_reduce(torch.ones(comm.rank))
        with pytest.raises(DisagreementError, match=r"rank [23] expected .* where rank [32] call"):
            pair.all_gather_object(1) if comm.rank == 2 else pair.all_gather(torch.ones(1))
        with pytest.raises(DisagreementError, match=r"rank 2 wants: share \d+ bytes"):
            Mailboxes.create(pair, 1 << (10 + comm.rank))

    run_ranks(4, work)


def test_set_timeout_reaches_split_groups():
    def work(comm):
        half = comm.split(comm.rank // 2)
        lone = half.split(half.rank)
        comm.set_timeout(7)
        half.set_timeout(5)
        return comm.timeout_s, half.timeout_s, lone.timeout_s, lone.wire.timeout_s

    assert run_ranks(4, work) == [(7, 5, 5, 5)] * 4
