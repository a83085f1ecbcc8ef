import math
from dataclasses import replace

import pytest

from allstep.errors import UsageError
from allstep.plan.workload import TrainingSpec, Workload

MICRO = Workload(num_params=1000, forward_s=1.0, backward_s=2.0, optimizer_s=0.5, num_samples=8)


@pytest.mark.parametrize("num_params", [1, 7, 1000, 1001])
@pytest.mark.parametrize("bucket_bytes", [1, 4, 100, 4000, None])
@pytest.mark.parametrize("first_bytes", [None, 40])
def test_workload_buckets_hold_every_element_once(num_params, bucket_bytes, first_bytes):
    workload = Workload.from_step(num_params=num_params, step_s=3.0)
    sizes = workload.bucket_sizes(bucket_bytes, first_bytes)
    assert sum(sizes) == num_params
    assert min(sizes) > 0
    buckets = workload.buckets(sizes)
    assert [bucket.num_elements for bucket in buckets] == sizes
    assert sum(bucket.backward_s for bucket in buckets) == pytest.approx(workload.backward_s)


@pytest.mark.parametrize(("element_bytes", "sizes"), [(2, [1000]), (4, [500, 500]), (8, [250] * 4)])
def test_workload_bucket_sizes_count_bytes_of_the_gradient_dtype(element_bytes, sizes):
    workload = Workload.from_step(num_params=1000, step_s=3.0, element_bytes=element_bytes)
    assert workload.gradient_bytes == 1000 * element_bytes
    assert workload.bucket_sizes(2000) == sizes
    whole = replace(workload, gradients=(250,) * 4)
    assert whole.bucket_sizes(2000) == sizes


def test_workload_with_late_gradients_hides_little():
    late = Workload(num_params=1000, forward_s=1, backward_s=2, ready=((0, 0), (0.1, 0.9), (1, 1)))
    spans = [bucket.backward_s for bucket in late.buckets([100, 900])]
    assert spans == pytest.approx([1.8, 0.2])
    even = [bucket.backward_s for bucket in MICRO.buckets([100, 900])]
    assert even == pytest.approx([0.2, 1.8])


def test_workload_backward_continues_after_the_last_gradient():
    workload = Workload(num_params=10, forward_s=1, backward_s=2, ready=((0, 0), (1, 1)))
    assert sum(b.backward_s for b in workload.buckets([5, 5])) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_params": 0}, r"`num_params` \(=0\) must be at least 1"),
        ({"element_bytes": 3}, r"`element_bytes` \(=3\) must be 2, 4 or 8"),
        ({"num_samples": 1.5}, r"`num_samples` \(=1.5\) must be a whole number"),
        ({"forward_s": -1}, r"`forward_s` \(=-1\) must be 0 or more"),
        ({"backward_s": math.nan}, r"`backward_s` \(=nan\)"),
        ({"forward_s": 0, "backward_s": 0}, "`forward_s \\+ backward_s` \\(=0\\) must be above 0"),
        ({"ready": ((0, 0), (0.5, 0.6))}, r"`ready` .* must be pairs that increase"),
        ({"ready": ((0, 0), (0.5, 0.6), (0.4, 0.7), (1, 1))}, "`ready`"),
        ({"ready": ()}, "`ready`"),
    ],
)
def test_workload_refuses_wrong_numbers(changes, message):
    values = {"num_params": 10, "forward_s": 1.0, "backward_s": 2.0, **changes}
    with pytest.raises(UsageError, match=message):
        Workload(**values)


def test_training_spec_with_a_growing_batch_keeps_each_workers_step():
    job = TrainingSpec(micro=MICRO)
    assert [job.batch(n) for n in (1, 3)] == [8, 24]
    assert job.workload(3) == job.workload(1) == MICRO


@pytest.mark.parametrize(("num_workers", "most"), [(1, 6), (2, 3), (4, 2), (5, 2), (6, 1), (9, 1)])
def test_training_spec_shares_a_fixed_batch_in_whole_micro_batches(num_workers, most):
    job = TrainingSpec(micro=MICRO, global_batch=48)
    workload = job.workload(num_workers)
    assert job.batch(num_workers) == 48
    assert workload.compute_s == pytest.approx(3.0 * most + 0.5)
    assert workload.backward_s == 2.0


@pytest.mark.parametrize(
    ("global_batch", "rule"),
    [(50, r"a multiple of `micro_batch` \(=8\)"), (4, "a multiple of"), (-8, "at least 1")],
)
def test_training_spec_refuses_a_batch_that_is_no_multiple(global_batch, rule):
    with pytest.raises(UsageError, match=rf"`global_batch` \(={global_batch}\) must be {rule}"):
        TrainingSpec(micro=MICRO, global_batch=global_batch)
