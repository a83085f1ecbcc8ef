"""Bytes that a worker of a mesh needs.

For n local parameters of b bytes, k optimizer states of each, and a micro-batch of T tokens, in
bytes:

    parameters     n b
    gradients      n b            (buckets are the gradients' own memory, on CPUs)
    optimizer      k n b
    activations    T a (w (depth (2 + 4 c + 12/t) + 1 + 2 c) + l v)

a are the bytes of an activation, w the width, t the workers of a copy and v the logits of a token;
n and v as in [Note: divided blocks]. c is what a worker has between the halves of blocks: 1/t,
sharded along the sequence, and 1 in a pipeline, where it is whole. A block keeps for its backward
pass the outputs of its two norms, gathered (2 w), their inputs and the factors of its two dropouts
(4 c w), and queries, keys, values, attention, and the hidden features before and after GELU, which
are divided (12 w / t). The embeddings' dropout and the last norm keep w (1 + 2 c). Of the logits'
size there are l tensors at a time: 3 on a worker that has all of them, the logarithms and two
gradients; 4 in a pipeline, where torch keeps the logits, too; 2/t where they are sharded along the
vocabulary, as the loss of `text` finds the gradient beside the logits. It is for attention that
keeps no scores (flash) and without activation checkpointing; what the framework, kernels and
collectives take beside is not in it. Memory that workers of a host share is counted once: a
resident set as the system shows it has the buckets of all workers of the host.

Where FSDP2 shards over s workers, each has 1/s of parameters, gradients and optimizer states, and
whole what a pass needs at a time: the rest r all the time, a block B that computes, the next one
that is gathered, and gradients of a block or of the rest that are summed, with a copy of them on
their way:

    parameters     (n / s + r + 2 B) b        (r + B in a pipeline, which gathers none before)
    gradients      (n / s + 2 max(r, B)) b
    optimizer      k n b / s

Of a pipeline's p workers the first has the embeddings, the last also the logits' matrix as its own,
with the last norm, logits and loss; each has its blocks. Worker i of the 1F1B schedule keeps the
activations of p - i micro-batches at most, and torch's schedules keep room for what all m
micro-batches of a step send it: m T a w from each neighbour. What counts is the worker that needs
most.
"""

from dataclasses import dataclass

from allstep.plan.mesh import MeshSpec
from allstep.plan.pipeline import PipelineSpec
from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import TrainingSpec

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one worker, in bytes.

    Attributes:
        parameters, gradients, optimizer: of its part of the model.
        activations: of one micro-batch at the end of the forward pass, of a pipeline of all that
            are in flight, and room for messages.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        """All of them in GiB."""
        return self.total / GIB


def memory_of(
    training: TrainingSpec,
    transformer: TransformerSpec,
    mesh: MeshSpec,
    states_per_param: float = 2,
) -> Memory:
    """What a worker of a copy needs; of a pipeline the one that needs most.

    Args:
        training: undivided, with one micro-batch a copy if its batch isn't fixed.
        transformer: which is divided.
        mesh: over how many workers, and over how many FSDP2 shards what each of them has.
        states_per_param: of the optimizer, each as large as the parameters: 2 of AdamW, 1 of SGD
            with momentum.

    Returns:
        Its bytes.

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
    """What each worker of a pipeline needs; arguments as of `memory_of`."""
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
    """What a worker needs of states that are sharded; blocks are gathered, and the rest."""
    return Memory(
        parameters=whole.parameters // shard + rest + num_gathered * block,
        gradients=whole.gradients // shard + 2 * max(rest, block),
        optimizer=whole.optimizer // shard,
        activations=whole.activations,
    )


def _kept_of_token(stages: PipelineSpec, worker: int, num_logits: float) -> float:
    """Numbers that a worker keeps of a micro-batch's token for the backward pass."""
    width, p, tensor = stages.transformer.width, stages.mesh.pipeline, stages.mesh.tensor
    between = 1 / tensor if p == 1 else 1.0
    kept = width * stages.depths[worker] * (2 + 4 * between + 12 / tensor)
    if worker == 0:
        kept += width * between
    if worker == p - 1:
        kept += width * (1 + between) + _logits_at_a_time(stages.mesh) * num_logits
    return kept


def _logits_at_a_time(mesh: MeshSpec) -> float:
    """What is there of their size at most, in the loss or when its backward pass begins."""
    if mesh.pipeline > 1:
        return 4
    return 3 if mesh.tensor == 1 else 2 / mesh.tensor
