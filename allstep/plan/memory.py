"""The memory in bytes that a worker of a mesh needs.

For n local parameters of b bytes each, k optimizer states per parameter, and a micro-batch of T
tokens, it is in bytes:

    parameters     n b
    gradients      n b            (on CPUs, buckets are the gradients' own memory)
    optimizer      k n b
    activations    T a (w (depth (2 + 4 c + 12/t) + 1 + 2 c) + l v)

Here a is the size of an activation in bytes, w the width, t the number of workers of a copy, and v
the number of logits per token; n and v are as in [Note: divided blocks]. c is a worker's share of
the activations between half blocks: 1/t, as they are sharded along the sequence, and 1 in a
pipeline, where they are whole. For its backward pass a block keeps the gathered outputs of its two
norms (2 w), the norms' inputs and the scaled masks of its two dropouts (4 c w), and the divided
queries, keys, values, attention outputs, and hidden features before and after GELU (12 w / t). The
embeddings' dropout and the last norm keep w (1 + 2 c). l is the number of tensors of the logits'
size that exist at the same time: 3 on a worker that has all logits, for the logarithms and two
gradients; 4 in a pipeline, where torch keeps the logits, too; 2/t where the vocabulary is sharded,
since the loss of `text` computes the gradient next to the logits. The formula holds for attention
that keeps no scores (flash) and without activation checkpointing; memory of the framework, kernels
and collectives is not included. Memory that workers of a host share is counted once, whereas the
resident set size that the system reports for each process includes the buckets of all workers of
the host.

With FSDP2 over s workers, each worker keeps 1/s of parameters, gradients and optimizer states. In
addition it holds what a pass needs in full: the parameters r outside the blocks all the time, the
block B that is computing, the next block, which is being gathered, and the gradients of a block or
of r that are being summed, with a copy of them that is being sent:

    parameters     (n / s + r + 2 B) b        (r + B in a pipeline, which gathers no block ahead)
    gradients      (n / s + 2 max(r, B)) b
    optimizer      k n b / s

Each of a pipeline's p workers has its blocks; in addition the first has the embeddings, and the
last has its own copy of the logits' matrix, the last norm, the logits and the loss. Under the 1F1B
schedule worker i keeps the activations of at most p - i micro-batches, and torch's schedules
allocate buffers for what all m micro-batches of a step send it: m T a w from each neighbour. The
result for a pipeline is that of the worker that needs most.
"""

from dataclasses import dataclass

from allstep.plan.mesh import MeshSpec
from allstep.plan.pipeline import PipelineSpec
from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import TrainingSpec

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one worker, in bytes.

    Attributes:
        parameters, gradients, optimizer: memory for its part of the model.
        activations: activations of one micro-batch at the end of the forward pass; in a pipeline
            those of all micro-batches in flight, and buffers for messages.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The total in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        """The total in GiB."""
        return self.total / GIB


def memory_of(
    training: TrainingSpec,
    transformer: TransformerSpec,
    mesh: MeshSpec,
    states_per_param: float = 2,
) -> Memory:
    """The memory of a worker; in a pipeline that of the worker that needs most.

    Args:
        training: the training on one worker; if its batch isn't fixed, it is one micro-batch per
            copy of the model.
        transformer: the model.
        mesh: how the model is divided, and over how many workers FSDP2 shards it.
        states_per_param: optimizer states, each as large as the parameters: 2 for AdamW, 1 for SGD
            with momentum.

    Returns:
        The worker's memory.

    Raises:
        UsageError: if there are fewer blocks than stages.

    >>> from allstep.plan.workload import Workload
    >>> micro = Workload.from_step(num_params=1_062_656, step_s=0.1, num_samples=16)
    >>> small = TransformerSpec(depth=4, width=128, heads=4, sequence_length=64)
    >>> training = TrainingSpec(micro=micro, global_batch=64)
    >>> meshes = MeshSpec(), MeshSpec(tensor=2), MeshSpec(data=4, shard=4), MeshSpec(pipeline=2)
    >>> for mesh in meshes:
    ...     print(f"{memory_of(training, small, mesh).total / 1e6:.1f} MB")
    81.4 MB
    39.0 MB
    73.5 MB
    66.1 MB
    """
    found = memory_of_workers(training, transformer, mesh, states_per_param)
    return max(found, key=lambda memory: memory.total)


def memory_of_workers(
    training: TrainingSpec,
    transformer: TransformerSpec,
    mesh: MeshSpec,
    states_per_param: float = 2,
) -> list[Memory]:
    """The memory of each worker of a pipeline; arguments as for `memory_of`."""
    stages = PipelineSpec(transformer=transformer, mesh=mesh)
    micro, num_micro_batches = training.micro, training.num_micro_batches(mesh.data)
    num_tokens = micro.num_samples * transformer.sequence_length
    activation_bytes = num_tokens * transformer.activation_bytes
    num_logits = transformer.vocabulary_params(micro.num_params) / transformer.width
    found = []
    for worker, num_params in enumerate(stages.local_params(micro.num_params)):
        kept = _kept_of_token(stages, worker, num_logits)
        in_flight = stages.in_flight(worker, num_micro_batches)
        is_first, is_last = worker == 0, worker == mesh.pipeline - 1
        num_received = num_micro_batches * (2 * mesh.stages_per_worker - is_first - is_last)
        num_bytes = num_params * micro.element_bytes
        numbers = in_flight * kept + num_received * transformer.width
        whole = Memory(
            parameters=num_bytes,
            gradients=num_bytes,
            optimizer=round(states_per_param * num_bytes),
            activations=round(activation_bytes * numbers),
        )
        block = transformer.block_params(mesh.tensor) * micro.element_bytes
        rest, num_gathered = num_bytes - stages.depths[worker] * block, 1 + (is_first and is_last)
        shard = mesh.shard
        found.append(whole if shard == 1 else _shard_of(whole, shard, block, rest, num_gathered))
    return found


def _shard_of(whole: Memory, shard: int, block: int, rest: int, num_gathered: int) -> Memory:
    """The memory of a worker with sharded states, when `num_gathered` blocks are gathered."""
    return Memory(
        parameters=whole.parameters // shard + rest + num_gathered * block,
        gradients=whole.gradients // shard + 2 * max(rest, block),
        optimizer=whole.optimizer // shard,
        activations=whole.activations,
    )


def _kept_of_token(stages: PipelineSpec, worker: int, num_logits: float) -> float:
    """Elements per token of a micro-batch that a worker keeps for the backward pass."""
    width, p, tensor = stages.transformer.width, stages.mesh.pipeline, stages.mesh.tensor
    between = 1 / tensor if p == 1 else 1.0
    kept = width * stages.depths[worker] * (2 + 4 * between + 12 / tensor)
    if worker == 0:
        kept += width * between
    if worker == p - 1:
        kept += width * (1 + between) + _logits_at_a_time(stages.mesh) * num_logits
    return kept


def _logits_at_a_time(mesh: MeshSpec) -> float:
    """The most tensors of the logits' size at a time, in the loss or as its backward begins."""
    if mesh.pipeline > 1:
        return 4
    return 3 if mesh.tensor == 1 else 2 / mesh.tensor
