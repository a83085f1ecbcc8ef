"""How long the planner takes: 16,384 workers that all differ, and a whole table of advice."""

import time
from collections.abc import Callable

from common import estimate, print_headline, write_results

from allstep.plan import (
    POLICIES,
    Cluster,
    Link,
    PolicySpec,
    Stragglers,
    TrainingSpec,
    Workload,
    predict,
    simulate,
)

REPEATS = 7
LINK = Link(bandwidth_bps=10e9, latency_s=30e-6)
CLUSTER = Cluster(
    name="hosts",
    num_nodes=16384,
    workers_per_node=1,
    intra=LINK,
    inter=LINK,
    compute_slowdown=0.1,
    communication_slowdown=0.1,
)
MICRO = Workload.from_step(num_params=25_000_000, step_s=0.11, num_samples=32)
STRAGGLERS = Stragglers(spread=0.05, slow_probability=0.001, slow_factor=2.0)
COUNTS = [1 << exponent for exponent in range(15)]


def simulate_all_workers() -> None:
    """22 steps of 100 buckets on 16,384 workers, each with its own clock."""
    policy = PolicySpec(name="", algorithm="ring", staleness=1, bucket_bytes=1_000_000)
    simulate(MICRO, CLUSTER, policy, STRAGGLERS)


def predict_a_table() -> None:
    """Six policies on 1 to 16,384 workers, with algorithm and bucket size chosen for each."""
    predict(TrainingSpec(micro=MICRO), CLUSTER, POLICIES, COUNTS, STRAGGLERS)


def seconds(run: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - start_s)
    return found


def main() -> None:
    one = estimate(seconds(simulate_all_workers))
    table = estimate(seconds(predict_a_table))
    print(f"16,384 workers, 22 steps of 100 buckets: {one} s")
    print(f"6 policies x {len(COUNTS)} numbers of workers: {table} s")
    headline = {"simulate_16384_s": one.median, "table_s": table.median}
    write_results("bench_plan", headline)
    print_headline(**headline)


if __name__ == "__main__":
    main()
