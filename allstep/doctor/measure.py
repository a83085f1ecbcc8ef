"""What the planner needs to know of these workers, measured in less than a minute."""

from time import perf_counter

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.doctor.collectives import measure_burst_s, measure_collectives
from allstep.doctor.gemm import measure_gemm_flops
from allstep.doctor.links import measure_pairs, slowest
from allstep.doctor.measurements import Measurements
from allstep.doctor.memory import measure_copy_s_per_byte
from allstep.doctor.timing import slowest_s, synchronize
from allstep.exchange import Synchronous
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.wires import make_wire
from allstep.plan import MeasuredCollective

__all__ = ["WIRES", "measure"]

WIRES = ("fp32", "fp16", "int8")
_NUM_GRADIENTS = 16
_NUM_STEPS = 30


def measure(comm: Communicator, wires: tuple[str, ...] = WIRES) -> Measurements:
    """Measures with all workers at work at once, as in training. Collective.

    Args:
        comm: the workers.
        wires: names of formats.

    Returns:
        What was measured, the same on every worker.

    >>> found = measure(Communicator.single_process())
    >>> found.copy_bytes_per_s > 0, found.pairs, found.collectives
    (True, (), ())
    """
    copy_s_per_byte = measure_copy_s_per_byte(comm)
    pairs = measure_pairs(comm)
    collectives = _collectives(comm, wires) if comm.size > 1 else ()
    burst_s = 0.0
    if comm.num_nodes > 1 and collectives:
        burst_s = measure_burst_s(comm, collectives[0])
    return Measurements(
        num_nodes=comm.num_nodes,
        workers_per_node=comm.size // comm.num_nodes,
        device=comm.device.type,
        gemm_flops=measure_gemm_flops(comm, torch.float32),
        copy_bytes_per_s=1 / copy_s_per_byte,
        bucketing_s_per_byte=copy_s_per_byte,
        gradient_s=_gradient_s(comm),
        intra=slowest(pairs, same_host=True),
        inter=slowest(pairs, same_host=False),
        burst_s=burst_s,
        pairs=pairs,
        collectives=collectives,
    )


def _collectives(comm: Communicator, wires: tuple[str, ...]) -> tuple[MeasuredCollective, ...]:
    usual = [(wire, default_algorithm(comm, make_wire(wire).dtype)) for wire in wires]
    kinds = list(dict.fromkeys([("fp32", "native"), *usual]))  # DistributedDataParallel's first
    return measure_collectives(comm, kinds)


class _Sum(torch.autograd.Function):
    """A loss whose backward pass costs nothing but handing out gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor, *parameters: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0], *(torch.zeros(1, device=grads[0].device) for _ in range(_NUM_GRADIENTS)))


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1) for _ in range(_NUM_GRADIENTS))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = _Sum.apply(x, *self.weights)  # type: ignore[no-untyped-call]
        return loss


def _gradient_s(comm: Communicator) -> float:
    """Seconds to hook and bucket a gradient, with a sum that sends nothing."""
    if comm.size == 1:
        return 0.0
    model = _Tiny().to(comm.device)
    bare_s = _step_s(comm, model)
    exchange = OverlappedExchange(model, comm, Synchronous(algorithm="dummy"))
    attached_s = _step_s(comm, model)
    exchange.detach()
    return max(0.0, attached_s - bare_s) / _NUM_GRADIENTS


def _step_s(comm: Communicator, model: nn.Module) -> float:
    x = torch.zeros((), device=comm.device, requires_grad=True)
    comm.barrier()
    seconds = []
    for _ in range(_NUM_STEPS):
        start_s = perf_counter()
        model(x).backward()
        model.zero_grad()
        synchronize(comm.device)
        seconds.append(perf_counter() - start_s)
    return slowest_s(comm, sorted(seconds)[_NUM_STEPS // 2])
