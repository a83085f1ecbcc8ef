"""Stages of a pipeline with experts that lie along the axis of data, against one process."""

import shutil
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Evaluator, Metrics, UsageError
from allstep.comm import Mesh
from allstep.nn import MixtureOfExperts, Pipeline, tensor_parallel
from allstep.nn.pipeline_stages import MicroBatches, Stages
from tests.helpers.divided import whole_state
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks
from tests.nn.test_experts_of_shards import make_expert
from tests.nn.test_pipeline import (
    Block,
    Head,
    Maker,
    Trained,
    assert_other,
    assert_same,
    assert_same_bits,
    error_of,
    inputs_of,
    keep,
    mean_error,
    plainly,
    samples,
    train,
)
from tests.nn.test_pipeline_of_shards import Wide


class Routed(nn.Module):
    """Experts with room for some of a micro-batch's tokens only, and a use of the balance loss."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.mixture = MixtureOfExperts(
            make_expert, comm, 6, num_experts=4, top_k=2, capacity_factor=1.25
        )
        self.after = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        y, balance_loss = self.mixture(self.before(x))
        return x + self.dropout(self.after(y)).tanh() * balance_loss, counts


def makers(comm: Communicator) -> tuple[Maker, ...]:
    """With two workers along the pipeline the first one has no experts."""
    return Wide, Block, partial(Routed, comm), Head


def stage(make: Maker, mesh: Mesh[Communicator]) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    made = make()
    layers: dict[str, ParallelStyle] = {}
    if isinstance(made, Wide):
        layers = {"hidden": ColwiseParallel(), "output": RowwiseParallel()}
    if isinstance(made, Routed):
        for name in (f"mixture.experts.{number}" for number in made.mixture.experts):
            layers |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    return tensor_parallel(made, mesh, layers) if "tensor" in mesh.shape else made


def make(comm: Communicator, schedule: str = "1f1b", **axes: int) -> tuple[Pipeline, Communicator]:
    mesh = comm.mesh(**axes)
    torch.manual_seed(0)
    model = Pipeline(
        [partial(stage, each, mesh) for each in makers(mesh["data"])],
        mesh,
        loss=mean_error,
        inputs=inputs_of,
        schedule=schedule,
    )
    return model, mesh["data"]


def trained(
    comm: Communicator,
    schedule: str = "1f1b",
    num: int = 46,
    policy: allstep.Synchronous | None = None,
    **axes: int,
) -> Trained:
    model, data = make(comm, schedule, **axes)
    found = train(model, data, lambda batch: batch.run(model), num, policy, clip_norm=CLIP_NORM)
    return found._replace(state=whole_state(model))


CLIP_NORM = 0.3
EXACT = allstep.Synchronous(compression="exact")
SHORT = 42  # samples, of which an epoch's last global batch has one micro-batch: one copy has none


def variants(comm: Communicator, axes: dict[str, int]) -> dict[str, Trained]:
    """What is trained on a mesh, in one start of its processes."""
    return {
        "uneven": trained(comm, **axes),
        "short, exact": trained(comm, "interleaved", num=SHORT, policy=EXACT, **axes),
    }


@pytest.mark.process
@pytest.mark.slow
def test_stages_with_experts_are_the_same_model() -> None:
    """Copies with fewer micro-batches, or none, have their experts at work for the others."""
    stages = makers(Communicator.single_process())
    expected = plainly(clip_norm=CLIP_NORM, stages=stages)
    short = plainly(clip_norm=CLIP_NORM, stages=stages, num=SHORT, policy=EXACT)
    alone = Communicator.single_process()
    exact = trained(alone, num=SHORT, policy=EXACT, data=1, pipeline=1)
    for spoilt in ("seeds", "weights"):
        assert_other(plainly(clip_norm=CLIP_NORM, stages=stages, spoilt=spoilt), expected)
    meshes: list[dict[str, int]] = [
        {"data": 2, "pipeline": 2},
        {"data": 2, "pipeline": 2, "tensor": 2},  # which divides experts, too
    ]
    for axes in meshes:
        for of_worker in run_processes(prod(axes.values()), variants, axes, timeout_s=200):
            assert_same(of_worker["uneven"], expected)
            assert_same(of_worker["short, exact"], short)
            if "tensor" not in axes:
                assert_same_bits(of_worker["short, exact"], exact)


def test_shapes_are_found_with_zeros() -> None:
    """Not with what torch has not set: workers that share a copy would choose other experts."""
    seen: list[Tensor] = []

    class Sees(Head):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            seen.extend((x, counts))
            return super().forward(x, counts)

    micro_batches = MicroBatches(inputs_of, mean_error, torch.device("cpu"))
    stages = Stages({1: Sees()}, micro_batches, has_fixed_shapes=True, are_sharded=False)
    x = torch.full((5, 6), torch.nan, dtype=torch.float64, requires_grad=True)
    with micro_batches.begin([samples(5)[:]], [3], [1.0], [], lambda: None):
        stages(x, x.isnan().long(), number=0).sum().backward()  # finds shapes of gradients, too
        assert not any(value.any() for value in seen)
        assert stages(x, x.isnan().long(), number=0).isnan().all()


class Counting(Head):
    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x, counts)


def test_micro_batches_that_are_repeated_for_other_copies_change_no_buffers() -> None:
    def count(comm: Communicator) -> float:
        mesh = comm.mesh(data=comm.size, pipeline=1)
        stages = [partial(Routed, mesh["data"]), Counting]
        model = Pipeline(stages, mesh, loss=mean_error, inputs=inputs_of)
        model.evaluate([samples(4)[:]] * (3 - comm.rank))
        return float(model.get_buffer("stages.1.count"))

    assert run_ranks(2, count) == [3, 2]


def kept(
    comm: Communicator, axes: dict[str, int], run_dir: Path, stops_after: int | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters, and losses in eval mode, of which each copy has some less than the one before."""
    model, data = make(comm, **axes)
    keep(model, data, run_dir, stops_after, EXACT, SHORT)
    given = samples(46)
    cut = [given[:4], given[4:8], given[8:10]]
    return whole_state(model), model.eval().evaluate(cut[data.rank :])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint's workers computed with")
def test_stages_with_experts_go_on_on_another_mesh(tmp_path: Path) -> None:
    """With exact sums, whose grid goes along with its experts and stages.

    A copy has no micro-batch in the first global batch that it goes on with.
    """
    alone = Communicator.single_process()
    one = {"data": 1, "pipeline": 1}
    expected, losses = kept(alone, one, tmp_path / "straight", None)
    eight = {"data": 2, "pipeline": 2, "tensor": 2}
    run_processes(8, kept, eight, tmp_path / "run", 1, timeout_s=200)
    for axes in (one, {"data": 2, "pipeline": 2}):
        size = prod(axes.values())
        folder = tmp_path / f"on {size}"
        shutil.copytree(tmp_path / "run", folder)
        if size == 1:
            found = [kept(alone, axes, folder, None)]
        else:
            found = run_processes(size, kept, axes, folder, None, timeout_s=200)
        for state, own_losses in found:
            torch.testing.assert_close(own_losses, losses[-len(own_losses) :], rtol=0, atol=1e-10)
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def without_samples(comm: Communicator, axes: dict[str, int]) -> tuple[Trained, list[float]]:
    """Training and evaluations in which a copy has fewer micro-batches than another, or none."""
    model, data = make(comm, **axes)
    metrics = [Evaluator(measure, samples(num), data, micro_batch=4)(model) for num in (4, 10)]
    model, data = make(comm, "gpipe", **axes)
    found = train(model, data, lambda batch: batch.run(model), num=4)
    return found, [each["error"] for each in metrics]


def measure(model: nn.Module, data: list[Tensor]) -> Metrics:
    assert isinstance(model, Pipeline)
    return model.measure(total_error, data)


def total_error(model: nn.Module, data: list[Tensor]) -> Metrics:
    error = error_of(model(*inputs_of(data)), data)
    return {"error": (error.sum().item(), error.numel())}


@pytest.mark.process
@pytest.mark.slow
def test_copies_without_samples_have_their_experts_at_work() -> None:
    one, expected = without_samples(Communicator.single_process(), {"data": 1, "pipeline": 1})
    for found, errors in run_processes(4, without_samples, {"data": 2, "pipeline": 2}):
        assert errors == pytest.approx(expected, rel=0, abs=1e-10)
        assert_same(found, one)


def refused(comm: Communicator) -> list[str]:
    """What pipelines of experts along wrong axes say."""
    mesh, said = comm.mesh(data=2, pipeline=2), []
    for workers in (comm, mesh["pipeline"]):
        with pytest.raises(UsageError) as error:
            Pipeline([partial(Routed, workers)] * 2, mesh, loss=mean_error)
        said.append(str(error.value))
    return said


@pytest.mark.process
@pytest.mark.slow
def test_what_a_pipeline_with_experts_refuses() -> None:
    for said in run_processes(4, refused):
        for message, num in zip(said, (4, 2), strict=True):
            assert f"has experts on {num} workers that are no other axis of Mesh" in message
            assert "make them with mesh['data']" in message
