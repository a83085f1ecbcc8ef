"""Stages of a pipeline with layers that tensor parallelism divides: data x pipeline x tensor."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError
from allstep.comm import Mesh, shards_of
from allstep.nn import Pipeline, tensor_parallel
from tests.helpers.divided import whole_state
from tests.helpers.processes import RemoteError, run_processes
from tests.nn.test_pipeline import (
    Block,
    Head,
    Maker,
    Trained,
    assert_other,
    assert_same,
    assert_same_bits,
    inputs_of,
    keep,
    mean_error,
    plainly,
    train,
)


class Wide(nn.Module):
    """Two layers that can be divided; returns what the second one adds up over the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8, dtype=torch.float64)
        self.output = nn.Linear(8, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.output(self.hidden(self.dropout(x)).tanh()), counts


class WideDropped(Wide):
    """Drops divided features, of which each worker draws the mask of its first ones."""

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.output(self.dropout(self.hidden(x).tanh())), counts


# With two workers along the pipeline the first one has no layer that is divided.
STAGES: tuple[Maker, ...] = (Block, Block, Wide, Head)
DROPPED: tuple[Maker, ...] = (Block, Block, WideDropped, Head)
CLIP_NORM = 0.3
EXACT = allstep.Synchronous(compression="exact")


def divided(make: Maker, mesh: Mesh[Communicator]) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    stage = make()
    if isinstance(stage, Wide):
        tensor_parallel(stage, mesh, {"hidden": ColwiseParallel(), "output": RowwiseParallel()})
    return stage


def make(
    comm: Communicator,
    num_data: int,
    num_pipeline: int,
    schedule: str = "1f1b",
    stages: tuple[Maker, ...] = STAGES,
) -> tuple[Pipeline, Mesh[Communicator]]:
    num_tensor = comm.size // num_data // num_pipeline
    mesh = comm.mesh(data=num_data, pipeline=num_pipeline, tensor=num_tensor)
    torch.manual_seed(0)
    model = Pipeline(
        [partial(divided, make, mesh) for make in stages],
        mesh,
        loss=mean_error,
        inputs=inputs_of,
        schedule=schedule,
    )
    has_wide = any(isinstance(module, Wide) for module in model.modules())
    assert bool(shards_of(model)) == (num_tensor > 1 and has_wide)
    return model, mesh


def trained(
    comm: Communicator,
    num_data: int,
    num_pipeline: int,
    schedule: str = "1f1b",
    stages: tuple[Maker, ...] = STAGES,
    policy: allstep.ExchangePolicy | None = None,
) -> Trained:
    """Twenty steps on data x pipeline x tensor."""
    model, mesh = make(comm, num_data, num_pipeline, schedule, stages)
    found = train(
        model, mesh["data"], lambda batch: batch.run(model), policy=policy, clip_norm=CLIP_NORM
    )
    return found._replace(state=whole_state(model))


@pytest.mark.process
def test_divided_stages_are_the_same_model() -> None:
    expected = plainly(stages=STAGES, clip_norm=CLIP_NORM)
    assert_other(plainly(stages=STAGES), expected)
    for found in run_processes(4, trained, 1, 2):
        assert_same(found, expected)


@pytest.mark.process
@pytest.mark.slow
def test_control_of_divided_stages() -> None:
    """Masks of features of which each worker has others are those of another model."""
    expected = plainly(stages=DROPPED, clip_norm=CLIP_NORM)
    for found in run_processes(2, trained, 1, 1, "1f1b", DROPPED):
        assert_other(found, expected)


def variants(comm: Communicator, num_data: int, num_pipeline: int) -> dict[str, Trained]:
    """What is trained on a mesh, in one start of its processes."""
    train_on_mesh = partial(trained, comm, num_data, num_pipeline)
    return {
        "float": train_on_mesh(),
        "exact": train_on_mesh("interleaved", policy=EXACT),
    }


@pytest.mark.process
@pytest.mark.slow
def test_meshes_of_three_axes() -> None:
    """Exact sums have the bits of a mesh with another number of copies."""
    plain = partial(plainly, stages=STAGES, clip_norm=CLIP_NORM)
    expected = plain()
    found: dict[tuple[int, ...], list[dict[str, Trained]]] = {}
    for mesh in ((1, 2, 2), (2, 2, 2), (2, 1, 2)):
        size = mesh[0] * mesh[1] * mesh[2]
        found[mesh] = run_processes(size, variants, *mesh[:2], timeout_s=300)
        for of_worker in found[mesh]:
            assert_same(of_worker["float"], expected)
            assert_same(of_worker["exact"], plain(policy=EXACT))
    for worker, other in zip(found[2, 2, 2], 2 * found[1, 2, 2], strict=True):
        assert_same_bits(worker["exact"], other["exact"])
        assert worker["float"].losses != other["float"].losses


# -- checkpoints ---------------------------------------------------------------------------------


def kept(
    comm: Communicator,
    num_data: int,
    num_pipeline: int,
    schedule: str,
    run_dir: Path,
    stops_after: int | None,
    policy: allstep.ExchangePolicy = EXACT,
) -> dict[str, Tensor]:
    model, mesh = make(comm, num_data, num_pipeline, schedule)
    keep(model, mesh["data"], run_dir, stops_after, policy)
    return whole_state(model)


@pytest.mark.process
@pytest.mark.slow
def test_divided_stages_go_on_on_another_mesh(tmp_path: Path) -> None:
    """From a checkpoint of 2 x 2 x 2; where layers are cut in as many parts, with the same bits."""
    alone = Communicator.single_process()
    expected = kept(alone, 1, 1, "1f1b", tmp_path / "straight", None)
    bits = run_processes(4, kept, 1, 2, "gpipe", tmp_path / "straight-4", None, timeout_s=200)
    run_processes(8, kept, 2, 2, "interleaved", tmp_path / "run", 1, timeout_s=200)
    for size, num_data, num_pipeline in ((1, 1, 1), (4, 1, 2), (4, 2, 2)):
        folder = tmp_path / f"{size}-{num_data}-{num_pipeline}"
        shutil.copytree(tmp_path / "run", folder)
        arguments = num_data, num_pipeline, "gpipe", folder, None
        if size == 1:
            found = [kept(alone, *arguments)]
        else:
            found = run_processes(size, kept, *arguments, timeout_s=200)
        for rank, state in enumerate(found):
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
                if size == 4 * num_data:
                    assert torch.equal(value, bits[rank % 4][name])


@pytest.mark.process
@pytest.mark.slow
def test_gradients_in_flight_go_on_where_the_stages_are_the_same(tmp_path: Path) -> None:
    stale = allstep.Stale(steps=1)
    arguments = 2, 2, "1f1b"
    expected = run_processes(4, kept, *arguments, tmp_path / "straight", None, stale)
    run_processes(4, kept, *arguments, tmp_path / "run", 1, stale)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    found = run_processes(4, kept, *arguments, tmp_path / "run", None, stale)
    for state, other in zip(found, expected, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in state.items())
    words = "CheckpointError: The checkpoint has gradients that were not sent or not used yet, of"
    with pytest.raises(RemoteError, match=words):
        run_processes(4, kept, 2, 2, "interleaved", tmp_path / "copy", None, stale)


# -- what is refused -----------------------------------------------------------------------------


def refused(comm: Communicator) -> dict[str, str]:
    """What `attach` says to each other axis but that of data, and to all workers."""
    model, mesh = make(comm, 1, 2, stages=(Block, Wide, Wide, Head))
    said = {}
    for axis in ("pipeline", "tensor", "all"):
        with pytest.raises(UsageError) as error:
            allstep.attach(model, comm if axis == "all" else mesh[axis])
        said[axis] = str(error.value)
    return said


@pytest.mark.process
@pytest.mark.slow
def test_divided_stages_are_attached_along_data() -> None:
    for said in run_processes(4, refused):
        for message in said.values():
            assert "attach it to mesh['data'], whose workers have the same" in message
