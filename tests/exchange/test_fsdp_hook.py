"""Sharded in a node, exchanged between two: equals the exchange on four workers."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from allstep.comm import Communicator, init
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, Synchronous, attach, make_policy
from allstep.exchange.fsdp_comm_hook import fsdp_hook
from allstep.exchange.wires import TopK
from tests.exchange.nets import assert_same, differs, mlp
from tests.helpers.processes import run_processes

CASES = {
    name: make_policy(algorithm="native", **changes)
    for name, changes in {
        "fp32": {},
        "stale": {"staleness": 1},
        "fp16": {"compression": "fp16"},
        "int8": {"compression": "int8"},
        "stale-int8": {"compression": "int8", "staleness": 1},
        "sum": {"reduction": "sum"},
    }.items()
}


def train(model: nn.Module, batches: Tensor) -> list[bool]:
    """Whether each step had gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    had = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        had.append(all(p.grad is not None for p in model.parameters()))
        assert had[-1] or all(p.grad is None for p in model.parameters())
        optimizer.step()
    return had


def refuse_to_attach(comm: Communicator, model: nn.Module) -> None:
    """What FSDP2 has sharded, or shards later, and a parameter that it has left somewhere."""
    with pytest.raises(UsageError, match=r"is sharded over DeviceMesh.*`allstep\.fsdp_hook`"):
        attach(model, comm)
    with pytest.raises(UsageError, match=r"`model\.1` is sharded by FSDP2's.* and `model` is not"):
        attach(nn.Sequential(nn.Tanh(), model[2]), comm)
    part = nn.Module()
    part.weight = model[0].weight
    with pytest.raises(UsageError, match="`weight` is a DTensor, and FSDP2 has not"):
        attach(part, comm)
    later = mlp().to(comm.device)
    exchange = attach(later, comm)
    fully_shard(later)
    with pytest.raises(UsageError, match="`model` is sharded by FSDP2 since it was attached"):
        later(torch.ones(2, 5, device=comm.device))
    exchange.detach()


def work(comm: Communicator) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    kind = comm.device.type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = init(process_group=mesh["replicate"], device=comm.device)
    torch.manual_seed(0)
    start = mlp().to(comm.device)
    batches = torch.randn(6, 4, 3, 5)[:, comm.rank].to(comm.device)
    results: dict[str, Any] = {}
    for name, policy in CASES.items():
        model = copy.deepcopy(start)
        fully_shard(model[2], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        if replicas.rank:  # the hook gives it the first replica's values
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
        if name == "fp32":
            refuse_to_attach(comm, model)
        hook = fsdp_hook(model, replicas, policy)
        had = train(model, batches)
        whole = {n: p.full_tensor().detach().cpu() for n, p in model.named_parameters()}
        assert all(isinstance(p, DTensor) for p in model.parameters())
        results[name] = (had, whole, hook.sent_bytes)
        saved = hook.state_dict()
        assert len(saved["unsent"]) == (2 if "int8" in name else 0)  # a module's each
        hook.load_state_dict(saved)
        assert str(hook.state_dict()) == str(saved)
    for name in ("whole", "resumed", "begun anew"):
        model = copy.deepcopy(start)
        fully_shard(model, mesh=mesh["shard"])
        hook = fsdp_hook(model, replicas, CASES["stale"])
        train(model, batches[:3])
        if name != "whole":
            saved = hook.state_dict()
            hook = fsdp_hook(model, replicas, CASES["stale"])
            hook.load_state_dict(saved if name == "resumed" else {**saved, "in_flight": {}})
        train(model, batches[3:])
        results[name] = {n: p.full_tensor().detach().cpu() for n, p in model.named_parameters()}
    for name in ("fp32", "stale"):
        model = copy.deepcopy(start)
        exchange = attach(model, comm, CASES[name])
        train(model, batches)
        exchange.detach()
        results[f"{name} exchange"] = {n: p.detach().cpu() for n, p in model.named_parameters()}
    return results


@pytest.mark.process
def test_equals_the_exchange_on_four_workers() -> None:
    check(run_processes(4, work, timeout_s=100.0))


def check(workers: list[dict[str, Any]]) -> None:
    """What `work` has come to."""
    results = workers[0]
    for worker in workers:
        for name in CASES:
            assert_same(worker[name][1], results[name][1], rtol=0)
    expected = results["fp32 exchange"]
    assert_same(results["fp32"][1], expected)
    assert_same(results["stale"][1], results["stale exchange"])
    assert differs(results["stale"][1], expected, by=1e-3)
    for name, exact in (("fp16", "fp32"), ("int8", "fp32"), ("stale-int8", "stale")):
        assert differs(results[name][1], results[exact][1], by=1e-8)
        assert not differs(results[name][1], results[exact][1], by=3e-3)
    assert differs(results["sum"][1], expected, by=1e-3)
    assert [results[name][0][:2] for name in ("fp32", "stale")] == [[True, True], [False, True]]
    assert_same(results["resumed"], results["whole"], rtol=0)
    assert differs(results["begun anew"], results["whole"], by=1e-3)
    sent = {name: results[name][2] for name in CASES}
    assert sent["fp16"] * 4 == sent["fp32"]
    assert sent["int8"] < sent["fp32"] / 5  # whose numbers are of 8 bytes here


def test_model_that_is_not_sharded() -> None:
    with pytest.raises(UsageError, match="`model` is a Sequential that FSDP2 has not sharded"):
        fsdp_hook(mlp(), Communicator.single_process())


def test_attach_refuses_what_the_first_fsdp_has_wrapped() -> None:
    wrapped = nn.Module.__new__(torch.distributed.fsdp.FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = mlp()
    with pytest.raises(UsageError, match=r"`model` is a FullyShar.*`fully_shard`"):
        attach(wrapped, Communicator.single_process())


def test_format_that_needs_matrices() -> None:
    class Sharded(nn.Linear, torch.distributed.fsdp.FSDPModule):
        """As `fully_shard` makes it."""

        def __new__(cls, *args: object) -> "Sharded":
            return nn.Module.__new__(cls)

    policy = Synchronous(compression="powersgd")
    with pytest.raises(
        UsageError, match=r"`compression` \(='powersgd'\) needs matrices, .* use \"int8\""
    ):
        fsdp_hook(Sharded(2, 2), Communicator.single_process(), policy)


class Either(nn.Module):
    """Two parameters of equal size, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(2)])
        with torch.no_grad():
            for p in self.parameters():
                p.zero_()

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.parts[number](x)


NUMBERS = [0, 0, 1, 0, 1, 1, 0, 1]
KEEPING = {
    "stale": make_policy(algorithm="native", staleness=1),
    "topk": make_policy(algorithm="native", compression=TopK(fraction=0.25)),
}


def use_in_turn(comm: Communicator) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = init(process_group=mesh["replicate"], device=comm.device)

    def train_in_turn(policy: ExchangePolicy, sends_zeros: bool, numbers: list[int]) -> list[float]:
        model = Either()
        fully_shard(model, mesh=mesh["shard"])
        if sends_zeros:
            model.set_reduce_scatter_unused_params(True)
        hook = fsdp_hook(model, replicas, policy)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        # With staleness the gradient of the last step is not used.
        for number in [*numbers, 0] if policy.staleness else numbers:
            optimizer.zero_grad()
            sign = 1 if number else -1
            model(torch.full((1, 4), sign * (1.0 + comm.rank)), number).sum().backward()
            optimizer.step()
        sums = torch.stack([p.full_tensor().detach().sum() for p in model.parameters()])
        unsent = [sum(map(torch.sum, hook.state_dict()["unsent"].values()), torch.zeros(()))]
        return [*sums.tolist(), *comm.all_reduce(torch.stack(unsent)).tolist()]

    found: dict[str, Any] = {}
    for name, policy in {**KEEPING, "prompt": CASES["fp32"]}.items():
        try:
            found[name] = train_in_turn(policy, False, NUMBERS)
        except UsageError as error:
            found[name] = str(error)
        found[f"{name}, one"] = train_in_turn(policy, False, [0] * 8)
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            found[f"{name}, zeros"] = train_in_turn(policy, True, NUMBERS)
    return found


@pytest.mark.process
def test_gradients_that_are_kept_are_of_the_same_parameters() -> None:
    """Else one parameter of the module would get another's; one that is never used may be."""
    for found in run_processes(2, use_in_turn):
        assert found["prompt"] == [24.0, -24.0, 0.0]  # each four times, by 4 * 1.5
        for name in KEEPING:
            assert re.search(
                r"parameters of `model` than before .*`policy` \(=.*`set_reduce_scatter_unused_par"
                r".*It is `parts\.1\.weight` now, and was `parts\.0\.weight`",
                found[name],
            )
            # What was not sent is missing.
            first, second, unsent = found[f"{name}, one"]
            assert [first - unsent, second] == pytest.approx([48.0, 0.0])
            if f"{name}, zeros" in found:
                first, second, unsent = found[f"{name}, zeros"]
                assert first + second - unsent == pytest.approx(0.0)
        if "stale, zeros" in found:
            assert found["stale, zeros"][:2] == [24.0, -24.0]


def pass_workers_with_other_shards(comm: Communicator) -> str:
    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(DisagreementError) as error:
        fsdp_hook(model, comm)
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))
    return str(error.value)


@pytest.mark.process
def test_workers_with_other_shards_are_refused() -> None:
    """Else each would get the shards of the first; the model is left as it was."""
    for message in run_processes(2, pass_workers_with_other_shards):
        assert re.search(
            r"`0\.weight` is elements \(0, 0\) to \(4, 5\) on rank 0; elements \(4, 0\) to \(7, 5\)"
            r" on rank 1.*`allstep\.init\(process_group=mesh\[\"replicate\"\]\)`",
            message,
        )


def leave_parameters_whole(comm: Communicator) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = init(process_group=mesh["replicate"], device=comm.device)
    messages = []
    for is_root_sharded in (True, False):
        model = mlp()
        if is_root_sharded:
            fully_shard(model, mesh=mesh["shard"], ignored_params={model[4].weight, model[4].bias})
        else:
            fully_shard(model[0], mesh=mesh["shard"])
            fully_shard(model[2], mesh=mesh["shard"])
        with pytest.raises(UsageError) as error:
            fsdp_hook(model, replicas)
        messages.append(str(error.value))
        model[4].requires_grad_(False)
        fsdp_hook(model, replicas)
    return messages


@pytest.mark.process
def test_parameters_that_are_trained_and_not_sharded_are_refused() -> None:
    """Their gradients would stay each worker's own. Frozen ones have none."""
    for messages in run_processes(2, leave_parameters_whole):
        for message in messages:
            assert re.match(r"`4\.weight` is trained and not sharded.*requires_grad_", message)
