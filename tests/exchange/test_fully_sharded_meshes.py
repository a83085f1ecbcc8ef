"""FSDP2 along one axis of a mesh or two, beside tensor parallelism: the model of one worker."""

import logging
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.exchange.fully_sharded_passes import CollectivePasses
from allstep.nn import tensor_parallel
from allstep.torch_classes import local_part
from tests.exchange.nets import assert_same, differs
from tests.helpers.compare import differing_names
from tests.helpers.divided import run_epochs, whole_state
from tests.helpers.messages import check_messages
from tests.helpers.processes import run_processes
from tests.helpers.versions import needs_torch_2_13

pytestmark = pytest.mark.process

PLAN = {"3": ColwiseParallel(), "5": RowwiseParallel()}
LAMB = allstep.optim.LAMB
EXACT = allstep.Synchronous(compression="exact")


def make_model() -> nn.Sequential:
    """Some parameters are divided, their rows unevenly sharded, and others are whole."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 7),
        nn.Tanh(),
        nn.BatchNorm1d(7),
        nn.Linear(7, 10),
        nn.Tanh(),
        nn.Linear(10, 5),
        nn.Dropout(0.2),
        nn.Linear(5, 3),
    ).double()


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in (model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def divided(comm: Communicator, kind: str) -> tuple[nn.Module, Communicator]:
    """The model, and the workers with other samples.

    Args:
        comm: all workers.
        kind: data x tensor, copies x shards x tensor, "hybrid", copies x shards, or "whole x 2",
            tensor without FSDP2.
    """
    model = make_model()
    if comm.size == 1:
        return model, comm
    if kind == "hybrid":
        mesh = comm.mesh(replicate=2, shard=comm.size // 2)
        return shard(model, mesh.device_mesh()), comm
    if kind == "whole x 2":
        mesh = comm.mesh(data=1, tensor=2)
        return tensor_parallel(model, mesh, PLAN), mesh["data"]
    *lengths, num_tensor = map(int, kind.split(" x "))
    mesh = comm.mesh(data=math.prod(lengths), tensor=num_tensor)
    tensor_parallel(model, mesh, PLAN)
    if len(lengths) == 1:
        return shard(model, mesh.device_mesh()["data"]), mesh["data"]
    axes = comm.mesh(replicate=lengths[0], shard=lengths[1], tensor=num_tensor)
    return shard(model, axes.device_mesh()["replicate", "shard"]), mesh["data"]


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(71, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (71,), generator=generator))


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    x, y = batch
    return {"loss": (F.cross_entropy(model(x), y, reduction="sum"), len(y))}


def leave(model: nn.Module) -> None:
    """Spoils nothing."""


def train(
    comm: Communicator,
    kind: str,
    *,
    policy: allstep.ExchangePolicy | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    num_epochs: int = 1,
    has_weights: bool = False,
    is_scaled: bool = False,
    run_dir: Path | None = None,
    global_batch: int = 15,
    spoil: Callable[[nn.Module], None] = leave,
) -> dict[str, Tensor]:
    """Parameters, statistics, norms and losses; global batches of 5 micro-batches, the last of 4.

    With a scaler one shard's gradient overflows in the second step, also in its copies.
    """
    model, data = divided(comm, kind)
    exchange = allstep.attach(model, data, policy)
    if comm.size > 1:
        spoil(model)
    update = optimizer(model.parameters(), lr=0.02)
    loader = allstep.data.loader(samples(), data, global_batch=global_batch, micro_batch=3, seed=5)
    evaluator = allstep.Evaluator(metrics, Subset(samples(), range(22)), data, micro_batch=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    found: dict[str, Tensor] = {}

    def run_epoch(checkpoint: allstep.AutoCheckpoint | None) -> None:
        for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
            for x, y in batch:
                if has_weights:
                    loss = F.cross_entropy(model(x), y, reduction="sum")
                    batch.backward(2 * loss, weight=2 * len(y))
                else:
                    batch.backward(scaler.scale(F.cross_entropy(model(x), y)))
            if is_scaled:
                ranks = (min(comm.size - 1, 5),)  # the last of eight has no rows
                if kind in ("hybrid", "2 x 2 x 2"):
                    ranks = (1, 1 + comm.size // 2)  # copies of a shard
                if batch.step == 1 and comm.rank in ranks:
                    gradient = local_part(model.get_parameter("3.weight").grad)
                    gradient[0, 0] = math.inf
                exchange.unscale_(scaler, update)
            norm = exchange.clip_grad_norm_(0.3)
            if math.isfinite(norm):
                found[f"norm {batch.step}"] = norm
            scaler.step(update)
            scaler.update()
            update.zero_grad()
        exchange.sync_buffers()
        found["metric"] = torch.tensor(evaluator(model)["loss"], dtype=torch.float64)

    run_epochs(run_epoch, num_epochs, run_dir, loader, exchange, update)
    return found | whole_state(model)


def use_torchs_mean(_: nn.Module) -> None:
    """FSDP2 as it is alone: the mean over workers, whatever their numbers of micro-batches."""
    CollectivePasses.set_scale = lambda self, scale: None  # type: ignore[method-assign]


def forget_other_parts(model: nn.Module) -> None:
    """LAMB with the norms of what FSDP2's workers have, not of whole layers."""
    for p in model.parameters():
        vars(p).pop("shard_group", None)


def train_all(
    comm: Communicator, kind: str, global_batch: int = 15
) -> dict[str, dict[str, Tensor]]:
    """Means over 20 steps with a scaler, sums with weights and LAMB; and the controls."""
    run = partial(train, comm, kind, global_batch=global_batch)
    of_lamb = partial(run, optimizer=LAMB, has_weights=True)
    found = {
        "adamw": run(num_epochs=4 * global_batch // 15, is_scaled=True),
        "lamb": of_lamb(),
        "parts": of_lamb(spoil=forget_other_parts),
    }
    return found | {"torch": run(spoil=use_torchs_mean)}


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Tensor]]:
    return train_all(Communicator.single_process(), "")


@pytest.mark.parametrize(
    "kind", ["2 x 2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("1 x 2", "hybrid"))]
)
def test_fully_sharded_mesh_trains_the_model_of_one_worker(
    kind: str, one: dict[str, dict[str, Tensor]]
) -> None:
    """Batch norm, dropout, clipping; uneven numbers of micro-batches."""
    check_mesh(kind, 2 if kind == "1 x 2" else 4, one)


@pytest.fixture(scope="module")
def one_of_nine_micro_batches() -> dict[str, dict[str, Tensor]]:
    return train_all(Communicator.single_process(), "", 27)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["2 x 2 x 2", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("4 x 2", "hybrid"))],
)
def test_fully_sharded_mesh_of_eight_workers(
    kind: str, one_of_nine_micro_batches: dict[str, dict[str, Tensor]]
) -> None:
    """Some of which have no part of a layer."""
    check_mesh(kind, 8, one_of_nine_micro_batches, 27)


def check_mesh(
    kind: str, size: int, one: dict[str, dict[str, Tensor]], global_batch: int = 15
) -> None:
    for found in run_processes(size, train_all, kind, global_batch, timeout_s=300):
        for name in ("adamw", "lamb"):
            assert_same(found[name], one[name])
        if kind != "hybrid":
            assert differs(found["parts"], one["lamb"], by=1e-4)
        if kind != "1 x 2":
            assert differs(found["torch"], one["torch"], by=1e-6)


# -- exact sums --------------------------------------------------------------------------------


def train_exactly(comm: Communicator, kind: str) -> dict[str, dict[str, Tensor]]:
    """AdamW, clipped, and LAMB; the control is without exact sums."""
    run = partial(train, comm, kind, policy=EXACT)
    return {
        "adamw": run(),
        "lamb": run(optimizer=partial(LAMB, weight_decay=0.1), has_weights=True),
        "fp32": train(comm, kind),
    }


@needs_torch_2_13
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("2 x 2", 4, marks=pytest.mark.slow),
        pytest.param("3 x 2", 6, marks=pytest.mark.slow),
        pytest.param("2 x 2 x 2", 8, marks=pytest.mark.long),
    ],
)
def test_exact_sums_depend_on_the_tensor_axis_alone(kind: str, size: int) -> None:
    """Also of layers that FSDP2 shards by themselves; whole ones have the bits of shards."""
    torch.set_num_threads(1)
    whole, _ = run_processes(2, train_exactly, "whole x 2")
    alone, _ = run_processes(2, train_exactly, "1 x 2")
    for found in run_processes(size, train_exactly, kind, timeout_s=200):
        for name in ("adamw", "lamb"):
            assert not differing_names(found[name], alone[name])
            assert_same(found[name], whole[name])
        assert not differing_names(found["adamw"], whole["adamw"])
        assert differing_names(found["fp32"], alone["fp32"])


# -- checkpoints -------------------------------------------------------------------------------


def train_on(comm: Communicator, kind: str, run_dir: Path, num_epochs: int) -> dict[str, Tensor]:
    return train(comm, kind, run_dir=run_dir, num_epochs=num_epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_on", "others"),
    [
        ((8, "2 x 2 x 2"), [(1, ""), (2, "1 x 2"), (4, "hybrid")]),
        pytest.param((4, "2 x 2"), [(1, ""), (8, "2 x 2 x 2")], marks=pytest.mark.long),
        pytest.param((4, "hybrid"), [(2, "2 x 1"), (4, "2 x 2")], marks=pytest.mark.long),
    ],
)
def test_checkpoint_of_a_fully_sharded_mesh_goes_on_on_others(
    saved_on: tuple[int, str], others: list[tuple[int, str]], tmp_path: Path
) -> None:
    [undisturbed] = run_processes(1, train_on, "", tmp_path / "undisturbed", 2)
    size, kind = saved_on
    run_processes(size, train_on, kind, tmp_path / "run", 1)
    for size, kind in others:
        folder = tmp_path / f"{kind} {size}"
        shutil.copytree(tmp_path / "run", folder)
        for found in run_processes(size, train_on, kind, folder, 2):
            later = {name: undisturbed[name] for name in found}
            assert len(later) < len(undisturbed)
            assert_same(found, later)


# -- what is refused, and warned of ------------------------------------------------------------


def refused(comm: Communicator) -> dict[str, str]:
    mesh = comm.mesh(data=2, tensor=2)
    pairs = comm.mesh(replicate=2, shard=2)
    torchs = make_model()
    parallelize_module(torchs, mesh.device_mesh()["tensor"], PLAN)
    shard(torchs, mesh.device_mesh()["data"])
    both, _ = divided(comm, "2 x 2")
    hybrid = shard(make_model(), pairs.device_mesh())
    alone = shard(make_model(), comm.mesh(replicate=4, shard=1).device_mesh())
    axes = comm.mesh(replicate=2, shard=1, tensor=2)
    three = tensor_parallel(make_model(), axes, PLAN)
    shard(three, axes.device_mesh()["replicate", "shard"])
    calls: dict[str, tuple[nn.Module, Communicator]] = {
        "parallelize_module": (torchs, mesh["data"]),
        "parallelize_module of all": (torchs, comm),
        "all workers": (both, comm),
        "tensor": (both, mesh["tensor"]),
        "replicate": (hybrid, pairs["replicate"]),
        "shard": (hybrid, pairs["shard"]),
        "shard of one": (alone, comm),
        "three axes, shard of one": (three, axes["replicate"]),
    }
    found = {}
    for name, (model, workers) in calls.items():
        with pytest.raises(UsageError) as error:
            allstep.attach(model, workers)
        found[name] = str(error.value)
    with pytest.raises(UsageError) as error:
        tensor_parallel(hybrid, mesh, PLAN)
    return found | {"divided last": str(error.value)}


def test_what_is_sharded_over_other_axes_is_refused() -> None:
    words = {
        "parallelize_module": "divide layers by `allstep.nn.tensor_parallel` before `fully_shard`",
        "parallelize_module of all": "divide layers by `allstep.nn.tensor_parallel`",
        "all workers": "attach it to mesh['data'], whose workers have the same shards",
        "tensor": "attach it to mesh['data'], whose workers have the same shards",
        "replicate": "is sharded over DeviceMesh",
        "shard": "is sharded over DeviceMesh",
        "shard of one": "has one worker along",
        "three axes, shard of one": "has one worker along",
        "divided last": "call `fully_shard` after this",
    }
    for found in run_processes(4, refused):
        check_messages(found, words)


def clip_by_torch(comm: Communicator) -> bool:
    """Whether the step after torch's own clipping, which sees one place of `tensor`, warns."""
    model, data = divided(comm, "1 x 2")
    exchange = allstep.attach(model, data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = allstep.data.loader(samples(), data, global_batch=3, micro_batch=3)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("allstep").addHandler(handler)
    batch = next(iter(allstep.steps(loader, exchange)))
    for x, y in batch:
        batch.backward(F.cross_entropy(model(x), y))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return any("this worker has a part of the model" in message for message in said)


def test_torchs_clipping_beside_tensor_parallelism_is_told_of() -> None:
    assert run_processes(2, clip_by_torch) == [True, True]
