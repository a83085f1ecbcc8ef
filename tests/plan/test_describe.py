from dataclasses import replace

import pytest

from allstep.plan.cluster import Cluster
from allstep.plan.describe import chart, plain_data, seconds_text, timeline
from allstep.plan.nodes import Link
from allstep.plan.policies import DDP, POLICIES, PolicySpec
from allstep.plan.predict import predict
from allstep.plan.simulate import simulate
from allstep.plan.workload import TrainingSpec, Workload

LINK = Link(bandwidth_bps=1e9, latency_s=3e-5)
CLUSTER = Cluster(name="", num_nodes=32, workers_per_node=1, intra=LINK, inter=LINK)
MICRO = Workload.from_step(num_params=5_000_000, step_s=0.11, num_samples=32)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9994, "999 ms"),
        (0.9997, "1 s"),
        (599.4, "599 s"),
        (599.6, "600 s"),
        (600.0, "10 min"),
        (3594.0, "59.9 min"),
        (3598.0, "60 min"),
        (3599.0, "1 h"),
        (99_960.0, "27.8 h"),
        (0.0, "0 ms"),
    ],
)
def test_seconds_text_chooses_the_unit_after_rounding(seconds, text):
    assert seconds_text(seconds) == text


def test_chart_has_a_letter_of_every_policy_in_every_column():
    lines = chart(predict(TrainingSpec(micro=MICRO), CLUSTER, POLICIES, [1, 2, 32]))
    plot = [line.split("|")[1].ljust(21) for line in lines if "|" in line]
    for column in range(3):
        letters = "".join(row[7 * column : 7 * column + 7] for row in plot)
        assert sorted(letters.replace(" ", "")) == list("abcdef")
    assert lines[1].startswith(" 100 % | abcdef")
    assert lines[-1].split(None, 1) == ["f", "local SGD, H = 16"]


def test_timeline_is_as_wide_as_asked():
    policy = PolicySpec(name="p", algorithm="ring", bucket_bytes=1 << 20)
    for width in (20, 50, 120):
        compute, wire, key = timeline(simulate(MICRO, CLUSTER, policy).timeline, width)
        assert len(wire) <= width
        assert len(compute) <= width
        assert "buckets" in key
    assert set(compute[9:]) >= {"f", "b", "."}
    assert set(wire[9:]) & set("0123456789")


def test_timeline_of_local_sgd_has_local_steps():
    policy = PolicySpec(name="p", algorithm="ring", bucket_bytes=None, sync_every=4)
    compute, wire, _ = timeline(simulate(MICRO, CLUSTER, policy).timeline, 60)
    assert "l" in compute
    assert wire.endswith("0")


def test_plain_data_has_every_number():
    (found,) = predict(TrainingSpec(micro=MICRO), CLUSTER, [replace(DDP, name="x")], [8])
    data = plain_data(found)
    assert data["policy"] == "x"
    assert data["workers"] == 8
    assert data["speed_up"] == found.speed_up
    assert data["num_messages"] > 0
