"""Exchanges of buckets that are timed by themselves, beside compute and after a pause."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from allstep.comm import Communicator
from allstep.comm.algorithms import Native
from allstep.doctor.collectives import BucketExchange, head_start_s, measure_collectives
from allstep.doctor.contention import measure_contention
from allstep.doctor.timing import Effort
from allstep.errors import CommunicationError
from allstep.exchange.wires import Transport
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("compression", ["fp32", "bf16", "fp16", "int8"])
def test_bucket_exchange_sums_as_a_step_would(compression):
    """Sums of equal buckets; on CPUs the backend takes two at a time."""

    def probe(comm):
        bucket = BucketExchange(Transport(comm, Native(comm)), compression, 4096)
        for flat in bucket.flats:
            flat.fill_(1.0)
        for _ in range(3):
            bucket.run()
        values = [flat[: bucket.num_elements].unique().tolist() for flat in bucket.flats]
        return bucket.num_elements, bucket.num_at_once, sorted(values)

    at_once = 2 if compression == "fp32" else 1
    num_used = 3 * at_once
    expected = (1024, at_once, [[1.0]] * (8 - num_used) + [[2.0]] * num_used)
    assert run_ranks(2, probe) == [expected] * 2


@pytest.mark.parametrize(("algorithm", "num_splits"), [("native", 2), ("shared_memory", 0)])
def test_measure_collectives_gives_each_size_its_own_connections(algorithm, num_splits):
    """Where memory is shared there are none."""

    def measure_all(comm):
        splits = []
        split = comm.split

        def counted(color, key=0):
            splits.append(color)
            return split(color, key)

        comm.split = counted
        effort = Effort(bucket_sizes_bytes=(1 << 12, 1 << 13), batch_s=0.001, num_rounds=1)
        (found,) = measure_collectives(comm, [("fp32", algorithm)], effort)
        return len(splits), found.num_elements

    assert run_ranks(2, measure_all) == [(num_splits, (1 << 10, 1 << 11))] * 2


def test_measure_contention_raises_what_an_exchange_raises():
    main = threading.current_thread()

    def exchange():
        if threading.current_thread() is not main:
            raise CommunicationError("lost")

    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(CommunicationError, match="lost"),
    ):
        measure_contention(Communicator.single_process(), exchange, 1, 0.001, executor)


@pytest.mark.parametrize(
    ("paused_s", "busy_s", "saved_s"),
    [
        ([0.006], [0.010], 0.004),
        ([0.0099], [0.010], 0.0),  # within a twentieth
        ([0.020], [0.010], 0.0),
        ([0.005, 0.006, 0.007], [0.009, 0.010, 0.011], 0.004),
        ([0.002, 0.006, 0.010], [0.006, 0.010, 0.014], 0.0),  # they overlap
    ],
)
def test_head_start_is_what_a_pause_saves(paused_s, busy_s, saved_s):
    found_s = head_start_s(Communicator.single_process(), 12 * paused_s, 12 * busy_s)
    assert found_s == pytest.approx(saved_s)
