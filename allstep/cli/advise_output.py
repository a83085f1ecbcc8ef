"""Prints advice as tables and charts of characters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from rich.markup import escape
from rich.table import Table

from allstep.cli.rows import make_console, make_table
from allstep.plan import (
    AccuracyTable,
    Cluster,
    Growth,
    Prediction,
    Price,
    Recommendation,
    Target,
    TrainingSpec,
    chart,
    recommend,
    seconds_text,
    timeline,
    times_text,
    work_s,
)

_POLICY_WIDTH, _CELL_WIDTH, _ACCURACY_WIDTH = 18, 8, 14


@dataclass(frozen=True)
class Bill:
    """The cost of a whole training.

    Attributes:
        num_machines: that are paid.
        hours: that it takes, with interruptions.
        total: of all machines, in the currency of the price.
    """

    num_machines: int
    hours: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The question, the predictions and the recommendation.

    Attributes:
        job, cluster, target, accuracy: what was asked about, and what is known of accuracy.
        predictions: of each policy on each number of workers.
        max_points_lost: points of accuracy that a lossy policy may cost.
        measured_s: seconds of a step by policy and number of workers, where it was run.
        assumption: what else the predictions rest on, in words.
        growth: what a learning curve says, if one was given.
        price: of the machines, if it was given; the training's length is known then.
    """

    job: TrainingSpec
    cluster: Cluster
    target: Target | None
    accuracy: AccuracyTable
    predictions: Sequence[Prediction]
    max_points_lost: float
    measured_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    assumption: str = ""
    growth: Growth | None = None
    price: Price | None = None

    @cached_property
    def recommendation(self) -> Recommendation:
        """The recommendation in words."""
        most = self.max_points_lost
        return recommend(self.predictions, self.accuracy, max_points_lost=most, target=self.target)

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers, which are the columns."""
        return sorted({p.num_workers for p in self.predictions})

    @property
    def policies(self) -> dict[str, dict[int, Prediction]]:
        """Policy -> its predictions by number of workers, which are the rows."""
        rows: dict[str, dict[int, Prediction]] = {}
        for p in self.predictions:
            rows.setdefault(p.policy.name, {})[p.num_workers] = p
        return rows

    @property
    def one_worker(self) -> Prediction | None:
        """The prediction of one worker, if requested; of any policy, as nothing is exchanged."""
        return next((p for p in self.predictions if p.num_workers == 1), None)

    def label(self, prediction: Prediction) -> str:
        """The policy's name, if there is an exchange."""
        return prediction.policy.name if prediction.num_workers > 1 else "one worker"

    @property
    def worth_showing(self) -> list[Prediction]:
        """The prediction of one worker, and for each other number those that may be recommended."""
        lone = self.one_worker
        return [*([] if lone is None else [lone]), *self.recommendation.best]

    def bill(self, prediction: Prediction) -> Bill | None:
        """The cost of the training by a prediction; None if it is not known."""
        undisturbed_s = work_s(prediction, self.target)
        if self.price is None or undisturbed_s is None:
            return None
        num_machines = -(-prediction.num_workers // self.cluster.workers_per_node)
        return Bill(
            num_machines,
            self.price.seconds(undisturbed_s, num_machines) / 3600,
            self.price.total(undisturbed_s, num_machines),
        )


def show(advice: Advice, *, with_timeline: bool) -> None:
    """Prints everything, as wide as the terminal allows."""
    console = make_console()
    words = assumptions(advice.cluster, advice.job, advice.assumption)
    console.print(words, style="dim", markup=False)
    counts = advice.worker_counts
    wanted = _POLICY_WIDTH + _CELL_WIDTH * len(counts) + _ACCURACY_WIDTH
    if wanted <= console.width:
        console.print(_wide(advice))
    else:
        console.print(_long(advice), _costs(advice))
    if advice.measured_s:
        console.print(_beside(advice))
    if advice.target is not None:
        console.print(_to_target(advice, advice.target))
    if advice.price is not None:
        console.print(_bills(advice))
    lines = chart(advice.predictions)
    if max(map(len, lines)) <= console.width:
        console.print("\n".join(lines), markup=False, soft_wrap=True)
    choice = advice.recommendation.choice
    if with_timeline and choice is not None:
        *lanes, key = timeline(choice.report.timeline, console.width)
        console.print("\n".join(["", *lanes]), markup=False, soft_wrap=True)
        console.print(key, style="dim")
    found = advice.recommendation
    for name, sentence, prediction in (
        ("advice", found.sentence, found.choice),
        ("lossy", found.lossy_sentence, found.lossy),
    ):
        if sentence:
            console.print(f"\n[bold]{name}:[/] {escape(sentence)}")
        if prediction is not None:
            console.print(f"[bold]in code:[/] {prediction.policy.in_code}", soft_wrap=True)
    if advice.growth is not None:
        console.print(f"\n[bold]curve:[/] {escape(advice.growth.sentence)}")


def assumptions(
    cluster: Cluster, job: TrainingSpec, lent_speed: str, sharer: str = "worker"
) -> str:
    """The predictions' assumptions: machines, a micro-batch's time, the batch of a `sharer`."""
    micro, batch = job.micro, job.global_batch
    link = cluster.inter or cluster.intra
    slowdowns = (timed.compute_slowdown for timed in cluster.collectives)
    slowdown = max(slowdowns, default=cluster.compute_slowdown)
    return (
        f"{cluster.name}: {link.bandwidth_bps / 1e9:.3g} Gbit/s and {link.latency_s * 1e6:.0f} us,"
        f" {cluster.workers_per_node} worker{'s' * (cluster.workers_per_node > 1)} a machine,"
        f" compute {slowdown:.0%} slower beside communication."
        f" {micro.num_params:,} parameters; {micro.num_samples} samples take"
        f" {seconds_text(micro.forward_s)} forward, {seconds_text(micro.backward_s)} backward."
        f" Batch: {f'{batch:,}' if batch else f'{micro.num_samples} a {sharer}'}. {lent_speed}"
    ).rstrip()


_make_table = partial(make_table, left=["policy"], gap=1)


def _wide(advice: Advice) -> Table:
    counts = [f"{count:,}" for count in advice.worker_counts]
    table = make_table("workers", *counts, "accuracy cost", left=["workers"], gap=1)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for name, row in advice.policies.items():
        cells = [_cell(p, advice) for p in row.values()]
        policy = next(iter(row.values())).policy
        table.add_row(name, *cells, advice.accuracy.describe(policy))
    return table


def _cell(prediction: Prediction, advice: Advice) -> str:
    star = "*" if prediction is advice.recommendation.choice else ""
    text = f"{seconds_text(prediction.report.step_s)}\n{star}{prediction.efficiency:.0%}"
    return f"[bold]{text}[/]" if star else text


def _long(advice: Advice) -> Table:
    """The table with a line for each cell, for narrow terminals and many numbers of workers."""
    table = _make_table("workers", "step", "eff.", "policy")
    for count in advice.worker_counts:
        for name, row in advice.policies.items():
            p = row[count]
            style = "bold" if p is advice.recommendation.choice else None
            step = seconds_text(p.report.step_s)
            table.add_row(f"{count:,}", step, f"{p.efficiency:.0%}", name, style=style)
    return table


def _costs(advice: Advice) -> Table:
    """Each policy's cost in accuracy, where the cells have no room for it."""
    table = _make_table("accuracy cost", "policy")
    for name, row in advice.policies.items():
        policy = next(iter(row.values())).policy
        table.add_row(advice.accuracy.describe(policy), name)
    return table


def _beside(advice: Advice) -> Table:
    """A table of measured and predicted speeds, in samples per second relative to one worker."""
    table = _make_table("workers", "predicted", "measured", "error", "speed", "policy")
    one_worker = advice.one_worker
    for p in (p for p in advice.predictions if p.num_workers > 1 or p is one_worker):
        step_s, measured_s = p.report.step_s, advice.measured_s[p.policy.name, p.num_workers]
        speed = p.global_batch / measured_s / p.single_worker_samples_per_s
        table.add_row(
            f"{p.num_workers:,}",
            seconds_text(step_s),
            seconds_text(measured_s),
            f"{step_s / measured_s - 1:+.0%}",
            times_text(speed),
            advice.label(p),
        )
    return table


def _to_target(advice: Advice, target: Target) -> Table:
    """The cost of larger batches, and the speed-up that remains with them."""
    table = _make_table("workers", "batch", "samples to target", "speed-up to target", "policy")
    for p in advice.worth_showing:
        table.add_row(
            f"{p.num_workers:,}",
            f"{p.global_batch:,}",
            times_text(target.samples(p.global_batch) / target.samples(p.single_worker_batch)),
            times_text(target.speed_up(p), 1),
            advice.label(p),
        )
    return table


def _bills(advice: Advice) -> Table:
    """A table of hours and cost of the whole training; a star marks the cheapest."""
    table = _make_table("workers", "machines", "hours", "cost", "policy")
    bills = [(p, bill) for p in advice.worth_showing if (bill := advice.bill(p)) is not None]
    cheapest = min((bill.total for _, bill in bills), default=0.0)
    for p, bill in bills:
        star = "*" if bill.total == cheapest else ""
        table.add_row(
            f"{p.num_workers:,}",
            f"{bill.num_machines:,}",
            f"{bill.hours:,.2f}",
            f"{star}{bill.total:,.2f}",
            advice.label(p),
        )
    return table
