"""Simulates training steps: when workers compute and wait, and when the network is busy.

[Note: simulated step] Every worker has its own clock; all clocks are one array, so that 16,384
workers take hardly longer than one. The clocks count progress, see [Note: progress]. A bucket's
collective starts when the last worker has the bucket ready and the network is free, in the order in
which buckets fill, and ends for all workers at the same time. Compute is slower while the network
is busy, and communication while workers still have compute that doesn't wait for it. Copying
gradients into buckets counts as compute; so does copying means back to separate gradients. After a
pause a link with a token bucket may exceed its bandwidth. With staleness k a worker begins step
t + 1 when it is done with step t and the collectives of step t - k have ended. Local SGD exchanges
parameters after the last of `sync_every` updates, while no worker computes.

The first rounds fill the pipeline; the report is the mean over the later ones. If workers differ,
the simulated rounds drew a little more or less compute than the long-run mean; the report subtracts
the difference.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from allstep.errors import UsageError
from allstep.plan.activity import Activity
from allstep.plan.cluster import Cluster
from allstep.plan.compression import FLOAT32_BYTES
from allstep.plan.cost import BucketCost, bucket_cost, bucket_traffic
from allstep.plan.nodes import Nodes
from allstep.plan.phases import Traffic
from allstep.plan.policies import PolicySpec
from allstep.plan.stragglers import NO_STRAGGLERS, Stragglers
from allstep.plan.workload import Workload

# The number of rounds that are averaged; one is enough if workers are equal.
_NUM_RANDOM_ROUNDS = 20
# Above these limits a simulation would take minutes, or more memory than there is.
_MOST_BUCKETS = 1 << 14
_MOST_CLOCKS = 1 << 20


@dataclass(frozen=True)
class Span:
    """An interval of a simulated step.

    Attributes:
        lane: "compute", "wait" or "wire", which is the network.
        name: what took place, such as "forward" or "bucket 0".
        start_s, end_s: start and end on the slowest worker, from the beginning of the round.
    """

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The average step in the long run; for local SGD the mean over `sync_every` steps.

    Attributes:
        step_s: seconds from step to step.
        compute_s: seconds of one worker's compute if it waited for nothing.
        exposed_s: seconds for which even the slowest worker waits for the network.
        straggler_s: seconds for which a worker waits for slower ones, averaged over workers.
        wire_s: seconds in which the network is busy.
        traffic: traffic of rank 0 in one exchange.
        timeline: spans of the last exchange and the compute before it.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    straggler_s: float
    wire_s: float
    traffic: Traffic
    timeline: tuple[Span, ...] = field(repr=False)

    @property
    def efficiency(self) -> float:
        """The time of a single worker's step divided by this step's time."""
        return self.compute_s / self.step_s

    @property
    def exchange_share(self) -> float:
        """Share of the step that the exchange adds: waits, copies, and slower compute meanwhile."""
        return max(0.0, 1 - (self.compute_s + self.straggler_s) / self.step_s)


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: PolicySpec,
    stragglers: Stragglers = NO_STRAGGLERS,
) -> StepReport:
    """Simulates training on all workers of a cluster. See [Note: simulated step].

    Args:
        workload: each worker's step.
        cluster: the cluster, of which all workers are used; `cluster.of(num_workers)` is a part.
        policy: a policy with a fixed algorithm and bucket size.
        stragglers: how much the workers' speeds differ.

    Returns:
        Seconds and bytes of the average step in the long run.

    Raises:
        UsageError: if an argument of the policy is "auto"; if there are more buckets than can be
            simulated, or, with stragglers, more workers.
    """
    if not policy.is_settled:
        raise UsageError(
            f'`policy` ({policy.name}) leaves "auto" open: settle it with `policy.with_choice`,'
            " or use `predict`, which tries all."
        )
    if stragglers.is_active and cluster.num_workers > _MOST_CLOCKS:
        raise UsageError(
            f"`stragglers` can be simulated for at most {_MOST_CLOCKS:,} `workers`"
            f" (={cluster.num_workers:,}), as each has a clock of its own: leave one of them out."
        )
    return _Simulation(workload, cluster, policy, stragglers).run()


def exchange_traffic(
    workload: Workload, policy: PolicySpec, nodes: Nodes, rank: int = 0
) -> Traffic:
    """The exact traffic of the worker of a rank in one exchange."""
    element_bytes = _element_bytes(workload, policy)
    sizes = _bucket_sizes(workload, policy)
    sent_for = {
        size: bucket_traffic(policy.compression, policy.algorithm, nodes, rank, size, element_bytes)
        for size in {*sizes}
    }
    return sum((sent_for[size] for size in sizes), start=Traffic())


def _element_bytes(workload: Workload, policy: PolicySpec) -> int:
    """Bytes of an exchanged element: gradients keep their dtype, parameters have 4 or more."""
    least_bytes = FLOAT32_BYTES if policy.sync_every > 1 else 1
    return max(least_bytes, workload.element_bytes)


def _bucket_sizes(workload: Workload, policy: PolicySpec) -> list[int]:
    assert not isinstance(policy.bucket_bytes, str)
    num_buckets = workload.gradient_bytes // (policy.bucket_bytes or workload.gradient_bytes)
    if num_buckets > _MOST_BUCKETS and not workload.gradients:
        raise UsageError(
            f"`params` (={workload.num_params:,}) are {num_buckets:,} buckets with {policy.name},"
            f" whose `bucket_bytes` is {policy.bucket_bytes:,}; at most {_MOST_BUCKETS:,} can be"
            " simulated. Are these the parameters of one worker's model?"
        )
    return workload.bucket_sizes(policy.bucket_bytes, policy.first_bucket_bytes)


class _Simulation:
    """The state of a simulation between steps: the workers' clocks and the network."""

    def __init__(
        self, workload: Workload, cluster: Cluster, policy: PolicySpec, stragglers: Stragglers
    ) -> None:
        if cluster.num_workers == 1:  # it waits for nobody, and needs no buckets
            stragglers = NO_STRAGGLERS  # in the long run its speed is its mean
            cluster = replace(cluster, bucketing_s_per_byte=0.0, gradient_s=0.0)
        self.workload, self.cluster, self.policy = workload, cluster, policy
        self.stragglers = stragglers
        sizes = _bucket_sizes(workload, policy)
        self.buckets = workload.buckets(sizes)
        compression, algorithm = policy.compression, policy.algorithm
        element_bytes, core_share = _element_bytes(workload, policy), workload.core_share
        cost_of = {
            size: bucket_cost(compression, algorithm, cluster, size, core_share, element_bytes)
            for size in {*sizes}
        }
        self.costs = [cost_of[size] for size in sizes]
        # Seconds of compute to fill each bucket, and to copy means back to separate gradients.
        copy_s = workload.element_bytes * cluster.bucketing_s_per_byte
        each_s = cluster.gradient_s * len(workload.gradients) / workload.num_params
        self.take_s = [(copy_s + each_s) * size for size in sizes]
        self.copy_back_s = [policy.copies_back * copy_s * size for size in sizes]
        self.step_work_s = workload.compute_s + sum(self.take_s) + sum(self.copy_back_s)
        self.wire = Activity()
        # Equal workers always have the same progress: one clock represents all of them.
        self.advance_to(np.zeros(cluster.num_workers if self.stragglers.is_active else 1))
        self.ends_s: list[list[float]] = []  # ends of the collectives, for each step
        self.step = 0
        self.landed_s = 0.0  # when the means of the buckets so far are copied back
        self.forget_totals()

    def advance_to(self, progress: NDArray[np.float64]) -> None:
        """Sets all clocks; the slowest worker's time doesn't depend on later network activity."""
        self.progress, self.most_progress = progress, float(progress.max())
        self.last_s = self.wire.time_at(self.most_progress)

    def forget_totals(self) -> None:
        self.drawn_s = 0.0  # compute, averaged over workers
        self.busy_s = self.exposed_s = self.straggler_s = 0.0
        self.spans: list[Span] = []

    def fill_pipeline(self) -> None:
        """Runs the first rounds; a network slower than compute starts with its final backlog.

        Otherwise the backlog would grow a little in each step, until gradients are as stale as the
        policy allows: after thousands of steps if compute and network take nearly the same time.
        """
        staleness = self.policy.staleness
        wire_s = sum(cost.seconds * (1 + cost.communication_slowdown) for cost in self.costs)
        slowdown = max(cost.compute_slowdown for cost in self.costs)
        compute_s = self.step_work_s + self.workload.compute_s * slowdown
        if staleness and wire_s > compute_s:
            self.wire.occupy(0.0, (staleness + 1) * compute_s, slowdown)
        for _ in range(2 * staleness + 1):
            self.round()

    def run(self) -> StepReport:
        self.fill_pipeline()
        num_rounds = _NUM_RANDOM_ROUNDS if self.stragglers.is_active else 1
        self.forget_totals()
        start_s = self.last_s
        for _ in range(num_rounds):
            self.spans, round_s = [], self.last_s
            self.round()
        num_steps = num_rounds * self.policy.sync_every
        compute_s = self.workload.compute_s * self.stragglers.mean_factor
        surplus_s = self.drawn_s / num_steps - compute_s if self.stragglers.is_active else 0.0
        return StepReport(
            step_s=max(compute_s, (self.last_s - start_s) / num_steps - surplus_s),
            compute_s=compute_s,
            exposed_s=self.exposed_s / num_steps,
            straggler_s=self.straggler_s / num_steps,
            wire_s=self.busy_s / num_steps,
            traffic=exchange_traffic(self.workload, self.policy, self.cluster),
            timeline=tuple(
                Span(span.lane, span.name, span.start_s - round_s, span.end_s - round_s)
                for span in self.spans
            ),
        )

    def round(self) -> None:
        """Runs the steps from one exchange to the next."""
        if self.policy.sync_every == 1:
            self.synchronous_step()
        else:
            for _ in range(self.policy.sync_every):
                self.compute("local step", self.workload.compute_s * self.draw())
            self.average_parameters()
        self.wire.forget_before(float(self.progress.min()))

    def synchronous_step(self) -> None:
        factor = self.draw()
        work_left_s, ends_s = self.workload.backward_s + sum(self.take_s), []
        self.compute("forward", self.workload.forward_s * factor)
        for index, bucket in enumerate(self.buckets):
            self.compute(f"backward {index}", bucket.backward_s * factor + self.take_s[index])
            work_left_s -= bucket.backward_s + self.take_s[index]
            ends_s.append(self.communicate(index, work_left_s))
        self.ends_s.append(ends_s)
        if len(self.ends_s) > self.policy.staleness:
            self.land(self.ends_s.pop(0))
        self.compute("optimizer", self.workload.optimizer_s * factor)

    def land(self, ends_s: list[float]) -> None:
        """Waits for the buckets of a step, and copies each back if the policy does so."""
        if not any(self.copy_back_s):
            self.wait_until(ends_s[-1])
            return
        for end_s, seconds in zip(ends_s, self.copy_back_s, strict=True):
            self.wait_until(end_s)
            self.compute("landing", seconds)

    def average_parameters(self) -> None:
        """Exchanges all parameters: copies them together, sums, divides, and copies them back.

        Exchanges in shared memory are measured without copies, since gradients are allocated there;
        parameters have to be copied there and back.
        """
        num_bytes = _element_bytes(self.workload, self.policy) * self.workload.num_params
        copy_s = self.cluster.bucketing_s_per_byte * num_bytes
        compression, algorithm = self.policy.compression, self.policy.algorithm
        is_shared = algorithm == "shared_memory" and self.cluster.num_nodes == 1
        is_measured = self.cluster.measured(compression, algorithm) is not None
        num_copies = 2 if is_shared and is_measured else 1
        self.compute("landing", num_copies * copy_s)
        for index in range(len(self.buckets)):
            self.communicate(index, 0.0)
        self.wait_until(self.wire.free_s)
        self.compute("landing", (1 + num_copies) * copy_s)

    def draw(self) -> NDArray[np.float64]:
        """Each worker's factor on the time of compute in this step."""
        self.step += 1
        factors = self.stragglers.draw(self.step, len(self.progress))
        self.drawn_s += self.workload.compute_s * float(factors.mean())
        return factors

    def compute(self, name: str, work_s: NDArray[np.float64] | float) -> None:
        start_s = self.last_s
        self.advance_to(self.progress + work_s)
        self.spans.append(Span("compute", name, start_s, self.last_s))

    def communicate(self, index: int, work_left_s: float) -> float:
        """Sends a bucket while the slowest worker still has `work_left_s` of backward to do.

        Returns:
            The time at which the bucket's collective ends.
        """
        start_s = max(self.last_s, self.wire.free_s)
        free_work_s = self.limit(work_left_s) - self.wire.progress_at(start_s)
        free_work_s = max(0.0, free_work_s, self.landed_s - start_s)
        cost = self.costs[index]
        ahead_s = min(self.cluster.burst_s, start_s - self.wire.free_s)
        seconds = max(min(cost.seconds, cost.latency_s), cost.seconds - ahead_s)
        end_s = start_s + self.contended_s(seconds, free_work_s, cost)
        self.wire.occupy(start_s, end_s, cost.compute_slowdown)
        self.busy_s += end_s - start_s
        self.spans.append(Span("wire", f"bucket {index}", start_s, end_s))
        if self.copy_back_s[index]:
            backward_end_s = self.wire.time_at(self.most_progress + work_left_s)
            self.landed_s = max(self.landed_s, backward_end_s, end_s) + self.copy_back_s[index]
        return end_s

    def limit(self, work_left_s: float) -> float:
        """The most progress that workers can reach before they need the bucket being sent now."""
        num_free = self.policy.staleness - len(self.ends_s)  # steps that wait for no collective
        limit = self.most_progress + work_left_s + num_free * self.step_work_s
        for ends_s in self.ends_s:
            limit = max(limit, self.wire.progress_at(ends_s[-1])) + self.step_work_s
        return limit

    def contended_s(self, seconds: float, work_s: float, cost: BucketCost) -> float:
        """Seconds of communication that overlaps with `work_s` seconds of compute."""
        slower = 1 + cost.communication_slowdown
        beside_s = min(seconds * slower, work_s * (1 + cost.compute_slowdown))
        return beside_s + (seconds - beside_s / slower)

    def wait_until(self, end_s: float) -> None:
        last_s = self.last_s
        exposed_s = max(0.0, end_s - last_s)
        waiting = np.maximum(self.progress, self.wire.progress_at(end_s))
        waits_s = self.wire.times_at(waiting) - self.wire.times_at(self.progress)
        self.exposed_s += exposed_s
        self.straggler_s += float(waits_s.mean()) - exposed_s
        if exposed_s:
            self.spans.append(Span("wait", "wait", last_s, end_s))
        self.advance_to(waiting)
