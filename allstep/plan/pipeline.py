"""The time of a step in a pipeline: compute of stages, the bubble, and messages between stages.

[Note: pipelined step] The `depth` blocks are divided among p workers; the first depth mod p workers
have one more than the others. The first worker also has the embeddings, and the last one all
compute outside the blocks: logits and the loss. Worker i computes a micro-batch in t_i seconds,
forward and backward, waits of tensor parallelism included; if it has v interleaved stages, in v
turns. A neighbour's activations or gradients arrive after c seconds, twice for each micro-batch and
each border between stages. No compute overlaps these messages, so a turn takes

    t_i / v + 2 c (1 - 1 / (v p))

under the 1F1B schedule, averaged over a pipeline's ends and middle. With m micro-batches a step
takes

    sum of all workers' turns + (v m - 1) slowest turn

so with equal stages the bubble, in which a worker is idle, is this share of a step:

    (p - 1) / (v m + p - 1)

The first worker ends last; its gradients are exchanged after its last backward pass, as in
`Batch.run`.

Source: Narayanan et al., 2021, arXiv:2104.04473, section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from allstep.errors import UsageError
from allstep.plan.mesh import MeshSpec
from allstep.plan.transformer import TransformerSpec, scaled_gradients
from allstep.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A copy of the model whose blocks are divided among workers. See [Note: pipelined step].

    Args:
        transformer: the model.
        mesh: how the blocks are divided: among p workers along `pipeline`, with v stages each.

    Raises:
        UsageError: if there are fewer blocks than stages.

    >>> blocks = TransformerSpec(depth=6, width=8, heads=2, sequence_length=8)
    >>> PipelineSpec(transformer=blocks, mesh=MeshSpec(pipeline=4)).depths
    (2, 2, 1, 1)
    """

    transformer: TransformerSpec
    mesh: MeshSpec

    def __post_init__(self) -> None:
        depth, v = self.transformer.depth, self.mesh.stages_per_worker
        if self.mesh.pipeline * v > depth:
            turns = f" x `stages_per_worker` (={v})" * (v > 1)
            raise UsageError(
                f"`pipeline` (={self.mesh.pipeline}){turns} must be at most the {depth} blocks, of"
                " which each stage has one or more."
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks of each worker."""
        each, more = divmod(self.transformer.depth, self.mesh.pipeline)
        return tuple(each + (worker < more) for worker in range(self.mesh.pipeline))

    def check_micro_batches(self, num_micro_batches: int) -> None:
        """Checks that there are at least as many micro-batches as workers, as the schedule needs.

        Raises:
            UsageError: saying what would give enough.
        """
        p = self.mesh.pipeline
        if num_micro_batches < p:
            raise UsageError(
                f"`pipeline` (={p}) needs {p} micro-batches of each copy in a step, or more, and"
                f" there are {num_micro_batches}: give a larger `global_batch` or a smaller"
                " `micro_batch`, or fewer workers along `pipeline`."
            )

    def local_params(self, num_params: int) -> list[int]:
        """Parameters of each worker; the first and the last each have those outside the blocks."""
        blocks, p, tensor = self.transformer, self.mesh.pipeline, self.mesh.tensor
        if p == 1:
            return [blocks.local_params(num_params, tensor)]
        outside, of_block = blocks.outside_params(num_params), blocks.block_params(tensor)
        ends = (0, p - 1)
        return [of_block * d + outside * (i in ends) for i, d in enumerate(self.depths)]

    def in_flight(self, worker: int, num_micro_batches: int) -> float:
        """The most micro-batches whose activations a worker keeps, in units of all its blocks.

        It is p - i for worker i, and with interleaved stages (2 (p - 1 - i) + (v - 1) p + 1) / v.

        >>> blocks = TransformerSpec(depth=8, width=8, heads=2, sequence_length=8)
        >>> for mesh in (MeshSpec(pipeline=4), MeshSpec(pipeline=4, stages_per_worker=2)):
        ...     print(PipelineSpec(transformer=blocks, mesh=mesh).in_flight(0, 16))
        4.0
        5.5
        """
        p, v = self.mesh.pipeline, self.mesh.stages_per_worker
        turns = p - worker if v == 1 else 2 * (p - 1 - worker) + (v - 1) * p + 1
        return min(v * num_micro_batches, turns) / v

    def step(
        self,
        micro: Workload,
        num_micro_batches: int,
        *,
        all_reduce_s: float = 0.0,
        message_s: float = 0.0,
        sharded_waits: Callable[[int], tuple[float, float]] = lambda num_params: (0.0, 0.0),
    ) -> "CopyStep":
        """A step of a copy, from the view of its first worker.

        Args:
            micro: a micro-batch's step on one worker, undivided.
            num_micro_batches: micro-batches of the copy in a step.
            all_reduce_s: seconds of the sum of a micro-batch's activations over the workers that
                share each layer.
            message_s: seconds to send a micro-batch's activations to a neighbour.
            sharded_waits: number of a worker's parameters -> seconds for which it waits for FSDP2
                in a micro-batch, forward and backward. [Note: sharded step]

        Returns:
            The step's compute and waits, without the exchange of gradients.

        Raises:
            UsageError: if there are fewer micro-batches than workers.

        >>> blocks = TransformerSpec(depth=4, width=4, heads=2, sequence_length=8)
        >>> whole = Workload(num_params=4 * (12 * 16 + 13 * 4), forward_s=1.0, backward_s=2.0)
        >>> found = PipelineSpec(transformer=blocks, mesh=MeshSpec(pipeline=4)).step(whole, 5)
        >>> found.workload.compute_s, found.bubble_s  # 3 / (5 + 3) of it
        (6.0, 2.25)
        """
        self.check_micro_batches(num_micro_batches)
        forward_s = self._stages_s(micro.forward_s, micro.num_params, all_reduce_s)
        backward_s = self._stages_s(micro.backward_s, micro.num_params, all_reduce_s)
        local_params = self.local_params(micro.num_params)
        sharding_s = [sharded_waits(num_params) for num_params in local_params]
        forward_s = [s + wait_s for s, (wait_s, _) in zip(forward_s, sharding_s, strict=True)]
        backward_s = [s + wait_s for s, (_, wait_s) in zip(backward_s, sharding_s, strict=True)]
        stages_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        p, v, m = self.mesh.pipeline, self.mesh.stages_per_worker, num_micro_batches
        messages_s = 2 * message_s * (1 - 1 / (v * p))  # per turn
        turns_s = [stage_s / v + messages_s for stage_s in stages_s]
        busy_s = v * m * max(turns_s)
        bubble_s = sum(turns_s) - max(turns_s)
        busiest = stages_s.index(max(stages_s))
        waits_s = 2 * self._waits_s(busiest, all_reduce_s) + v * messages_s
        num_params = local_params[0]
        last_s = backward_s[0] / v
        return CopyStep(
            workload=replace(
                micro,
                num_params=num_params,
                forward_s=busy_s + bubble_s - last_s,
                backward_s=last_s,
                ready=((0.0, 1.0), (1.0, 1.0)),
                optimizer_s=micro.optimizer_s * num_params / micro.num_params / self.mesh.shard,
                num_samples=m * micro.num_samples,
                gradients=scaled_gradients(micro.gradients, num_params),
            ),
            bubble_s=bubble_s,
            activations_s=m * waits_s,
            sharding_s=m * sum(sharding_s[busiest]),
        )

    def _stages_s(self, whole_s: float, num_params: int, all_reduce_s: float) -> list[float]:
        """Each worker's seconds of a pass that takes `whole_s` on one worker."""
        divided = self.transformer.block_share(num_params)
        block_s = whole_s * divided / self.mesh.tensor / self.transformer.depth
        seconds = [
            depth * block_s + self._waits_s(worker, all_reduce_s)
            for worker, depth in enumerate(self.depths)
        ]
        seconds[-1] += whole_s * (1 - divided)
        return seconds

    def _waits_s(self, worker: int, all_reduce_s: float) -> float:
        return replace(self.transformer, depth=self.depths[worker]).waits_s(all_reduce_s)


@dataclass(frozen=True, kw_only=True)
class CopyStep:
    """A step of the workers of a copy, without the exchange of gradients.

    Attributes:
        workload: workload of the worker that ends last, waits included.
        activations_s: seconds for which the busiest worker waits for activations, from neighbours
            in a pipeline and in tensor parallelism.
        bubble_s: seconds for which it is idle in the pipeline's bubble.
        sharding_s: seconds for which it waits for parameters and gradients that FSDP2 has sharded.
    """

    workload: Workload
    activations_s: float = 0.0
    bubble_s: float = 0.0
    sharding_s: float = 0.0

    @property
    def waits_s(self) -> float:
        """The sum of all waits."""
        return self.activations_s + self.bubble_s + self.sharding_s
