"""Models under FSDP2's `fully_shard` in `steps`: the model of one worker."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.exchange import ParameterServer
from allstep.exchange.fully_sharded_passes import CollectivePasses
from tests.exchange.nets import assert_same, differs
from tests.helpers.divided import misfit, run_epochs, save_whole, whole_state
from tests.helpers.messages import check_messages, refused
from tests.helpers.processes import run_processes
from tests.helpers.versions import needs_torch_2_13

pytestmark = pytest.mark.process

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 32, 15, 3  # 5, 5 and 1 micro-batches


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 9),
            nn.Dropout(0.2),
            nn.BatchNorm1d(9),
            nn.Tanh(),
            nn.Linear(9, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        ).double()


def shard(model: nn.Sequential, comm: Communicator) -> nn.Sequential:
    mesh = comm.mesh(data=comm.size).device_mesh()
    for layer in (model[0], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator))


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    x, y = batch
    return {"loss": (F.cross_entropy(model(x), y, reduction="sum"), len(y))}


def train(
    comm: Communicator,
    *,
    is_sharded: bool,
    has_weights: bool = False,
    run_dir: Path | None = None,
    num_epochs: int = 2,
    global_batch: int = GLOBAL_BATCH,
    updates_every: int = 1,
    spoil: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Parameters, statistics and losses, with uneven micro-batches, dropout and clipping."""
    model = make_model().to(comm.device)
    if is_sharded:
        shard(model, comm)
    exchange = allstep.attach(model, comm)
    spoil()
    kind = allstep.optim.LAMB if has_weights else torch.optim.AdamW
    optimizer = kind(model.parameters(), 0.01)
    loader = allstep.data.loader(
        samples(), comm, global_batch=global_batch, micro_batch=MICRO_BATCH, seed=5
    )
    evaluator = allstep.Evaluator(metrics, samples(), comm, micro_batch=4)
    found: dict[str, Tensor] = {}

    def run_epoch(checkpoint: allstep.AutoCheckpoint | None) -> None:
        for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
            for x, y in batch:
                if has_weights:
                    loss = F.cross_entropy(model(x), y, reduction="sum")
                    batch.backward(2 * loss, weight=2 * len(y))
                else:
                    batch.backward(F.cross_entropy(model(x), y))
            if (batch.step + 1) % updates_every:
                continue
            norm = float(exchange.clip_grad_norm_(0.3))
            optimizer.step()
            optimizer.zero_grad()
            for name, number in (("loss", batch.global_loss()), ("norm", norm)):
                found[f"{name} {batch.step}"] = torch.tensor(number, dtype=torch.float64)
        exchange.sync_buffers()
        found["metric"] = torch.tensor(evaluator(model)["loss"], dtype=torch.float64)
        with torch.no_grad():  # no call of a micro-batch
            model.eval()(torch.ones(1, 6, dtype=torch.float64, device=comm.device))
        model.train()

    run_epochs(run_epoch, num_epochs, run_dir, loader, exchange, optimizer)
    return found | whole_state(model)


def use_torchs_mean() -> None:
    """FSDP2 as it is alone: the mean over workers, whatever their numbers of micro-batches."""
    CollectivePasses.set_scale = lambda self, scale: None  # type: ignore[method-assign]


def train_both(
    comm: Communicator, is_sharded: bool, global_batch: int, num_epochs: int
) -> list[dict[str, Tensor]]:
    """Means, sums with weights by LAMB, and the control."""
    torch.set_num_threads(1)
    run = partial(
        train, comm, is_sharded=is_sharded, global_batch=global_batch, num_epochs=num_epochs
    )
    return [run(), run(has_weights=True), run(num_epochs=2, spoil=use_torchs_mean)]


@pytest.mark.parametrize(
    ("size", "global_batch", "num_epochs"),
    [(2, 15, 2), (3, 15, 2), pytest.param(8, 27, 10, marks=pytest.mark.slow)],
)
def test_fully_sharded_model_is_that_of_one_worker(
    size: int, global_batch: int, num_epochs: int
) -> None:
    """Batch norm, dropout, clipping; 5 and 1 micro-batches, and sums over tokens with weights.

    On eight workers 9 and 2 micro-batches, and some have no part of a layer.
    """
    arguments = global_batch, num_epochs
    [(means, sums, short)] = run_processes(1, train_both, False, *arguments)
    for of_means, of_sums, of_torch in run_processes(
        size, train_both, True, *arguments, timeout_s=200
    ):
        assert_same(of_means, means)
        assert_same(of_sums, sums)
        assert differs(of_torch, short, by=1e-6)


# -- checkpoints -------------------------------------------------------------------------------


def train_on(
    comm: Communicator, run_dir: Path, num_epochs: int, global_batch: int
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return train(
        comm,
        is_sharded=comm.size > 1,
        run_dir=run_dir,
        num_epochs=num_epochs,
        global_batch=global_batch,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "later_size", "global_batch"),
    [
        *((2, 1, 15), (2, 3, 15), (8, 2, 27)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((2, 2, 15), (8, 3, 27), (3, 8, 27))
        ),
    ],
)
def test_fully_sharded_checkpoint_resumes_on_other_workers(
    size: int, later_size: int, global_batch: int, tmp_path: Path
) -> None:
    [undisturbed] = run_processes(1, train_on, tmp_path / "undisturbed", 4, global_batch)
    run_processes(size, train_on, tmp_path / "run", 2, global_batch)
    for found in run_processes(later_size, train_on, tmp_path / "run", 4, global_batch):
        later = {name: undisturbed[name] for name in found}
        assert len(later) < len(undisturbed)
        assert_same(found, later)


def train_by_two(comm: Communicator, run_dir: Path, num_epochs: int) -> dict[str, Tensor]:
    """An update of two global batches; an epoch has three."""
    options: dict[str, Any] = {"run_dir": run_dir, "num_epochs": num_epochs, "updates_every": 2}
    return train(comm, is_sharded=comm.size > 1, **options)


def test_gradients_that_wait_for_more_go_on_on_other_workers(tmp_path: Path) -> None:
    [undisturbed] = run_processes(1, train_by_two, tmp_path / "undisturbed", 2)
    run_processes(2, train_by_two, tmp_path / "run", 1)
    for found in run_processes(3, train_by_two, tmp_path / "run", 2):
        assert_same(found, {name: undisturbed[name] for name in found})


# -- compiled ----------------------------------------------------------------------------------


def train_compiled(comm: Communicator, is_compiled: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = shard(make_model(), comm)
    called = torch.compile(model, backend="eager") if is_compiled else model
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = allstep.data.loader(samples(), comm, global_batch=15, micro_batch=3, seed=5)
    for batch in allstep.steps(loader, exchange):
        for x, y in batch:
            batch.backward(F.cross_entropy(called(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return dict(whole_state(model))


def test_a_compiled_model_that_is_sharded() -> None:
    """Dynamo looked at tensors that FSDP2 had freed, and the process ended."""
    expected = run_processes(2, train_compiled, False)
    for found, uncompiled in zip(run_processes(2, train_compiled, True), expected, strict=True):
        assert_same(found, uncompiled)


# -- mixed precision ---------------------------------------------------------------------------


def train_in_bfloat16(comm: Communicator, is_sharded: bool, keeps_casts: bool) -> dict[str, Tensor]:
    """All micro-batches of a global batch in one context, which remembers cast parameters."""
    if keeps_casts:
        torch.clear_autocast_cache = lambda: None
    model = make_model().float()
    if is_sharded:
        shard(model, comm)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = allstep.data.loader(
        samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=5
    )
    for batch in allstep.steps(loader, exchange):
        with torch.autocast("cpu", torch.bfloat16):
            for x, y in batch:
                batch.backward(F.cross_entropy(model(x.float()).float(), y))
        optimizer.step()
        optimizer.zero_grad()
    return dict(whole_state(model))


def train_each_in_bfloat16(comm: Communicator, is_sharded: bool) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    return [train_in_bfloat16(comm, is_sharded, keeps_casts) for keeps_casts in (False, True)]


@needs_torch_2_13
def test_autocast_around_several_micro_batches() -> None:
    """The control keeps what was cast in an earlier one, whose gradients FSDP2 leaves behind."""
    [(expected, _)] = run_processes(1, train_each_in_bfloat16, False)
    for found, spoilt in run_processes(2, train_each_in_bfloat16, True):
        assert not differs(found, expected, by=1e-6)
        assert differs(spoilt, expected, by=1e-3)


# -- gradients that are not finite -------------------------------------------------------------


def overflow_on_one(comm: Communicator) -> tuple[bool, float]:
    """Whether a step was made, and the scale after it."""
    model = shard(make_model(), comm)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(3, 6, dtype=torch.float64)).sum()).backward()
    weight: Any = model[4].weight
    if comm.rank == 0:
        weight.grad.to_local()[0, 0] = math.inf
    before = weight.to_local().clone()
    exchange.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(weight.to_local(), before), scaler.get_scale()


def test_overflow_on_one_worker_skips_the_step_on_all() -> None:
    assert run_processes(2, overflow_on_one) == [(False, 1.0)] * 2


# -- what is refused ---------------------------------------------------------------------------


def refusals(comm: Communicator, run_dir: Path) -> dict[str, str]:
    torch.set_num_threads(1)
    model, part, ignoring = shard(make_model(), comm), make_model(), make_model()
    mesh = comm.mesh(data=comm.size).device_mesh()
    fully_shard(part[0], mesh=mesh)
    fully_shard(ignoring, mesh=mesh, ignored_params={ignoring[4].bias})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policies = {
        "int8": allstep.Synchronous(compression="int8"),
        "stale": allstep.Stale(steps=1),
        "local": allstep.LocalSGD(sync_every=2),
    }
    found = {
        name: refused(lambda p=policy: allstep.attach(model, comm, p, optimizer=optimizer))
        for name, policy in policies.items()
    }
    found["server"] = refused(lambda: ParameterServer(model, comm, optimizer))
    found["part"] = refused(lambda: allstep.attach(part, comm))
    found["ignored"] = refused(lambda: allstep.attach(ignoring, comm))
    axis = comm.mesh(data=1, other=comm.size)["data"]
    found["others"] = refused(lambda: allstep.attach(model, axis))
    exchange = allstep.attach(model, comm)
    found["local gradients"] = refused(exchange.local_gradients)
    loader = allstep.data.loader(samples(), comm, global_batch=3, micro_batch=3)
    (batch, *_) = [next(iter(allstep.steps(loader, exchange)))]
    found["few"] = refused(lambda: list(batch))
    found["elastic"] = refused(
        lambda: allstep.Elastic(loader, exchange, state={"optimizer": optimizer})
    )
    wider = nn.Sequential(nn.Linear(6, 10, dtype=torch.float64))
    fully_shard(wider, mesh=mesh)
    found["wider"] = misfit(wider, comm, run_dir)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loader = allstep.data.loader(samples(), comm, global_batch=6, micro_batch=3)
    (batch, *_) = [next(iter(allstep.steps(loader, exchange)))]
    x, _ = next(iter(batch))
    found["earlier"] = refused(lambda: batch.backward(model(x).sum(), weight=3))
    return found


def test_what_a_fully_sharded_model_refuses(tmp_path: Path) -> None:
    save_whole(nn.Sequential(nn.Linear(6, 9, dtype=torch.float64)), tmp_path)
    words = {
        **dict.fromkeys(("int8", "stale", "local"), "FSDP2 sums those of a model"),
        "server": "is sharded by FSDP2",
        "part": "call `fully_shard(model, mesh=...)` last",
        "ignored": "`4.bias` is not sharded by FSDP2",
        "others": "is sharded over DeviceMesh",
        "local gradients": "sums the workers' gradients before",
        "few": "at least 2 micro-batches",
        "elastic": "is divided over workers",
        "earlier": "The gradient of `0.weight` was not zero before global batch 0",
        "wider": "of another shape: 0.weight [9, 6] instead of [10, 6], 0.bias [9] instead of [10]",
    }
    for found in run_processes(2, refusals, tmp_path):
        check_messages(found, words)
