"""What the planner needs to know of these workers, measured in less than a minute."""

from statistics import median

import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.doctor.collectives import measure_burst_s, measure_collectives
from allstep.doctor.links import measure_pairs, slowest
from allstep.doctor.machine import measure_copy_s_per_byte, measure_gemm_flops
from allstep.doctor.measurements import Measurements
from allstep.doctor.timing import USUAL_EFFORT, Effort
from allstep.doctor.trial import PausingLayer, pausing_training, steps_under
from allstep.exchange.wires import make_wire
from allstep.plan import MeasuredCollective, PolicySpec

__all__ = ["WIRES", "measure"]

WIRES = ("fp32", "fp16", "int8")
_NUM_GRADIENTS = 16
_NUM_STEPS = 30
_BUCKET_BYTES = 1 << 20


def measure(
    comm: Communicator, wires: tuple[str, ...] = WIRES, effort: Effort = USUAL_EFFORT
) -> Measurements:
    """Measures with all workers at work at once, as in training. Collective.

    Args:
        comm: the workers.
        wires: names of formats.
        effort: how much to measure.

    Returns:
        What was measured, the same on every worker.

    >>> found = measure(Communicator.single_process())
    >>> found.copy_bytes_per_s > 0, found.pairs, found.collectives
    (True, (), ())
    """
    copy_s_per_byte = measure_copy_s_per_byte(comm, effort)
    pairs = measure_pairs(comm, effort)
    collectives = _collectives(comm, wires, effort) if comm.size > 1 else ()
    burst_s = 0.0
    if comm.num_nodes > 1 and collectives:
        burst_s = measure_burst_s(comm, collectives[0], effort)
    return Measurements(
        num_nodes=comm.num_nodes,
        workers_per_node=comm.size // comm.num_nodes,
        device=comm.device.type,
        gemm_flops=measure_gemm_flops(
            comm, torch.float32, 5 * effort.batch_s, size=effort.matrix_size
        ),
        copy_bytes_per_s=1 / copy_s_per_byte,
        bucketing_s_per_byte=copy_s_per_byte,
        gradient_s=_gradient_s(comm),
        intra=slowest(pairs, same_host=True),
        inter=slowest(pairs, same_host=False),
        burst_s=burst_s,
        pairs=pairs,
        collectives=collectives,
    )


def _collectives(
    comm: Communicator, wires: tuple[str, ...], effort: Effort
) -> tuple[MeasuredCollective, ...]:
    usual = [(wire, default_algorithm(comm, make_wire(wire).dtype)) for wire in wires]
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
    """Of a model whose passes do nothing but hand out gradients."""
    layers = [PausingLayer(1) for _ in range(_NUM_GRADIENTS)]
    with steps_under(comm, pausing_training(layers, comm.device), policy) as run:
        return median(run(1, _NUM_STEPS))
