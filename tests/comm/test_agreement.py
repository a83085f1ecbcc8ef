"""Collectives whose ranks want different things: what `check` compares, and what it costs."""

import pytest
import torch

from allstep.errors import CommunicationError, DisagreementError
from tests.helpers.ranks import run_ranks


def agree_on(comm, *dtypes):
    """Lets all ranks reduce what they may mix up later: from now on nothing is compared."""
    for dtype in dtypes or (torch.float32,):
        for op in ("sum", "max"):
            comm.all_reduce(torch.ones(4, dtype=dtype), op)
            comm.reduce_scatter(torch.ones(4, dtype=dtype), op)


def x_of(comm):
    return torch.full((4,), comm.rank + 1.0)


UNLIKE_REDUCTIONS = {
    "op": lambda c: c.all_reduce(x_of(c), "max" if c.rank else "sum", check=True),
    "dtype": lambda c: c.all_reduce(x_of(c).to([torch.int32, torch.float32][c.rank]), check=True),
    "new to one": lambda c: c.all_reduce(torch.ones(4 + c.rank), check=True),
    "algorithm": lambda c: c.all_reduce(x_of(c), algorithm="ring" if c.rank else None, check=True),
    "in parts": lambda c: c.reduce_scatter(x_of(c), "max" if c.rank else "sum", check=True),
    "verb": lambda c: (c.all_reduce if c.rank else c.reduce_scatter)(x_of(c), check=True),
}


@pytest.mark.parametrize("name", UNLIKE_REDUCTIONS)
def test_check_tells_every_rank_of_unlike_reductions(name):
    """Of such as each of them has made before, but one that is new to one rank only."""

    def work(comm):
        agree_on(comm, torch.float32, torch.int32)
        with pytest.raises(DisagreementError, match=rf"rank {comm.rank} (wants: `|expected )"):
            UNLIKE_REDUCTIONS[name](comm)
        comm.barrier()  # nobody was left waiting, and the communicator lives on
        return comm.all_reduce(x_of(comm), check=True).tolist()

    assert run_ranks(2, work) == [[3.0] * 4] * 2


def test_without_check_different_ops_give_wrong_values():
    """What `check` is for."""

    def work(comm):
        agree_on(comm)
        return comm.all_reduce(x_of(comm), "max" if comm.rank else "sum").tolist()

    assert run_ranks(2, work)[0] not in ([3.0] * 4, [2.0] * 4)


UNLIKE_MOVEMENTS = {
    "broadcast from": lambda c: c.broadcast(x_of(c), root=c.rank % 2, check=True),
    "broadcast to": lambda c: c.broadcast(torch.ones(3 + c.rank % 2), check=True),
    "broadcast into": lambda c: c.broadcast([x_of(c), None, x_of(c).double()][c.rank], check=True),
    "gather": lambda c: c.gather(x_of(c), root=c.rank % 2, check=True),
    "scatter": lambda c: c.scatter([x_of(c)] * 3, root=c.rank % 2, check=True),
    "rows": lambda c: c.all_gather_into_tensor(torch.ones(3 + c.rank % 2), check=True),
    "rows' dtype": lambda c: c.all_to_all_single(
        torch.ones(3, dtype=[torch.int32, torch.float32][c.rank % 2]), check=True
    ),
    "verb": lambda c: (
        c.all_to_all([x_of(c)] * 3, check=True) if c.rank else c.all_gather(x_of(c), check=True)
    ),
    "verb and route": lambda c: (
        c.gather(x_of(c), check=True) if c.rank else c.all_reduce(x_of(c), check=True)
    ),
    "check": lambda c: c.all_gather(x_of(c), check=c.rank == 0),
}


@pytest.mark.parametrize("name", UNLIKE_MOVEMENTS)
def test_check_tells_every_rank_of_unlike_movements(name):
    def work(comm):
        with pytest.raises(
            DisagreementError, match=rf"(rank {comm.rank} (wants:|expected)|ranks \d, \d want:) "
        ):
            UNLIKE_MOVEMENTS[name](comm)
        comm.barrier()

    run_ranks(3, work)


def test_check_lets_ranks_that_agree_pass():
    def work(comm):
        x = x_of(comm)
        assert comm.all_reduce(x.clone(), "max", algorithm=None, check=True).tolist() == [3.0] * 4
        assert comm.all_reduce(x.clone(), algorithm="ring", check=True).tolist() == [6.0] * 4
        assert comm.reduce_scatter((x,) * 3, check=True).tolist() == [6.0] * 4
        assert comm.broadcast(x.clone() if comm.rank else x, check=True).tolist() == [1.0] * 4
        assert comm.broadcast(None if comm.rank else x, check=True).tolist() == [1.0] * 4
        everyone = [[1.0] * 4, [2.0] * 4, [3.0] * 4]
        ragged = comm.all_gather(x[: comm.rank], check=True)
        assert [len(y) for y in ragged] == [0, 1, 2]
        assert comm.all_gather_into_tensor(x, check=True).tolist() == everyone
        assert comm.all_to_all_single(x[:3], check=True).tolist() == [1.0, 2.0, 3.0]
        assert [y.tolist() for y in comm.all_to_all([x] * 3, check=True)] == everyone
        assert len(comm.gather(x, root=1, check=True) or ()) == (3 if comm.rank == 1 else 0)
        assert comm.scatter([x] * 3 if comm.rank == 1 else None, root=1, check=True)[0] == 2

    run_ranks(3, work)


def test_check_costs_one_message_of_one_size():
    """Whatever is compared; without it none but for what is new."""
    many = tuple(torch.ones(i % 3, 2) for i in range(200))

    def work(comm):
        gather, bodies = comm.messages.all_gather, []

        def counted(body, verb, **options):
            bodies.append(len(body))
            return gather(body, verb, **options)

        comm.messages.all_gather = counted
        sizes = []
        for check in (False, None, None, True, True, False):
            bodies.clear()
            comm.all_reduce(many, check=check)
            sizes.append(list(bodies))
        return sizes

    assert run_ranks(2, work) == [[[], [16], [], [16], [16], []]] * 2


@pytest.mark.parametrize("algorithm", [None, "ring", "shared_memory"])
def test_check_on_one_rank_only_is_an_error_in_time(algorithm):
    def work(comm):
        comm.all_reduce(x_of(comm), algorithm=algorithm)
        comm.set_timeout(0.5)
        with pytest.raises(CommunicationError):
            comm.all_reduce(x_of(comm), algorithm=algorithm, check=comm.rank == 0)

    run_ranks(2, work)
