"""A parameter server with a given order of arrivals equals a simulation in one process."""

import copy
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    DisagreementError,
    PeerLostError,
    UsageError,
)
from allstep.exchange import ParameterServer, Stale, Synchronous, attach
from allstep.exchange.shard_server import ShardServer
from allstep.optim import LAMB
from tests.exchange.nets import MakeOptimizer, clone, mlp, states
from tests.exchange.test_faults import wait_for
from tests.helpers.compare import state_difference
from tests.helpers.processes import start_processes
from tests.helpers.ranks import run_ranks

SIZE, NUM_STEPS = 3, 4
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "lamb": lambda m: LAMB(m.parameters(), lr=0.01),
}
# Each rank's requests are in turn a pull and a push, NUM_STEPS of both.
MIXED = [0, 1, 2, 0, 0, 1, 0, 2, 0, 1, 2, 1, 1, 2, 0, 2, 2, 1, 0, 1, 0, 2, 1, 2]
ONE_BY_ONE = [rank for _ in range(NUM_STEPS) for rank in range(SIZE) for _ in ("pull", "push")]


def half_life(num_updates: int) -> float:
    return 0.5 ** (num_updates / 4)


def loss(model: nn.Module, samples: Tensor) -> Tensor:
    return model(samples).square().mean()


@pytest.fixture
def start() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double()


@pytest.fixture
def batches() -> Tensor:
    """[step, rank, sample, feature]"""
    return torch.randn(
        NUM_STEPS, SIZE, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def run(
    start: nn.Module, batches: Tensor, make_optimizer: MakeOptimizer, **options: Any
) -> list[tuple[dict[str, Tensor], dict[int, int]]]:
    """The model and the staleness that each worker has in the end; r trains on batches[:, r]."""

    def worker(comm: Communicator) -> tuple[dict[str, Tensor], dict[int, int]]:
        model = clone(start, comm)
        with ParameterServer(model, comm, make_optimizer(model), **options) as server:
            for batch in batches[:, comm.rank]:
                server.pull()
                loss(model, batch).backward()
                server.push()
        return states(model), server.staleness

    return run_ranks(batches.shape[1], worker)


def simulate(
    start: nn.Module,
    batches: Tensor,
    make_optimizer: MakeOptimizer,
    arrivals: Sequence[int],
    schedule: Callable[[int], float] = lambda num_updates: 1.0,
    staleness_aware: bool = False,
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """The same in one process, of whole models."""
    model = copy.deepcopy(start)
    optimizer = make_optimizer(model)
    base_rate = optimizer.param_groups[0]["lr"]
    pulled: dict[int, tuple[nn.Module, int]] = {}
    counts, num_pushes, num_updates = Counter[int](), Counter[int](), 0
    for rank in arrivals:
        if rank not in pulled:
            pulled[rank] = copy.deepcopy(model), num_updates
            continue
        old, version = pulled.pop(rank)
        gradients = torch.autograd.grad(
            loss(old, batches[num_pushes[rank], rank]), list(old.parameters())
        )
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        staleness = num_updates - version
        slower = max(1, staleness) if staleness_aware else 1
        optimizer.param_groups[0]["lr"] = base_rate * schedule(num_updates) / slower
        optimizer.step()
        num_pushes[rank] += 1
        num_updates += 1
        counts[staleness] += 1
    return states(model), dict(sorted(counts.items()))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"staleness_aware": True}, {"schedule": half_life}],
    ids=["plain", "staleness_aware", "schedule"],
)
def test_given_arrivals_equal_one_process(start, batches, name, options):
    expected, counts = simulate(start, batches, OPTIMIZERS[name], MIXED, **options)
    for state, staleness in run(start, batches, OPTIMIZERS[name], arrivals=MIXED, **options):
        assert state_difference(state, expected) < 1e-12
        assert staleness == {s: SIZE * count for s, count in counts.items()}  # of three shards


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_arrivals_differ(start, batches, name):
    """The control: nobody is late, one worker after the other."""
    (state, staleness), *_ = run(start, batches, OPTIMIZERS[name], arrivals=ONE_BY_ONE)
    in_turn, counts = simulate(start, batches, OPTIMIZERS[name], ONE_BY_ONE)
    assert state_difference(state, in_turn) < 1e-12
    assert set(staleness) == set(counts) == {0}
    mixed, counts = simulate(start, batches, OPTIMIZERS[name], MIXED)
    assert max(counts) > 1
    assert state_difference(state, mixed) > 1e-3


def test_staleness_aware_differs_where_gradients_are_late(start, batches):
    make_optimizer = OPTIMIZERS["momentum"]
    plain, _ = simulate(start, batches, make_optimizer, MIXED)
    aware, _ = simulate(start, batches, make_optimizer, MIXED, staleness_aware=True)
    assert state_difference(aware, plain) > 1e-3


def test_round_robin_can_be_repeated(start, batches):
    make_optimizer = OPTIMIZERS["momentum"]
    in_turn = [*range(SIZE)] * (2 * NUM_STEPS)
    expected, counts = simulate(start, batches, make_optimizer, in_turn)
    (state, _), *_ = run(start, batches, make_optimizer, arrivals=range(SIZE))
    assert state_difference(state, expected) < 1e-12
    assert counts == dict.fromkeys(range(SIZE), NUM_STEPS)


def test_turns_of_ranks_that_have_closed_are_left_out():
    def worker(comm: Communicator) -> dict[int, int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ParameterServer(model, comm, optimizer, arrivals=[0, 0, 1, 1]) as server:
            for _ in range(2 + comm.rank):
                server.pull()
                model(torch.ones(1, 2)).sum().backward()
                server.push()
        return server.staleness

    assert run_ranks(2, worker) == [{0: 2 * 5}] * 2


def test_as_they_arrive_each_push_counts_once(start, batches):
    found = run(start, batches, OPTIMIZERS["momentum"])
    assert sum(found[0][1].values()) == SIZE * SIZE * NUM_STEPS
    for state, staleness in found[1:]:
        assert state_difference(state, found[0][0]) == 0
        assert staleness == found[0][1]


def test_several_backward_passes_and_pulls(start, batches):
    """Gradients add up; what comes later counts its staleness from the last pull."""

    def worker(comm: Communicator) -> tuple[dict[str, Tensor], dict[int, int]]:
        model = clone(start, comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ParameterServer(model, comm, optimizer, arrivals=[0, 0, 0, 1, 1]) as server:
            server.pull()
            for _ in range(2 - comm.rank):
                for batch in batches[:2, comm.rank]:
                    loss(model, batch).backward()
                server.push()
        return states(model), server.staleness

    expected = copy.deepcopy(start)
    for times, rank in ((2, 0), (1, 1)):  # twice of one model, then of the model after that
        summed = sum(loss(expected, batch) for batch in batches[:2, rank])
        gradients = torch.autograd.grad(summed, list(expected.parameters()))
        with torch.no_grad():
            for p, gradient in zip(expected.parameters(), gradients, strict=True):
                p.sub_(0.1 * times * gradient)
    for state, staleness in run_ranks(2, worker):
        assert state_difference(state, states(expected)) < 1e-12
        assert staleness == {0: 4, 1: 2}


class WithBuffer(nn.Module):
    """A parameter that is used, one that is not, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self) -> Tensor:
        return self.used.sum()


def test_unused_parameters_stay_and_buffers_become_their_mean():
    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(WithBuffer(), comm)
        optimizer = torch.optim.SGD([model.used, model.unused], 0.1, weight_decay=0.1)
        with ParameterServer(model, comm, optimizer) as server:
            server.pull()
            assert model.mean == 0  # rank 0's
            model.mean += comm.rank
            model().backward()
            server.push()
            assert model.used.grad is None
        return states(model)

    for state in run_ranks(4, worker):  # two ranks serve nothing
        assert torch.equal(state["unused"], torch.ones(3))
        assert torch.equal(state["frozen"], torch.ones(1))
        assert state["mean"] == 1.5
        assert state["used"].max() < 0.7


def test_one_worker_is_plain_training(start, batches):
    (state, staleness), *_ = run(start, batches[:, :1], OPTIMIZERS["adam"])
    expected, _ = simulate(start, batches, OPTIMIZERS["adam"], [0, 0] * NUM_STEPS)
    assert state_difference(state, expected) < 1e-12
    assert set(staleness) == {0}


def test_the_rate_of_a_scheduler_stays():
    model, comm = nn.Linear(2, 1), Communicator.single_process()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ParameterServer(model, comm, optimizer, schedule=lambda n: 0.0) as server:
        server.pull()
        before = states(model)
        model(torch.ones(1, 2)).sum().backward()
        server.push()
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert state_difference(states(model), before) == 0


# -- what goes wrong -----------------------------------------------------------------------------


def test_refuses_exchanged_gradients():
    comm = Communicator.single_process()
    for policy in (Stale(), Synchronous(compression="exact"), Synchronous(compression="int8")):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        attach(model, comm, policy)
        with pytest.raises(UsageError, match="takes no compression, `exact` and staleness"):
            ParameterServer(model, comm, optimizer)
    late = nn.Linear(2, 1)
    server = ParameterServer(late, comm, torch.optim.SGD(late.parameters(), 0.1))
    attach(late, comm, Stale())
    with server, pytest.raises(UsageError, match="Detach it"):
        server.pull()


def test_takes_the_micro_batches_of_a_lone_exchange():
    model, comm = nn.Linear(2, 1), Communicator.single_process()
    attach(model, comm)
    with ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1)) as server:
        server.pull()
        model(torch.ones(1, 2)).sum().backward()
        server.push()
    assert server.staleness == {0: 1}


def test_refuses_workers_that_share_gradients():
    def worker(comm: Communicator) -> None:
        model = nn.Linear(2, 1)
        attach(model, comm)
        with pytest.raises(UsageError, match="attached over 2 workers"):
            ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1))

    run_ranks(2, worker)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "needs a closure"),
        (lambda m: torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1), "2 parameters that `model`"),
    ],
)
def test_refuses_optimizers(make, message):
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=message):
        ParameterServer(model, Communicator.single_process(), make(model))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_names_of_parameters_go_with_them():
    """They are what an optimizer's errors name."""
    layers = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 3), nn.Linear(3, 1))

    def worker(comm: Communicator) -> list[str]:
        model = copy.deepcopy(layers)
        optimizer = torch.optim.SGD(list(model.named_parameters()), 0.1)
        with ParameterServer(model, comm, optimizer):
            (group,) = optimizer.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True):
                assert torch.equal(p, model.get_parameter(name))
            return group["param_names"]

    first, second = run_ranks(2, worker)
    assert {*first, *second} == {name for name, _ in layers.named_parameters()}
    assert first and second


def test_refuses_parameters_without_a_shape():
    model = nn.LazyLinear(1)
    with pytest.raises(UsageError, match="`weight` has no shape yet"):
        ParameterServer(
            model, Communicator.single_process(), torch.optim.SGD(model.parameters(), 0.1)
        )


def test_refuses_a_model_on_an_accelerator():
    model = nn.Linear(2, 1, device="meta")
    comm = Communicator.single_process(device="cuda")
    with pytest.raises(UsageError, match="is on cuda"):
        ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1))


def test_refuses_a_used_optimizer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="state of earlier steps"):
        ParameterServer(model, Communicator.single_process(), optimizer)


def test_refuses_calls_out_of_order():
    model = nn.Linear(2, 1)
    comm = Communicator.single_process()
    server = ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1))
    outside = r"`pull` was called outside of `with ParameterServer\(...\) as server:`"
    with pytest.raises(UsageError, match=outside):  # the last pushes would be left out
        server.pull()
    with server, pytest.raises(UsageError, match="before the first `pull`"):
        server.push()
    with pytest.raises(UsageError, match=outside):
        server.pull()


def test_refuses_sparse_gradients():
    model = nn.Embedding(3, 2, sparse=True)
    comm = Communicator.single_process()
    with ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1)) as server:
        server.pull()
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match="sparse gradient"):
            server.push()


def test_ranks_that_disagree():
    def worker(comm: Communicator) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(DisagreementError, match="`staleness_aware` is False on rank 0; True"):
            ParameterServer(model, comm, optimizer, staleness_aware=comm.rank == 1)

    run_ranks(2, worker)


def test_a_rank_that_fails_fails_the_others():
    def worker(comm: Communicator) -> None:
        model = nn.Linear(2, 1)
        with ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1)) as server:
            for step in range(1_000_000):
                if comm.rank == 1 and step == 3:
                    raise ZeroDivisionError
                server.pull()
                model(torch.ones(1, 2)).sum().backward()
                server.push()

    def outcome(comm: Communicator) -> type[BaseException] | None:
        try:
            worker(comm)
        except (ZeroDivisionError, CommunicationError) as error:
            return type(error)
        return None

    assert run_ranks(3, outcome) == [PeerLostError, ZeroDivisionError, PeerLostError]


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("in the optimizer")


def test_an_update_that_fails_is_the_error_of_its_server():
    def worker(comm: Communicator) -> type[BaseException] | None:
        model = nn.Linear(2, 1)
        optimizer = Failing(model.parameters(), 0.1)
        optimizer.step = optimizer.step if comm.rank else lambda: None
        try:
            with ParameterServer(model, comm, optimizer, arrivals=[0] * 100) as server:
                while True:
                    server.pull()
                    model(torch.ones(1, 2)).sum().backward()
                    server.push()
        except (ZeroDivisionError, CommunicationError) as error:
            return type(error)

    assert run_ranks(2, worker) == [PeerLostError, ZeroDivisionError]


def test_a_turn_that_does_not_come_ends_with_the_timeout():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    server = ShardServer(
        list(model.parameters()), optimizer, lambda n: 1.0, False, deque([1]), timeout_s=0.01
    )
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited 0.01 s for one of rank 1"):
        server.pull(0)


def test_refuses_arrivals_of_nobody():
    model, comm = nn.Linear(2, 1), Communicator.single_process()
    with pytest.raises(UsageError, match="`arrivals`"):
        ParameterServer(model, comm, torch.optim.SGD(model.parameters(), 0.1), arrivals=[1])


def push_for_ever(comm: Communicator, folder: str) -> None:
    """Until a peer is lost."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with pytest.raises(PeerLostError), ParameterServer(model, comm, optimizer) as server:
        for step in range(1_000_000):
            server.pull()
            model(torch.ones(2, 100)).sum().backward()
            server.push()
            if step == 3:
                (Path(folder) / f"rank {comm.rank}").touch()
    (Path(folder) / f"ended {comm.rank}").touch()


@pytest.mark.process
def test_a_killed_worker_raises_on_the_others(tmp_path):
    with start_processes(3, push_for_ever, str(tmp_path), timeout_s=60) as workers:
        wait_for(tmp_path, "rank", 3)
        workers.kill(1)
        wait_for(tmp_path, "ended", 2)
