"""Experts on their workers in a model that FSDP2 shards along the same axis: that of one worker."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.comm import Mesh
from allstep.errors import DisagreementError
from allstep.nn import MixtureOfExperts
from tests.helpers.compare import differing_names
from tests.helpers.divided import whole_state
from tests.helpers.messages import check_messages, refused
from tests.helpers.processes import run_processes
from tests.helpers.versions import needs_torch_2_13
from tests.nn.test_experts_of_shards import (
    CONTROLS,
    EXACT,
    Routed,
    State,
    by_sgd,
    difference,
    shortly,
    train,
)

pytestmark = pytest.mark.process


def shard(model: Routed, mesh: Mesh[Communicator], num_copies: int = 1) -> None:
    """The layer with the router for itself, and the rest together; copies x shards along `data`."""
    along_data = mesh.device_mesh()["data"]
    if num_copies > 1:
        lengths = {"replicate": num_copies, "shard": mesh["data"].size // num_copies}
        axes = mesh.comm.mesh(**lengths, tensor=mesh["tensor"].size)
        along_data = axes.device_mesh()["replicate", "shard"]
    own = set(model.mixture.experts.parameters())
    for module in (model.mixture, model):
        fully_shard(module, mesh=along_data, ignored_params=own)


def shard_router(model: Routed, mesh: Mesh[Communicator]) -> None:
    """The router for itself, too."""
    fully_shard(model.mixture.router, mesh=mesh.device_mesh()["data"])
    shard(model, mesh)


VARIANTS: dict[str, Callable[..., State]] = {
    "adamw": train,
    "short": partial(shortly, num=42),  # an epoch's last global batch leaves workers without any
    "lamb, weights": partial(shortly, kind=allstep.optim.LAMB, weighs=True),
    "two passes": partial(train, num_passes=2, num_epochs=2),
}


def variants(comm: Communicator, num_tensor: int, num_copies: int) -> dict[str, State]:
    sharded = partial(shard, num_copies=num_copies)
    return {
        name: run(comm, num_tensor, shard=sharded) for name, run in (VARIANTS | CONTROLS).items()
    }


@needs_torch_2_13
@pytest.mark.parametrize(
    ("size", "num_tensor", "num_copies"),
    [
        (2, 1, 1),
        pytest.param(8, 2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 1, marks=pytest.mark.long),
        pytest.param(4, 1, 2, marks=pytest.mark.long),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
    ],
)
def test_sharded_model_with_experts_is_that_of_one_worker(
    size: int, num_tensor: int, num_copies: int
) -> None:
    """With dropout, a capacity, clipping; of five micro-batches some workers have none."""
    alone = Communicator.single_process()
    expected = {name: run(alone, 1) for name, run in VARIANTS.items()}
    of_sgd = by_sgd(alone, 1)
    for found in run_processes(size, variants, num_tensor, num_copies, timeout_s=400):
        for name, state in expected.items():
            assert difference(found[name], state) < 1e-10, name
        for name in CONTROLS:
            assert difference(found[name], of_sgd) > 1e-6, name


@needs_torch_2_13
def test_a_router_that_is_sharded_by_itself() -> None:
    """Also where a worker without a micro-batch only serves the others' tokens."""
    run = partial(shortly, num=42)
    expected = run(Communicator.single_process(), 1)
    for found in run_processes(2, partial(run, shard=shard_router), 1):
        assert difference(found, expected) < 1e-10


def exactly(comm: Communicator, num_tensor: int, num_copies: int = 1) -> list[State]:
    """Clipped AdamW, LAMB on sums with weights, short steps; and float sums."""
    run = partial(shortly, comm, num_tensor, shard=partial(shard, num_copies=num_copies))
    exact = partial(run, policy=EXACT)
    return [exact(), exact(kind=allstep.optim.LAMB, weighs=True), exact(num=42), run()]


@needs_torch_2_13
@pytest.mark.parametrize(
    ("size", "num_tensor", "num_copies"),
    [
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
        pytest.param(8, 2, 2, marks=pytest.mark.long),
    ],
)
def test_exact_sums_have_the_bits_of_one_worker(
    size: int, num_tensor: int, num_copies: int
) -> None:
    """With layers divided along `tensor`, those of the workers that divide them alone."""
    expected = run_processes(num_tensor, exactly, num_tensor, timeout_s=200)
    for rank, found in enumerate(
        run_processes(size, exactly, num_tensor, num_copies, timeout_s=400)
    ):
        *exact, of_floats = [
            differing_names(state, {name: of_one[name] for name in state})  # it has all experts
            for state, of_one in zip(found, expected[rank % num_tensor], strict=True)
        ]
        assert exact == [[], [], []]
        assert of_floats


def trained_late(comm: Communicator, policy: allstep.Synchronous) -> State:
    """With experts that are frozen until the third step; clipped, of sums with weights."""
    torch.manual_seed(0)
    model = Routed(comm)
    if dist.is_initialized():
        shard(model, comm.mesh(data=comm.size, tensor=1))
    model.mixture.experts.requires_grad_(False)
    exchange = allstep.attach(model, comm, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    given = TensorDataset(*(torch.randn(60, 3, 6, dtype=torch.float64) for _ in range(2)))
    for batch in allstep.steps(
        allstep.data.loader(given, comm, global_batch=12, micro_batch=4, seed=3), exchange
    ):
        if batch.step == 2:
            model.mixture.experts.requires_grad_(True)
        for x, target in batch:
            y, balance_loss = model(x)
            error = (y - target).square().mean((1, 2))
            batch.backward(error.sum() + len(x) * balance_loss, weight=len(x))
        exchange.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


@needs_torch_2_13
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(allstep.Synchronous(), marks=pytest.mark.slow, id="float"),
        pytest.param(EXACT, id="exact"),
    ],
)
def test_experts_that_are_trained_later(policy: allstep.Synchronous) -> None:
    """Also a lone worker's, which are no shards of FSDP2 either."""
    expected = trained_late(Communicator.single_process(), policy)
    for size in (1, 2):
        for state in run_processes(size, trained_late, policy):
            assert difference(state, expected) < 1e-10


def kept(comm: Communicator, num_tensor: int, run_dir: Path, num_epochs: int) -> State:
    return train(comm, num_tensor, shard=shard, run_dir=run_dir, num_epochs=num_epochs)


@pytest.mark.slow
def test_sharded_model_with_experts_goes_on_on_other_meshes(tmp_path: Path) -> None:
    """From a checkpoint of 2 x 2 (data x tensor)."""
    alone = Communicator.single_process()
    expected = kept(alone, 1, tmp_path / "straight", 4)
    run_processes(4, kept, 2, tmp_path / "run", 2, timeout_s=200)
    for size, num_tensor in ((4, 1), (2, 2), (1, 1)):
        folder = tmp_path / f"{size}-{num_tensor}"
        shutil.copytree(tmp_path / "run", folder)
        for state in run_processes(size, kept, num_tensor, folder, 4, timeout_s=200):
            assert difference(state, expected) < 1e-10


def chosen_and_trained(comm: Communicator) -> list[tuple[set[int], set[int]]]:
    """Experts that were chosen by any worker, and that have a gradient here, of each step."""
    torch.manual_seed(0)
    model = MixtureOfExperts(lambda: nn.Linear(2, 2), comm, 2, num_experts=2)
    with torch.no_grad():
        model.router.weight.copy_(9 * torch.eye(2))  # the larger feature chooses
    own = set(model.experts.parameters())
    fully_shard(model, mesh=comm.mesh(data=comm.size).device_mesh(), ignored_params=own)
    exchange, found = allstep.attach(model, comm), []
    given = TensorDataset(torch.eye(2).repeat(3, 1)[:5])
    loader = allstep.data.loader(given, comm, global_batch=2, micro_batch=1)
    for _ in range(4):
        for batch in allstep.steps(loader, exchange):
            chosen = set()
            for (x,) in batch:
                chosen.add(int(x.argmax()))
                y, balance_loss = model(x)
                batch.backward(y.square().mean() + balance_loss)
            by_rank = comm.all_gather_object(chosen)
            trained = {
                int(n) for n, expert in model.experts.items() if expert.weight.grad is not None
            }
            found.append((set().union(*by_rank), trained))
            model.zero_grad()
    return found


@needs_torch_2_13
def test_expert_that_nobody_chose_gets_no_gradient() -> None:
    """Also where a worker without a micro-batch passes another of its own again."""
    by_worker = run_processes(2, chosen_and_trained)
    assert any(len(chosen) == 1 for chosen, _ in by_worker[0])
    for rank, steps in enumerate(by_worker):
        assert all(trained == chosen & {rank} for chosen, trained in steps)


def mistaken(comm: Communicator) -> str:
    """What each is told where one worker has put a hook on an expert's parameter."""
    model = Routed(comm)
    shard(model, comm.mesh(data=comm.size, tensor=1))
    exchange = allstep.attach(model, comm, EXACT)
    if comm.rank == 0:
        next(model.mixture.experts.parameters()).register_hook(lambda gradient: gradient)
    given = TensorDataset(torch.randn(8, 3, 6, dtype=torch.float64))
    loader = allstep.data.loader(given, comm, global_batch=8, micro_batch=4)
    with pytest.raises((UsageError, DisagreementError)) as error:
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                y, balance_loss = model(x)
                batch.backward(y.square().mean() + balance_loss)
    return str(error.value)


@needs_torch_2_13
def test_a_mistake_of_one_worker_is_told_to_all() -> None:
    for message in run_processes(2, mistaken):
        assert "has a hook, by `register_hook`, which comes after exact sums" in message


class ComplexExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.real


def refusals(comm: Communicator) -> dict[str, str]:
    mesh = comm.mesh(data=comm.size).device_mesh()

    taken = Routed(comm)
    fully_shard(taken, mesh=mesh)
    model = Routed(comm)
    fully_shard(model, mesh=mesh, ignored_params=set(model.mixture.experts.parameters()))
    exchange = allstep.attach(model, comm)
    complex_model = MixtureOfExperts(ComplexExpert, comm, 6, num_experts=2)
    fully_shard(complex_model, mesh=mesh, ignored_params=set(complex_model.experts.parameters()))
    of_complex = allstep.attach(complex_model, comm, EXACT)
    loader = allstep.data.loader(TensorDataset(torch.ones(2)), comm, global_batch=2, micro_batch=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    return {
        "experts": refused(lambda: allstep.attach(taken, comm)),
        "scaler": refused(lambda: exchange.unscale_(scaler, optimizer)),
        "complex": refused(lambda: [list(x) for x in allstep.steps(loader, of_complex)]),
    }


def test_what_is_refused_of_experts_beside_shards() -> None:
    words = {
        "experts": "the experts' parameters as `ignored_params`",
        "scaler": "`scaler` is enabled, and torch's takes no shards",
        "complex": "is torch.complex64, whose sums can't be made exact",
    }
    for found in run_processes(2, refusals):
        check_messages(found, words)
