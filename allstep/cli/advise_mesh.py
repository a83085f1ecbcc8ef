"""`allstep advise --mesh`: a step on data x pipeline x tensor, and the fastest of all meshes."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rich.markup import escape
from rich.table import Table

from allstep.cli.advise_flags import read_machines, refuse_given
from allstep.cli.advise_output import assumptions
from allstep.cli.advise_subject import Subject
from allstep.cli.quantities import parse_counts, parse_named_counts
from allstep.cli.rows import make_console, make_table
from allstep.errors import UsageError
from allstep.plan import (
    POLICIES,
    Cluster,
    MeshAdvice,
    MeshOption,
    MeshSpec,
    Target,
    TrainingSpec,
    TransformerSpec,
    plain_data,
    recommend_mesh,
    seconds_text,
    timeline,
    times_text,
)

_AXES = ("data", "pipeline", "tensor", "shard")
_FLAGS = ("transformer", "states_per_param", "memory_gib", "stages_per_worker")
_WITHOUT_MESH = ("measure", "stragglers", "curve", "plot", "price_per_hour")
# allstep's own exchange, which alone sums gradients along one axis of a mesh, in its usual format.
_POLICY = next(policy for policy in POLICIES if policy.name == "fp32")


def check_mesh_flags(known: Namespace) -> None:
    """Raises UsageError for flags that need a mesh without one, or that exclude one."""
    if known.mesh is None:
        refuse_given(
            known,
            _FLAGS,
            "counts where a model is divided; give `--mesh` auto or data=N,pipeline=N,tensor=N,"
            " too, or leave `{flag}` out.",
        )
    else:
        why = f"isn't known of a `mesh` (={known.mesh}): leave `{{flag}}` or `--mesh` out."
        refuse_given(known, _WITHOUT_MESH, why)


def read_meshes(
    known: Namespace, subject: Subject
) -> tuple[Cluster, Sequence[MeshSpec], dict[MeshSpec, str]]:
    """The machines and meshes of the flags; raises UsageError before anything is measured.

    Returns:
        The machines; meshes of as many workers, the least divided first; those of `--mesh auto`
        over which the model can't be divided, and why.
    """
    stages_per_worker = known.stages_per_worker or 1
    if known.mesh != "auto":
        lengths = parse_named_counts("mesh", known.mesh, _AXES)
        mesh = MeshSpec(**lengths, stages_per_worker=stages_per_worker)
        _check_workers(known, mesh)
        if stages_per_worker > 1 and mesh.pipeline == 1:
            raise UsageError(
                f"`stages_per_worker` (={stages_per_worker}) counts in a pipeline, which `mesh`"
                f" (={known.mesh}) has none of: give `pipeline=N`, too."
            )
        subject.check_mesh(mesh)
        cluster, _ = read_machines(known, [mesh.num_workers])
        mesh.data_axis(cluster)
        return cluster, [mesh], {}
    if known.workers is None and known.cluster is None:
        raise UsageError(
            "`workers` is missing: of how many `--mesh auto` ranks the meshes, such as"
            " `--workers 8`."
        )
    cluster, counts = read_machines(known)
    num_workers = cluster.num_workers if known.workers is None else counts[0]
    if known.workers is not None and len(counts) > 1:
        raise UsageError(
            f"`workers` (={known.workers}) are several numbers, and `mesh` (=auto) ranks the meshes"
            " of one; give one of them."
        )
    meshes, refused = MeshSpec.all_of(num_workers, subject.longest_pipeline, stages_per_worker), {}
    subject.check_mesh(meshes[0])
    for mesh in (m for m in meshes[1:] if m.shard == 1):
        try:
            subject.check_mesh(mesh)
        except UsageError as error:
            refused[mesh] = str(error)
    meshes = [mesh for mesh in meshes if replace(mesh, shard=1) not in refused]
    return cluster, meshes, refused


def _check_workers(known: Namespace, mesh: MeshSpec) -> None:
    asked = None if known.workers is None else parse_counts("workers", known.workers)
    if asked not in (None, [mesh.num_workers]):
        raise UsageError(
            f"`mesh` (={known.mesh}) has {mesh.num_workers} workers,"
            f" and `workers` (={known.workers}) says otherwise: correct one, or leave `--workers`"
            " out."
        )


@dataclass(frozen=True, kw_only=True)
class MeshAnswer:
    """The question, the predictions and the recommendation.

    Attributes:
        cluster, meshes, refused: as from `read_meshes`.
        stages_per_worker, job, transformer, states_per_param, memory_gib, target: what it is about.
        lent_speed: where the cluster's file says how fast the model is, in words; else "".
    """

    cluster: Cluster
    meshes: Sequence[MeshSpec]
    refused: dict[MeshSpec, str]
    stages_per_worker: int
    job: TrainingSpec
    transformer: TransformerSpec
    states_per_param: float
    memory_gib: float | None
    target: Target | None
    lent_speed: str

    @cached_property
    def advice(self) -> MeshAdvice:
        """The predictions and the recommendation."""
        found = recommend_mesh(
            self.job,
            self.transformer,
            self.cluster,
            _POLICY,
            self.meshes,
            states_per_param=self.states_per_param,
            memory_gib=self.memory_gib,
            target=self.target,
        )
        return replace(found, left_out={**self.refused, **found.left_out})


def show_mesh(found: MeshAnswer, *, with_timeline: bool) -> None:
    """Prints a row for each mesh, the excluded meshes, and the recommendation."""
    advice = found.advice  # whose errors come before any output
    console = make_console()
    words = assumptions(found.cluster, found.job, found.lent_speed, "copy")
    console.print(words, style="dim", markup=False)
    console.print(_table(found))
    for mesh, reason in advice.left_out.items():
        console.print(f"left out: {mesh}: {reason}", markup=False)
    choice = advice.choice
    if with_timeline and choice is not None:
        *lanes, key = timeline(choice.prediction.report.timeline, console.width)
        console.print("\n".join(["", *lanes]), markup=False, soft_wrap=True)
        console.print(key, style="dim")
    console.print(f"\n[bold]advice:[/] {escape(advice.sentence)}")
    if choice is not None:
        mesh = choice.prediction.mesh
        axes = replace(mesh, shard=1)
        code = f"comm.mesh({str(axes).replace(',', ', ')}) and {_POLICY.in_code}"
        if mesh.pipeline > 1:
            schedule = "1f1b" if mesh.stages_per_worker == 1 else "interleaved"
            code = f'allstep.nn.Pipeline(..., schedule="{schedule}"), {code}'
        if mesh.shard > 1:
            what = " of each stage" if mesh.pipeline > 1 else ""
            code = f"torch's fully_shard{what} over {mesh.shard} workers along `data`, {code}"
        console.print(f"[bold]in code:[/] {escape(code)}", soft_wrap=True)


def _table(found: MeshAnswer) -> Table:
    """The table of meshes, the fastest first; a star marks the recommendation."""
    titles = ("mesh", "step", "waits", "GiB a worker", "samples/s", "tokens/s", "speed-up")
    table = make_table(*titles, left=["mesh"], gap=1)
    for option in found.advice.options:
        p = option.prediction
        is_choice = option is found.advice.choice
        table.add_row(
            f"{p.mesh}{'*' * is_choice}",
            seconds_text(p.report.step_s),
            f"{p.waiting_share:.0%}",
            f"{option.memory.total_gib:,.3g}",
            f"{p.samples_per_s:,.3g}",
            f"{p.samples_per_s * found.transformer.sequence_length:,.3g}",
            times_text(p.speed_up),
            style="bold" if is_choice else None,
        )
    return table


def plain_mesh(found: MeshAnswer) -> dict[str, Any]:
    """All numbers as plain data; None for unknown values and those that were not requested."""
    micro, advice = found.job.micro, found.advice
    return {
        "params": micro.num_params,
        "micro_batch": micro.num_samples,
        "compute_s": micro.compute_s,
        "global_batch": found.job.global_batch,
        "total_samples": found.job.total_samples,
        "noise_scale": None if found.target is None else found.target.critical_batch,
        "transformer": asdict(found.transformer),
        "stages_per_worker": found.stages_per_worker,
        "states_per_param": found.states_per_param,
        "cluster": asdict(found.cluster),
        "predictions": [_plain_option(option) for option in advice.options],
        "left_out": {str(mesh): reason for mesh, reason in advice.left_out.items()},
        "recommended": None if advice.choice is None else _plain_option(advice.choice),
        "advice": advice.sentence,
    }


def _plain_option(option: MeshOption) -> dict[str, Any]:
    p = option.prediction
    return {
        **plain_data(p),
        **{axis: getattr(p.mesh, axis) for axis in _AXES},
        "activations_s": p.copy.activations_s,
        "bubble_s": p.copy.bubble_s,
        "sharding_s": p.copy.sharding_s,
        "waiting_share": p.waiting_share,
        "memory_bytes": {**asdict(option.memory), "total": option.memory.total},
    }
