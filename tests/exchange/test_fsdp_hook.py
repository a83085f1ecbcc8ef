"""Sharded in a node, exchanged between two: equals the exchange on four workers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from allstep.comm import Communicator, init
from allstep.errors import UsageError
from allstep.exchange import Synchronous, attach, make_policy
from allstep.exchange.torch_hooks import fsdp_hook
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
