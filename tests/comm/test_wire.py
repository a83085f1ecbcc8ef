"""The `Wire` protocol: what is said over a simulated network is what torch's groups say."""

import pytest
import torch

from allstep.comm.algorithms import make_algorithm
from allstep.errors import DisagreementError
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated import run_simulated


def say_everything(comm):
    """All verbs, with values that depend on ranks."""
    x = torch.arange(6.0) + 10 * comm.rank
    work = comm.all_reduce(x.clone(), "max", async_op=True)
    found = [
        comm.all_reduce((x.clone(), x[:2].double()), "mean"),
        comm.reduce_scatter(x[: comm.size].clone()),
        comm.all_gather((x[: comm.rank], x)),
        comm.all_to_all([x[:other] for other in range(comm.size)]),
        comm.gather(x, root=1),
        comm.scatter([x, x[:1], x[:2]] if comm.rank == 2 else None, root=2),
        comm.broadcast(x if comm.rank == 0 else None),
        comm.all_gather_into_tensor(x),
        comm.all_to_all_single(x[: comm.size]),
        comm.all_gather_object({"rank": comm.rank, "long": b"x" * 300}),
        comm.all_reduce_object({"sum": comm.rank}),
        work.wait(),
    ]
    comm.send(x, (comm.rank + 1) % 3) if comm.rank == 0 else None
    if comm.rank == 1:
        found.append(comm.recv(0))
    pair = comm.split(0 if comm.rank < 2 else None, key=-comm.rank)
    if pair is not None:
        found.append((pair.rank, pair.all_reduce(x[:1].clone())))
    comm.barrier()
    return found


def test_all_verbs_over_a_simulated_network():
    expected = run_ranks(3, say_everything)
    for found, wanted in zip(run_simulated(3, say_everything, local_size=3), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["native", "ring", "halving_doubling", "recursive_doubling", "hierarchical"]
)
def test_algorithms_over_a_simulated_network(name):
    def work(comm):
        x = torch.arange(9.0) * (1 + comm.rank)
        make_algorithm(name, comm).reduce_(x)
        return x

    for x in run_simulated(4, work, local_size=2):
        torch.testing.assert_close(x, torch.arange(9.0) * 10, rtol=0, atol=0)


def test_disagreement_over_a_simulated_network():
    def work(comm):
        with pytest.raises(DisagreementError, match=r"rank 0 wants: .* with sum .*rank 1 wants: "):
            comm.all_reduce(torch.ones(2), "max" if comm.rank else "sum")
        return comm.all_reduce(torch.ones(1)).item()

    assert run_simulated(2, work) == [2.0, 2.0]
