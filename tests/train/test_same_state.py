"""Evaluations and checkpoints of workers whose models differ."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.errors import DisagreementError
from allstep.train import Checkpoints
from tests.helpers.ranks import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def mean_output(model: nn.Module, batch: tuple[Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"mean": (model(batch[0]).sum(), len(batch[0]))}


def evaluate(comm: Communicator, model: nn.Module) -> float:
    test_set = TensorDataset(torch.ones(8, 3, dtype=next(model.parameters()).dtype))
    return allstep.Evaluator(mean_output, test_set, comm, micro_batch=2)(model)["mean"]


def save(comm: Communicator, model: nn.Module, folder: Path, **others: Any) -> None:
    Checkpoints(folder, comm).save(3, {"model": model.state_dict(), **others})


def in_a_round(comm: Communicator, model: nn.Module) -> allstep.exchange.Exchange:
    """Two of three local steps; each worker then has a model of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = allstep.LocalSGD(sync_every=3)
    exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return exchange


def test_an_evaluation_names_the_tensors_and_ranks_that_differ() -> None:
    start = net()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        if comm.rank == 2:
            model.get_parameter("2.weight").data[0, 1] += 1e-6
        with pytest.raises(DisagreementError) as caught:
            evaluate(comm, model)
        return str(caught.value)

    for message in run_ranks(3, worker):
        assert message.startswith("Workers that evaluate a model disagree: `values of 2.weight` is")
        assert "on ranks 0, 1; checksum" in message
        assert "on rank 2." in message


@pytest.mark.filterwarnings("ignore:Batch norm statistics that differ")
@pytest.mark.filterwarnings("ignore:Parameters are evaluated, copied, saved or detached amid")
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_round_of_local_sgd_ends_before_an_evaluation_or_a_checkpoint(
    is_saved: bool, tmp_path: Path
) -> None:
    """An evaluation measured two models, half of the test set with each."""
    start = net()

    def worker(comm: Communicator) -> float:
        model = copy.deepcopy(start)
        exchange = in_a_round(comm, model)
        with pytest.raises(DisagreementError, match=r"sync_buffers.*ends a round of local SGD"):
            if is_saved:
                save(comm, model, tmp_path)
            else:
                evaluate(comm, model)
        exchange.sync_buffers()
        save(comm, model, tmp_path)
        return evaluate(comm, model)

    first, second = run_ranks(2, worker)
    assert first == second


@pytest.mark.filterwarnings("ignore:Batch norm statistics that differ")
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_models_is_the_same_on_any_number_of_workers(use_buffers: bool) -> None:
    """If statistics are summed before each of its updates; an evaluation refuses it else."""
    x = torch.randn(24, 3, dtype=torch.float64)
    samples = TensorDataset(x * torch.arange(24)[:, None], x[:, :1])

    def train(comm: Communicator, *, is_summed: bool) -> float:
        model = net().double()
        exchange = allstep.attach(model, comm)
        averaged = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = allstep.data.loader(samples, comm, global_batch=8, micro_batch=2)
        for batch in allstep.steps(loader, exchange):
            for inputs, targets in batch:
                batch.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if is_summed:
                exchange.sync_buffers()
            averaged.update_parameters(model)
        return evaluate(comm, averaged)

    (one,) = run_ranks(1, lambda comm: train(comm, is_summed=False))
    for found in run_ranks(2, lambda comm: train(comm, is_summed=True)):
        assert found == pytest.approx(one, rel=1e-12)
    with pytest.raises(DisagreementError, match="an `AveragedModel` before each of its updates"):
        run_ranks(2, lambda comm: train(comm, is_summed=False))


def test_a_checkpoint_of_different_states_is_refused(tmp_path: Path) -> None:
    """As of a model that was divided by hand; all would have got rank 0's back."""
    start = net()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        if comm.rank:
            model[2] = nn.Linear(4, 1)
        with pytest.raises(DisagreementError) as caught:
            save(comm, model, tmp_path)
        return str(caught.value)

    for message in run_ranks(2, worker):
        assert "Workers that save a checkpoint of step 3 disagree" in message
        assert "`values of model/2.weight` is checksum" in message
        assert "1.running" not in message
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_would_lose_a_part_is_refused(tmp_path: Path) -> None:
    """As of a chain of layers whose links lie on different workers."""
    start = net()

    def worker(comm: Communicator) -> str:
        part = nn.ModuleDict({f"part{comm.rank}": start[2 * comm.rank]})
        with pytest.raises(DisagreementError) as caught:
            save(comm, part, tmp_path)
        return str(caught.value)

    for message in run_ranks(2, worker):
        assert "`values of model/part1.weight` is missing on rank 0; checksum" in message


@pytest.mark.parametrize("given", ["rank 0's own", "nothing", "alike"])
def test_what_rank_0_alone_gives_is_stored(given: str, tmp_path: Path) -> None:
    start = net()

    def worker(comm: Communicator) -> Any:
        checkpoints = Checkpoints(tmp_path, comm)
        own = {"x": torch.arange(3) + comm.rank} if not comm.rank else None
        state: dict[str, Any] | None = {"model": start.state_dict(), "own": own, "rate": 0.1}
        if given == "alike":
            state = {"model": start.state_dict()}
        elif given == "nothing" and comm.rank:
            state = None
        checkpoints.save(3, state)
        return checkpoints.load_latest()

    for found in run_ranks(2, worker):
        assert found[0] == 3
        assert torch.equal(found[1]["model"]["0.weight"], start.state_dict()["0.weight"])


@pytest.mark.parametrize("plain", [False, True])
def test_an_evaluation_on_some_workers_is_told_at_once(plain: bool) -> None:
    """The others, in their next step, were waited for until the timeout."""
    start = net()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        allstep.attach(model, comm, allstep.Synchronous(plain=plain))
        with pytest.raises(DisagreementError) as caught:
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
            evaluate(comm, model) if comm.rank == 0 else model(torch.ones(4, 3)).sum().backward()
        return str(caught.value)

    for message in run_ranks(2, worker, timeout_s=20):
        assert "rank 0 wants: evaluate a model; rank 1 wants: exchange gradients" in message


@pytest.mark.filterwarnings("ignore:Batch norm statistics that differ")
@pytest.mark.parametrize("algorithm", ["native", "ring"])
@pytest.mark.parametrize("does", ["save a checkpoint of step 3", "make a loader"])
def test_a_call_on_one_worker_is_told_at_once(algorithm: str, does: str, tmp_path: Path) -> None:
    """`if comm.rank == 0:` around it: the others, in their next step, waited until the timeout."""
    start = net()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        allstep.attach(model, comm, allstep.Synchronous(algorithm=algorithm))
        save(comm, model, tmp_path)  # together
        with pytest.raises(DisagreementError) as caught:
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
            if comm.rank:
                model(torch.ones(4, 3)).sum().backward()
            elif does == "make a loader":
                samples = TensorDataset(torch.ones(8, 3))
                allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
            else:
                save(comm, model, tmp_path)
        return str(caught.value)

    for message in run_ranks(3, worker, timeout_s=30):
        assert f"rank 0 wants: {does}; rank" in message
        assert "wants: exchange gradients 2, after 0 `no_sync`" in message
