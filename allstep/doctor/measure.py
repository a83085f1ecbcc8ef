"""Measurements of these workers for the planner, in less than a minute."""

from statistics import median

import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.device import is_accelerator
from allstep.doctor.collectives import measure_burst_s, measure_collectives
from allstep.doctor.links import measure_pairs, slowest
from allstep.doctor.machine import measure_copy_s_per_byte, measure_gemm_flops
from allstep.doctor.measurements import Measurements
from allstep.doctor.timing import USUAL_EFFORT, Effort
from allstep.doctor.trial import PausingLayer, pausing_training, steps_under
from allstep.exchange import Synchronous
from allstep.plan import Cluster, Link, MeasuredCollective, PolicySpec

COMPRESSIONS = ("fp32", "fp16", "int8")
_NUM_GRADIENTS = 16
_NUM_STEPS = 30
_BUCKET_BYTES = 1 << 20


def measure(
    comm: Communicator, compressions: tuple[str, ...] = COMPRESSIONS, effort: Effort = USUAL_EFFORT
) -> Measurements:
    """Measures while all workers work at the same time, as in training. Collective.

    Args:
        comm: the workers.
        compressions: names of formats.
        effort: how much to measure.

    Returns:
        What was measured, the same on every worker.

    >>> found = measure(Communicator.single_process())
    >>> found.gemm_flops > 0, found.pairs, found.cluster.collectives
    (True, (), ())
    """
    copy_s_per_byte = measure_copy_s_per_byte(comm, effort)
    pairs = measure_pairs(comm, effort)
    collectives = _collectives(comm, compressions, effort) if comm.size > 1 else ()
    burst_s = 0.0
    if comm.num_nodes > 1 and collectives:
        burst_s = measure_burst_s(comm, collectives[0], effort)
    inter = slowest(pairs, same_host=False)
    cluster = Cluster(
        name="measured here",
        num_nodes=comm.num_nodes,
        workers_per_node=comm.size // comm.num_nodes,
        intra=slowest(pairs, same_host=True) or inter or Link(bandwidth_bps=8 / copy_s_per_byte),
        inter=inter,
        copy_bytes_per_s=1 / copy_s_per_byte,
        has_shared_memory=not is_accelerator(comm.device),
        burst_s=burst_s,
        bucketing_s_per_byte=copy_s_per_byte,
        gradient_s=_gradient_s(comm),
        collectives=collectives,
        source="measured",
    )
    gemm_flops = measure_gemm_flops(
        comm, torch.float32, 5 * effort.batch_s, size=effort.matrix_size
    )
    return Measurements(cluster=cluster, gemm_flops=gemm_flops, pairs=pairs)


def _collectives(
    comm: Communicator, compressions: tuple[str, ...], effort: Effort
) -> tuple[MeasuredCollective, ...]:
    usual = [
        (name, default_algorithm(comm, Synchronous(compression=name).wire_format.dtype))
        for name in compressions
    ]
    kinds = list(dict.fromkeys([("fp32", "native"), *usual]))  # DistributedDataParallel's first
    return measure_collectives(comm, kinds, effort)


def _gradient_s(comm: Communicator) -> float:
    """Seconds to hook and bucket a gradient, with a sum that sends nothing."""
    if comm.size == 1:
        return 0.0
    sends_nothing = PolicySpec(name="", algorithm="dummy", bucket_bytes=_BUCKET_BYTES)
    bare_s, attached_s = (_step_s(comm, policy) for policy in (None, sends_nothing))
    return max(0.0, attached_s - bare_s) / _NUM_GRADIENTS


def _step_s(comm: Communicator, policy: PolicySpec | None) -> float:
    """The seconds of a step of a model whose passes only make gradients."""
    layers = [PausingLayer(1) for _ in range(_NUM_GRADIENTS)]
    with steps_under(comm, pausing_training(layers, comm.device), policy) as run:
        return median(run(1, _NUM_STEPS))
