"""Buckets of random gradients, and what wire formats make of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.algorithms import make_algorithm
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import Transport, WireFormat, WireState
from tests.helpers.ranks import run_ranks

SHAPES = {
    "conv": (6, 3, 3, 3),
    "empty": (0, 4),
    "scalar": (),
    "weight": (33, 17),
    "bias": (33,),
    "column": (1, 41),
}


def bucket(dtype: torch.dtype = torch.float32, num_tail: int = 0) -> BucketLayout:
    """Odd sizes, an empty tensor, a number, and memory that isn't in the usual order."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    tensors["weight"] = torch.zeros(SHAPES["weight"][::-1], dtype=dtype).T
    tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
    return BucketLayout.of([(n, nn.Parameter(t)) for n, t in tensors.items()], num_tail)


def vector(size: int, dtype: torch.dtype = torch.float32, num_tail: int = 0) -> BucketLayout:
    return BucketLayout.of([("vector", nn.Parameter(torch.zeros(size, dtype=dtype)))], num_tail)


def gradients(layout: BucketLayout, size: int, seed: int = 0) -> Tensor:
    """[size, num_elements + num_tail]: sizes of elements differ by orders; tails are zero."""
    generator = torch.Generator().manual_seed(seed)
    n = layout.num_elements
    flats = torch.zeros(size, n + layout.num_tail, dtype=layout.flat_dtype)
    flats[:, :n] = torch.randn(size, n, generator=generator)
    flats[:, :n] *= torch.logspace(-3, 0, n) if n else 1.0
    return flats


def transport(comm: Communicator) -> Transport:
    return Transport(comm, make_algorithm("native", comm))


def exchange(
    wire: WireFormat,
    layout: BucketLayout,
    steps: Sequence[Tensor],
    read: Callable[[WireState, Transport], object] = lambda state, transport: None,
) -> list[tuple[list[Tensor], object]]:
    """For each worker: what it got at each step, and what `read` says at the end.

    Args:
        wire: the format.
        layout: the bucket.
        steps: [size, num_elements + num_tail] each, a row a worker.
        read: looks at the worker's state and transport.
    """

    def worker(comm: Communicator) -> tuple[list[Tensor], object]:
        moved, state = transport(comm), wire.new_state(layout)
        results = []
        for flats in steps:
            flat = flats[comm.rank].clone()
            flat[: layout.num_elements] /= comm.size
            wire.sum_(flat, layout, state, moved)
            results.append(flat)
        return results, read(state, moved)

    return run_ranks(len(steps[0]), worker)


def mean(wire: WireFormat, layout: BucketLayout, flats: Tensor) -> Tensor:
    """[size, num_elements + num_tail]: what each worker got in one step."""
    return torch.stack([results[0] for results, _ in exchange(wire, layout, [flats])])
