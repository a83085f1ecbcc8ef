import numpy as np
import pytest

from allstep.errors import UsageError
from allstep.plan.algorithms import ALGORITHMS, path_of
from allstep.plan.fit import Timing, fit_link
from allstep.plan.nodes import Link, Nodes

LINK = Link(bandwidth_bps=9.4e9, latency_s=40e-6)
SIZES = [1 << exponent for exponent in range(10, 27, 2)]


def timings(algorithm, noise=0.0, workers=(2, 4, 8)):
    rng = np.random.default_rng(0)
    found = []
    for num_workers in workers:
        hosts = Nodes(num_nodes=num_workers, workers_per_node=1, intra=LINK, inter=LINK)
        for size in SIZES:
            path = path_of(ALGORITHMS[algorithm], hosts, size)
            seconds = sum(transfer.seconds for transfer in path)
            found.append(Timing(num_workers, size, seconds * (1 + noise * rng.standard_normal())))
    return found


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_fit_link_recovers_the_link_from_exact_timings(algorithm):
    fit = fit_link(timings(algorithm), algorithm)
    assert fit.link.bandwidth_bps == pytest.approx(LINK.bandwidth_bps)
    assert fit.link.latency_s == pytest.approx(LINK.latency_s)
    assert max(map(abs, fit.errors)) < 1e-9


def test_fit_link_averages_noise_out():
    fit = fit_link(timings("ring", noise=0.05))
    assert fit.link.bandwidth_bps == pytest.approx(LINK.bandwidth_bps, rel=0.05)
    assert fit.link.latency_s == pytest.approx(LINK.latency_s, rel=0.05)


def test_fit_of_absolute_errors_finds_a_worse_latency():
    """What weighting by 1 / seconds is for."""
    noisy = timings("ring", noise=0.05)
    rows = np.array(
        [
            [2 * (t.num_workers - 1), 2 * (t.num_workers - 1) / t.num_workers * t.num_bytes]
            for t in noisy
        ]
    )
    latency_s, _ = np.linalg.lstsq(rows, np.array([t.seconds for t in noisy]), rcond=None)[0]
    assert abs(latency_s / LINK.latency_s - 1) > 0.1


def test_fit_link_has_no_negative_latency():
    fit = fit_link([Timing(2, 1000, 1e-6), Timing(2, 100_000, 2e-4)])
    assert fit.link.latency_s == 0


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [Timing(2, 1000, 1e-3)],
        [Timing(2, 1000, 1e-3), Timing(4, 1000, 2e-3)],
        [Timing(2, 1000, 0.0), Timing(2, 2000, 1e-3)],
    ],
)
def test_fit_link_refuses_too_few_sizes(bad):
    with pytest.raises(UsageError, match="must hold at least two sizes"):
        fit_link(bad)


def test_fit_link_refuses_times_that_do_not_grow():
    with pytest.raises(UsageError, match="don't grow with size"):
        fit_link([Timing(2, 1000, 1e-3), Timing(2, 100_000, 1e-4)])


def test_fit_link_refuses_an_unknown_algorithm():
    with pytest.raises(UsageError, match=r"`algorithm` \(='rings'\): did you mean `ring`\?"):
        fit_link(timings("ring"), "rings")
