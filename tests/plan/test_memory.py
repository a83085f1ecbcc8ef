"""The memory that a worker of a mesh takes in a step, against the plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.comm import Mesh
from allstep.nn import Pipeline, tensor_parallel
from allstep.plan import MeshSpec, TrainingSpec, TransformerSpec, Workload
from allstep.plan.memory import memory_of_workers
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer import Transformer, TransformerConfig, TransformerStage
from allstep.recipes.transformer_parallel import divide_stage, shard_blocks, tensor_parallel_plan
from tests.helpers.processes import run_processes
from tests.helpers.resident import Step, peak_bytes

SPEC = TransformerSpec(depth=8, width=512, heads=4, sequence_length=32)
CONFIG = TransformerConfig(
    vocab_size=4096, sequence_length=32, width=512, depth=8, heads=4, dropout=0.1, causal=True
)
BATCH = 4
NUM_PARAMS = SPEC.depth * SPEC.block_params(1) + (4096 + 32 + 2) * SPEC.width
MICRO = Workload.from_step(num_params=NUM_PARAMS, step_s=1.0, num_samples=BATCH)


def num_micro_batches(spec: MeshSpec) -> int:
    """Of a copy: several, so that gradients add up, and one for each stage."""
    return max(2, spec.pipeline)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return summed_cross_entropy(logits.flatten(0, 1), tokens.flatten()) / tokens.numel()


def make_model(mesh: Mesh[Communicator], spec: MeshSpec, config: TransformerConfig) -> nn.Module:
    if spec.pipeline > 1:

        def make_stage(number: int) -> nn.Module:
            stage = TransformerStage(config, number)
            if spec.tensor > 1:
                divide_stage(stage, mesh)
            if spec.shard > 1:
                shard_blocks(stage, mesh.device_mesh()["data"])
            return stage

        stages = [partial(make_stage, number) for number in range(config.depth)]
        return Pipeline(stages, mesh, loss=lambda logits, batch: loss_of(logits, batch[0]))
    model = Transformer(config)
    if spec.tensor > 1:
        tensor_parallel(model, mesh, tensor_parallel_plan(model))
    if spec.shard > 1:
        copies = spec.data // spec.shard
        axes = mesh.comm.mesh(replicate=copies, shard=spec.shard, tensor=spec.tensor)
        names = ("replicate", "shard") if copies > 1 else ("shard",)
        shard_blocks(model, axes.device_mesh()[names])
    return model


def make_step(comm: Communicator, spec: MeshSpec, config: TransformerConfig) -> Step:
    """Global batches of several micro-batches a copy, and AdamW."""
    lengths = {"pipeline": spec.pipeline, "tensor": spec.tensor}
    mesh = comm.mesh(data=spec.data, **{axis: n for axis, n in lengths.items() if n > 1})
    model = make_model(mesh, spec, config)
    exchange = allstep.attach(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    num_samples = spec.data * num_micro_batches(spec) * BATCH
    shape = (2 * num_samples, config.sequence_length)
    tokens = torch.arange(shape[0] * shape[1]).remainder(config.vocab_size).view(shape)
    loader = allstep.data.loader(
        TensorDataset(tokens), mesh["data"], global_batch=num_samples, micro_batch=BATCH
    )
    batches = allstep.steps(loader, exchange)

    def step() -> None:
        batch = next(batches)
        if isinstance(model, Pipeline):
            batch.run(model)
        else:
            for (tokens,) in batch:
                batch.backward(loss_of(model(tokens), tokens))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(comm: Communicator, spec: MeshSpec) -> int:
    small = replace(CONFIG, width=8, depth=spec.pipeline, vocab_size=64)
    make: Callable[[TransformerConfig], Step] = partial(make_step, comm, spec)
    return peak_bytes(comm, partial(make, small), partial(make, CONFIG))


def predicted(spec: MeshSpec) -> list[int]:
    """Of each worker."""
    training = TrainingSpec(micro=MICRO, global_batch=spec.data * num_micro_batches(spec) * BATCH)
    found = memory_of_workers(training, SPEC, spec)
    return [memory.total for memory in found for _ in range(spec.tensor)] * spec.data


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"tensor": 2},
        {"pipeline": 2},
        {"data": 2, "shard": 2},
        {"pipeline": 2, "tensor": 2},
        *(
            pytest.param(axes, marks=pytest.mark.long)
            for axes in (
                {"data": 4},
                {"tensor": 4},
                {"pipeline": 4},
                {"data": 4, "shard": 4},
                {"data": 4, "shard": 2},
                {"data": 2, "tensor": 2},
                {"data": 2, "tensor": 2, "shard": 2},
                {"data": 2, "pipeline": 2},
                {"data": 2, "pipeline": 2, "shard": 2},
            )
        ),
    ],
    ids=lambda axes: str(MeshSpec(**axes)),
)
def test_memory_is_what_workers_of_a_mesh_take(axes: dict[str, int]) -> None:
    spec = MeshSpec(**axes)
    found = run_processes(spec.num_workers, measured, spec, timeout_s=300.0)
    assert predicted(spec) == pytest.approx(found, rel=0.1)
