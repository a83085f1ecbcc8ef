"""Step time, efficiency and samples per second for any number of workers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from allstep.plan.cluster import Cluster
from allstep.plan.cost import bucket_cost
from allstep.plan.mesh import MeshSpec
from allstep.plan.pipeline import CopyStep, PipelineSpec
from allstep.plan.policies import MIB, PolicySpec
from allstep.plan.sharding import sharded_step, sharded_waits
from allstep.plan.simulate import StepReport, simulate
from allstep.plan.stragglers import NO_STRAGGLERS, Stragglers
from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import TrainingSpec

_BUCKET_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
# More buckets than this take more time to start than their overlap saves.
_MOST_BUCKETS = 256
# The share of a single worker's speed that each added worker has to add.
WORTH_ADDING = 0.25


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The step time and speed of a policy on some number of workers.

    Attributes:
        policy: the policy, with no argument "auto".
        mesh: copies of the model, and workers of each.
        global_batch: samples of a step.
        num_micro_batches: micro-batches of a step, over all workers.
        report: report of a simulated step.
        single_worker_batch: samples of a step on a single worker.
        single_worker_samples_per_s: throughput of a single worker.
        total_samples: samples of the whole training; None if its length is unknown.
        copy: compute and waits within a copy in a step; the report counts all of it as compute.
    """

    policy: PolicySpec
    mesh: MeshSpec
    global_batch: int
    num_micro_batches: int
    report: StepReport
    single_worker_batch: int
    single_worker_samples_per_s: float
    total_samples: int | None
    copy: CopyStep

    @property
    def num_workers(self) -> int:
        """Workers of all copies."""
        return self.mesh.num_workers

    @property
    def waiting_share(self) -> float:
        """Share of a step spent waiting: for others' data, in the bubble and for stragglers."""
        report = self.report
        return (self.copy.waits_s + report.exposed_s + report.straggler_s) / report.step_s

    @property
    def samples_per_s(self) -> float:
        """Throughput of all workers together."""
        return self.global_batch / self.report.step_s

    @property
    def speed_up(self) -> float:
        """Throughput divided by that of one worker."""
        return self.samples_per_s / self.single_worker_samples_per_s

    @property
    def training_s(self) -> float | None:
        """Seconds of the whole training; None if its length is unknown."""
        return None if self.total_samples is None else self.total_samples / self.samples_per_s

    @property
    def single_worker_training_s(self) -> float | None:
        """Seconds of the whole training on one worker; None if its length is unknown."""
        if self.total_samples is None:
            return None
        return self.total_samples / self.single_worker_samples_per_s

    @property
    def idle_share(self) -> float:
        """Share of the workers' compute time lost because micro-batches don't divide evenly."""
        most = ceil(self.num_micro_batches / self.mesh.data)
        return 1 - self.num_micro_batches / (self.mesh.data * most)

    @property
    def efficiency(self) -> float:
        """Speed-up per worker."""
        return self.speed_up / self.num_workers


def predict(
    training: TrainingSpec,
    cluster: Cluster,
    policies: Iterable[PolicySpec],
    worker_counts: Sequence[int],
    stragglers: Stragglers = NO_STRAGGLERS,
) -> list[Prediction]:
    """Predicts every policy on every number of workers.

    Args:
        training: a step's compute and gradients, and how its batch grows with the workers.
        cluster: the machines and links that it would run on.
        policies: ways to exchange gradients.
        worker_counts: numbers of workers, each up to `cluster.num_workers`.
        stragglers: how much the workers' speeds differ; not at all by default.

    Returns:
        A prediction for each policy and number of workers, policy by policy.

    Raises:
        UsageError: if the cluster has fewer workers, or they would fill a node in part only.

    >>> from allstep.plan.cluster_files import read_cluster
    >>> from allstep.plan.workload import Workload
    >>> micro = Workload.from_step(num_params=25_000_000, step_s=0.11, num_samples=32)
    >>> plain, stale = predict(
    ...     TrainingSpec(micro=micro), read_cluster("ethernet-10g"),
    ...     [PolicySpec(name="fp32"), PolicySpec(name="stale", staleness=1)], [32])
    >>> plain.efficiency < stale.efficiency
    True
    """
    return [
        predict_one(training, cluster, policy, num_workers, stragglers)
        for policy in policies
        for num_workers in worker_counts
    ]


def predict_one(
    training: TrainingSpec,
    cluster: Cluster,
    policy: PolicySpec,
    num_workers: int,
    stragglers: Stragglers = NO_STRAGGLERS,
) -> Prediction:
    """One prediction of `predict`; arguments of the policy that are "auto" become the fastest."""
    step = CopyStep(workload=training.workload(num_workers))
    return _predict_step(
        training, step, cluster.of(num_workers), policy, MeshSpec(data=num_workers), stragglers
    )


def _predict_step(
    training: TrainingSpec,
    step: CopyStep,
    data_axis: Cluster,
    policy: PolicySpec,
    mesh: MeshSpec,
    stragglers: Stragglers = NO_STRAGGLERS,
) -> Prediction:
    """The prediction for the worker that ends last, which exchanges gradients along `data`."""
    best, workload = policy, step.workload
    if not policy.is_settled:
        choices = _choices(policy, data_axis, workload.gradient_bytes)
        best = min(choices, key=lambda choice: simulate(workload, data_axis, choice).step_s)
    return Prediction(
        policy=best,
        mesh=mesh,
        global_batch=training.batch(mesh.data),
        num_micro_batches=ceil(training.batch(mesh.data) / training.micro.num_samples),
        report=simulate(workload, data_axis, best, stragglers),
        single_worker_batch=training.batch(1),
        single_worker_samples_per_s=training.batch(1) / training.workload(1).compute_s,
        total_samples=training.total_samples,
        copy=step,
    )


def predict_mesh(
    training: TrainingSpec,
    transformer: TransformerSpec,
    cluster: Cluster,
    policy: PolicySpec,
    mesh: MeshSpec,
) -> Prediction:
    """Predicts a policy along `data` of a mesh whose copies of a transformer are divided.

    Activations are assumed to travel while nothing else does in a copy, and not at the same time as
    gradients: if both use the same link, the real step takes longer. For pipelines see
    [Note: pipelined step], for models that FSDP2 shards [Note: sharded step].

    Args:
        training: the training on one worker; if its batch isn't fixed, it is one micro-batch per
            *copy* of the model.
        transformer: the model.
        cluster: the machines and links that it would run on.
        policy: how gradients are exchanged along `data`.
        mesh: copies of the model and workers of each.

    Returns:
        The prediction; the same as from `predict` if a copy has one worker.

    Raises:
        UsageError: if the mesh doesn't fit the heads, the blocks, the cluster or its nodes, or if
            there are too few micro-batches for a pipeline.

    >>> from allstep.plan.cluster_files import read_cluster
    >>> from allstep.plan.workload import Workload
    >>> micro = Workload.from_step(num_params=380_000_000, step_s=1.0, num_samples=4)
    >>> blocks = TransformerSpec(depth=24, width=1024, heads=16, sequence_length=1024)
    >>> training = TrainingSpec(micro=micro, global_batch=128)
    >>> for mesh in (MeshSpec(data=8), MeshSpec(data=4, tensor=2), MeshSpec(data=4, pipeline=2)):
    ...     p = predict_mesh(training, blocks, read_cluster("ethernet-25g"),
    ...         PolicySpec(name="fp32"), mesh)
    ...     print(mesh, f"{p.speed_up:.1f}x")
    data=8,tensor=1 8.0x
    data=4,tensor=2 7.9x
    data=4,pipeline=2,tensor=1 6.2x
    """
    data_axis = mesh.data_axis(cluster)
    step = _copy_step(training, transformer, cluster, mesh)
    exchanging = data_axis if mesh.shard == 1 else cluster.of(1)
    return _predict_step(training, step, exchanging, policy, mesh)


def _copy_step(
    training: TrainingSpec,
    transformer: TransformerSpec,
    cluster: Cluster,
    mesh: MeshSpec,
) -> CopyStep:
    micro, num_micro_batches = training.micro, training.num_micro_batches(mesh.data)
    num_activations = transformer.num_activations(micro.num_samples)
    element_bytes = transformer.activation_bytes
    transformer.check_tensor(mesh.tensor)
    all_reduce_s = bucket_cost(
        "fp32", "native", mesh.tensor_axis(cluster), num_activations, element_bytes=element_bytes
    ).seconds
    if mesh.pipeline == 1:
        divided = transformer.divide(micro, mesh.tensor, all_reduce_s)
        sharded = sharded_step(divided, transformer.depth, cluster, mesh)
        passes = ((x.forward_s, x.backward_s) for x in (sharded, divided))
        wait_s = sum(late - early for late, early in zip(*passes, strict=True))
        return CopyStep(
            workload=replace(training, micro=sharded).workload(mesh.data),
            activations_s=2 * num_micro_batches * transformer.waits_s(all_reduce_s),
            sharding_s=num_micro_batches * wait_s,
        )
    stages = PipelineSpec(transformer=transformer, mesh=mesh)
    return stages.step(
        micro,
        num_micro_batches,
        all_reduce_s=all_reduce_s,
        message_s=mesh.stage_link(cluster).seconds(num_activations * element_bytes),
        sharded_waits=lambda num_params: sharded_waits(micro, num_params, cluster, mesh),
    )


def _choices(policy: PolicySpec, cluster: Cluster, gradient_bytes: int) -> Iterator[PolicySpec]:
    sizes = [size for size in _BUCKET_BYTES if gradient_bytes / size <= _MOST_BUCKETS]
    if not sizes:  # a gradient of many gigabytes is also exchanged during the backward pass
        sizes = [-(-gradient_bytes // _MOST_BUCKETS)]
    if policy.sync_every > 1 or cluster.num_workers == 1:
        sizes = []
    for algorithm in _algorithms(cluster, policy.compression):
        for size in (*sizes, None):
            yield policy.with_choice(algorithm, size)


def _algorithms(cluster: Cluster, compression: str) -> list[str]:
    """The measured algorithms, or if there are none, those that suit the number of nodes."""
    timed = [c.algorithm for c in cluster.collectives if c.compression == compression]
    if timed:
        return timed
    names = ["ring", "halving_doubling", "recursive_doubling"]
    if cluster.num_nodes > 1 and cluster.workers_per_node > 1:
        names += ["hierarchical", "two_dimensional"]
    if cluster.has_shared_memory and cluster.num_nodes == 1:
        names.append("shared_memory")
    return names


def worth_adding(rates: Sequence[tuple[int, float]]) -> int:
    """The most workers of which each added one adds at least a quarter of a single one's rate.

    Args:
        rates: pairs (number of workers, samples per second or another rate of progress), by
            increasing number of workers; the first number is taken to be worthwhile.

    >>> worth_adding([(1, 100.0), (2, 190.0), (4, 350.0), (8, 400.0)])  # the last four: 12 each
    4
    """
    best_workers, best_rate = rates[0]
    lone_rate = best_rate / best_workers
    for num_workers, rate in rates[1:]:
        if rate - best_rate >= WORTH_ADDING * lone_rate * (num_workers - best_workers):
            best_workers, best_rate = num_workers, rate
    return best_workers
