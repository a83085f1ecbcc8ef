"""Stages of a pipeline that FSDP2 shards over the copies: the model of one process."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import allstep
from allstep import Communicator
from allstep.comm import fsdp_modules
from allstep.nn import Chain, ChainPart, Pipeline
from tests.helpers.compare import differing_names
from tests.helpers.divided import whole_state
from tests.helpers.messages import check_messages, refused
from tests.helpers.processes import run_processes
from tests.helpers.versions import needs_torch_2_13
from tests.nn.test_pipeline import (
    Maker,
    Trained,
    assert_other,
    assert_same,
    assert_same_bits,
    counted_error,
    counts_of,
    inputs_of,
    keep,
    makers,
    mean_error,
    plainly,
    samples,
    train,
)

pytestmark = pytest.mark.process

SGD = partial(torch.optim.SGD, momentum=0.9)
EXACT = allstep.Synchronous(compression="exact")


class Forgetful(Pipeline):
    """Loses what a global batch has added up when a schedule finds out shapes."""

    _keeping_gradients = nullcontext  # type: ignore[assignment]


def make(
    comm: Communicator,
    num_data: int,
    schedule: str,
    stages: Sequence[Maker],
    *,
    pipeline: type[Pipeline] = Pipeline,
    weighed: bool = False,
) -> tuple[Pipeline, Communicator]:
    """Each layer is sharded for itself, and with the rest of its stage."""
    mesh = comm.mesh(data=num_data, pipeline=comm.size // num_data)
    of_loss: dict[str, Any] = {"loss": mean_error}
    if weighed:
        of_loss = {"loss": counted_error, "weight": counts_of}
    torch.manual_seed(0)
    model = pipeline(stages, mesh, inputs=inputs_of, schedule=schedule, **of_loss)
    for stage in model.stages.values():
        fully_shard(stage.linear, mesh=mesh.device_mesh()["data"])
        fully_shard(stage, mesh=mesh.device_mesh()["data"])
    return model, mesh["data"]


def trained(
    comm: Communicator,
    num_data: int,
    schedule: str = "1f1b",
    *,
    is_frozen: bool = False,
    weighed: bool = False,
    pipeline: type[Pipeline] = Pipeline,
    is_mean: bool = False,
    num: int = 46,
    **options: Any,
) -> Trained:
    """Twenty steps; with `is_mean` FSDP2 takes the mean over the workers, as it does alone."""
    stages = makers(is_frozen)
    model, data = make(comm, num_data, schedule, stages, pipeline=pipeline, weighed=weighed)
    if is_mean:
        for module in fsdp_modules(model).values():
            module.set_gradient_divide_factor = lambda factor: None  # type: ignore[method-assign]
    found = train(model, data, lambda batch: batch.run(model), num, **options)
    return found._replace(state=whole_state(model))


# Of the last one's short global batches copies have no micro-batch.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped means": ("1f1b", {"clip_norm": 0.3, "kind": SGD}),
    "sums": ("interleaved", {"weighed": True}),
    "frozen": ("gpipe", {"is_frozen": True, "num": 42}),
}


def variants(comm: Communicator, num_data: int) -> dict[str, Trained]:
    """What is trained on a mesh, in one start of its processes."""
    return {
        name: trained(comm, num_data, schedule, **options)
        for name, (schedule, options) in VARIANTS.items()
    }


def expected_of(options: dict[str, Any]) -> Trained:
    """What one process comes to without a pipeline."""
    options = {"stages": makers(options.get("is_frozen", False)), **options}
    options.pop("is_frozen", None)
    return plainly(**options)


@pytest.mark.parametrize(
    ("size", "num_data"),
    [
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.long),
    ],
)
def test_sharded_stages_are_the_same_model(size: int, num_data: int) -> None:
    found = run_processes(size, variants, num_data, timeout_s=240)
    for name, (_, options) in VARIANTS.items():
        expected = expected_of(options)
        for of_worker in found:
            assert_same(of_worker[name], expected)


def exactly(comm: Communicator, num_data: int) -> list[Trained]:
    """Clipped means, sums with weights; and float sums."""
    run = partial(trained, comm, num_data, "interleaved", num=38)
    return [
        run(policy=EXACT, clip_norm=0.3),
        run(policy=EXACT, weighed=True),
        run(),
    ]


@needs_torch_2_13
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_data"), [(2, 2), (4, 2), pytest.param(6, 3, marks=pytest.mark.long)]
)
def test_exact_sums_of_sharded_stages_have_the_bits_of_one_worker(size: int, num_data: int) -> None:
    (expected,) = run_processes(1, exactly, 1)
    for found in run_processes(size, exactly, num_data, timeout_s=240):
        *exact, of_floats = zip(found, expected, strict=True)
        for of_worker, of_one in exact:
            assert_same_bits(of_worker, of_one)
            assert of_one.num_completed > 0
        with pytest.raises(AssertionError):
            assert_same_bits(*of_floats)


def kept(
    comm: Communicator, num_data: int, run_dir: Path, stops_after: int | None
) -> dict[str, Tensor]:
    model, data = make(comm, num_data, "1f1b", makers())
    keep(model, data, run_dir, stops_after, EXACT)
    return whole_state(model)


@needs_torch_2_13
@pytest.mark.slow
def test_exact_sums_of_sharded_stages_go_on_where_these_lie_otherwise(tmp_path: Path) -> None:
    """With the units of 2 x 2 (data x pipeline), of which each worker had those of its stages."""
    (expected,) = run_processes(1, kept, 1, tmp_path / "straight", None)
    run_processes(4, kept, 2, tmp_path / "run", 1)
    for size, num_data in ((2, 2), (2, 1), (4, 2)):
        folder = tmp_path / f"{size}-{num_data}"
        shutil.copytree(tmp_path / "run", folder)
        for state in run_processes(size, kept, num_data, folder, None):
            assert not differing_names(state, {name: expected[name] for name in state})


def controls(comm: Communicator) -> dict[str, Trained]:
    options = {"clip_norm": 0.3, "kind": SGD}
    return {
        "mean": trained(comm, 2, is_mean=True, kind=SGD),
        "forgetful": trained(comm, 1, pipeline=Forgetful, **options),
    }


@needs_torch_2_13
def test_controls() -> None:
    """FSDP2's own mean, and gradients that torch drops in the middle of a batch."""
    [found, _] = run_processes(2, controls)
    assert_other(found["mean"], expected_of({"kind": SGD}))
    assert_other(found["forgetful"], expected_of({"clip_norm": 0.3, "kind": SGD}))


def squared_sums(model: nn.Module, data: Sequence[Tensor]) -> dict[str, Any]:
    y = model(*inputs_of(data))
    return {"squares": (y.square().sum(), len(y))}


def evaluated(comm: Communicator) -> tuple[float, bool]:
    """Three micro-batches for two copies, of one worker each; and whether a call is refused."""
    model, data = make(comm, comm.size, "1f1b", makers())
    exchange = allstep.attach(model, data)
    evaluator = allstep.Evaluator(
        lambda model, batch: model.measure(squared_sums, batch), samples(11), data, micro_batch=4
    )
    mean = evaluator(model)["squares"]
    is_refused = False
    if comm.size > 1:
        is_refused = "is not called" in refused(lambda: model(*inputs_of(samples(1)[:])))
    exchange.detach()
    return mean, is_refused


def test_evaluation_with_unequally_many_micro_batches() -> None:
    [(expected, _)] = run_processes(1, evaluated)
    for mean, is_refused in run_processes(2, evaluated):
        assert mean == pytest.approx(expected, rel=1e-12) and is_refused


def refusals(comm: Communicator) -> dict[str, str]:
    mesh = comm.mesh(data=1, pipeline=2)
    data = mesh["data"]
    model = Pipeline(makers(), mesh, loss=mean_error, inputs=inputs_of)
    if comm.rank == 1:  # the other one has sharded nothing, and is told, too
        fully_shard(model.stages["2"], mesh=mesh.device_mesh()["data"])
    found = {"some": refused(lambda: allstep.attach(model, data))}
    parts = [
        ChainPart("first", lambda: nn.Linear(2, 2), 0, ("x",), ("h",)),
        ChainPart("second", lambda: nn.Linear(2, 2), 1, ("h",), ("y",)),
    ]
    chain = Chain(parts, comm.mesh(data=1, model=2), inputs=("x",), outputs=("y",))
    for part in chain.parts.values():
        fully_shard(part, mesh=mesh.device_mesh()["data"])
    chain_data = chain.parts.mesh["data"]
    return {**found, "chain": refused(lambda: allstep.attach(chain, chain_data))}


def test_what_sharded_stages_refuse() -> None:
    words = {
        "some": "`model.stages.0` is not sharded by FSDP2, and other parts of `model` are",
        "chain": "only a Pipeline sees to that",
    }
    for found in run_processes(2, refusals):
        check_messages(found, words)
