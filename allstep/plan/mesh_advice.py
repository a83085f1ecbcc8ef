"""Chooses the fastest mesh that fits, and says why the others are excluded.

[Note: which mesh] Meshes are ranked by the time to train: samples per second, or the time to the
target. Among those within 2 % of the fastest, the least divided is chosen, since whole copies need
no messages within or between layers; among equally divided ones, one that isn't sharded. A mesh is
excluded if a copy can't be divided that way, if a pipeline has fewer micro-batches than workers, or
if a worker would need more memory than it has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from allstep.errors import UsageError, check_positive
from allstep.plan.bottlenecks import largest_bottleneck
from allstep.plan.cluster import Cluster
from allstep.plan.describe import seconds_text, times_text
from allstep.plan.memory import Memory, memory_of
from allstep.plan.mesh import MeshSpec
from allstep.plan.policies import PolicySpec
from allstep.plan.predict import Prediction, predict_mesh
from allstep.plan.recommend import AS_FAST, gain_of
from allstep.plan.time_to_target import Target
from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class MeshOption:
    """A mesh that the model can be divided over; it may need too much memory.

    Attributes:
        prediction: prediction of a step on the mesh.
        memory: memory of a worker.
    """

    prediction: Prediction
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class MeshAdvice:
    """The recommended mesh and its alternatives.

    Attributes:
        choice: the recommended mesh; None if none fits, or if one worker is faster.
        sentence: what to do and why.
        options: the meshes that the model can be divided over, the fastest first.
        left_out: excluded mesh -> reason.
    """

    choice: MeshOption | None
    sentence: str
    options: Sequence[MeshOption]
    left_out: dict[MeshSpec, str]


def recommend_mesh(
    training: TrainingSpec,
    transformer: TransformerSpec,
    cluster: Cluster,
    policy: PolicySpec,
    meshes: Iterable[MeshSpec],
    *,
    states_per_param: float = 2,
    memory_gib: float | None = None,
    target: Target | None = None,
) -> MeshAdvice:
    """Chooses among meshes. See [Note: which mesh].

    Args:
        training: the training on one worker; if its batch isn't fixed, it is one micro-batch per
            copy of the model.
        transformer: the model.
        cluster: the machines.
        policy: how gradients are exchanged along `data`.
        meshes: the meshes to choose from.
        states_per_param: optimizer states per parameter; see `memory_of`.
        memory_gib: memory of a worker in GiB; None for no limit.
        target: a target, to rank meshes by the time to it instead of samples per second.

    Returns:
        The fastest mesh that fits, and why others are excluded.

    Raises:
        UsageError: if `memory_gib` isn't positive, or parameters and blocks contradict each other.

    >>> from allstep.plan.cluster_files import read_cluster
    >>> from allstep.plan.workload import Workload
    >>> micro = Workload.from_step(num_params=1_200_000_000, step_s=2.0, num_samples=8)
    >>> blocks = TransformerSpec(depth=40, width=1536, heads=16, sequence_length=1024)
    >>> found = recommend_mesh(
    ...     TrainingSpec(micro=micro), blocks, read_cluster("ethernet-100g"),
    ...     PolicySpec(name="fp32"), MeshSpec.all_of(8), memory_gib=28)
    >>> str(found.choice.prediction.mesh), [str(mesh) for mesh in found.left_out]
    ('data=4,tensor=2,shard=4', ['data=8,tensor=1', 'data=8,tensor=1,shard=8', 'data=4,tensor=2'])
    """
    if memory_gib is not None:
        check_positive("memory_gib", memory_gib, "32 is 32 GiB a worker")
    transformer.outside_params(training.micro.num_params)
    left_out, options = {}, []
    memory = partial(memory_of, training, transformer, states_per_param=states_per_param)

    def fits(found: Memory) -> bool:
        return memory_gib is None or found.total_gib <= memory_gib

    for mesh in meshes:
        try:
            prediction = predict_mesh(training, transformer, cluster, policy, mesh)
        except UsageError as error:
            left_out[mesh] = str(error)
            continue
        options.append(MeshOption(prediction=prediction, memory=memory(mesh)))
        if not fits(options[-1].memory):
            left_out[mesh] = (
                f"a worker needs {options[-1].memory.total_gib:,.3g} GiB, and has {memory_gib:g}."
            )
    options.sort(key=lambda option: -gain_of(option.prediction, target))
    fitting = [option for option in options if option.prediction.mesh not in left_out]
    if not fitting:
        return MeshAdvice(
            choice=None, sentence=_none_fits(options), options=options, left_out=left_out
        )
    choice = _least_divided(fitting, target)
    if gain_of(choice.prediction, target) < 1 and fits(memory(MeshSpec())):
        sentence, found = _one_worker(choice.prediction, target), None
    else:
        sentence, found = _do(choice, fitting, target), choice
    return MeshAdvice(choice=found, sentence=sentence, options=options, left_out=left_out)


def _least_divided(fitting: Sequence[MeshOption], target: Target | None) -> MeshOption:
    """The least divided of the options that are about as fast as the first one."""
    most = gain_of(fitting[0].prediction, target)
    as_fast = [o for o in fitting if gain_of(o.prediction, target) * (1 + AS_FAST) >= most]

    def division(option: MeshOption) -> tuple[int, int]:
        return option.prediction.mesh.copy_size, option.prediction.mesh.shard

    return min(as_fast, key=division)


def _none_fits(options: Sequence[MeshOption]) -> str:
    if not options:
        return "none of these meshes is possible."
    least = min(options, key=lambda option: option.memory.total)
    return (
        f"none of these meshes fits: {least.prediction.mesh} needs least,"
        f" {least.memory.total_gib:,.3g} GiB a worker. What would help: more workers, a smaller"
        " micro-batch, or activation checkpointing, which isn't in these numbers."
    )


def _one_worker(prediction: Prediction, target: Target | None) -> str:
    reason = largest_bottleneck(prediction, target).reason
    return (
        f"stay on one worker, on which the model fits: {prediction.mesh} comes to"
        f" {times_text(gain_of(prediction, target))} its speed, as {reason}."
    )


def _do(choice: MeshOption, fitting: Sequence[MeshOption], target: Target | None) -> str:
    p, bottleneck = choice.prediction, largest_bottleneck(choice.prediction, target)
    sentences = [
        f"{p.mesh}: {times_text(gain_of(p, target))} one worker, {p.efficiency:.0%} efficient;"
        f" workers wait in {p.waiting_share:.0%} of a step, and need"
        f" {choice.memory.total_gib:,.3g} GiB each."
    ]
    if p.training_s is not None and target is None:
        sentences.append(f"The whole training takes {seconds_text(p.training_s)}.")
    if bottleneck.factor > 1 + AS_FAST:
        sentences.append(f"What costs most: {bottleneck.reason}.")
    others = [option for option in fitting if option is not choice]
    if others:
        ratio = gain_of(p, target) / gain_of(others[0].prediction, target)
        sentences.append(f"{others[0].prediction.mesh} takes {times_text(ratio)} as long.")
    return " ".join(sentences)
