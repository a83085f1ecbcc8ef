"""What the planner counts for each wire format equals what the exchange hands to the wire."""

import pytest
import torch
from torch import nn

from allstep.comm.algorithms import make_algorithm
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import WIRES as FORMATS
from allstep.exchange.wires import Transport, make_wire
from allstep.plan.compression import COMPRESSIONS
from allstep.plan.cost import bucket_traffic
from tests.helpers.nodes import make_nodes
from tests.helpers.ranks import run_ranks

SIDES = (1, 5, 64)  # a bucket is one square matrix: what the planner takes PowerSGD's to be


def test_every_compression_of_the_exchange_is_in_the_table():
    assert set(COMPRESSIONS) == set(FORMATS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("algorithm", ["ring", "native", "halving_doubling"])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_bucket_traffic_equals_the_bytes_of_each_compression(algorithm, num_workers, dtype):
    """Of gradients in their parameters' own dtype."""

    def sent_bytes(comm):
        transport = Transport(comm, make_algorithm(algorithm, comm))
        found, before = {}, 0
        for name in FORMATS:
            for side in SIDES:
                square = nn.Parameter(torch.zeros(side, side, dtype=dtype))
                layout = BucketLayout.of([("w", square)])
                flat = torch.linspace(-1, 1, side * side, dtype=dtype)
                wire = make_wire(name)
                wire.sum_(flat, layout, wire.new_state(layout), transport)
                found[name, side] = transport.sent_bytes - before
                before = transport.sent_bytes
        return found

    nodes = make_nodes(num_workers)
    for rank, found in enumerate(run_ranks(num_workers, sent_bytes)):
        for (name, side), sent in found.items():
            if name == "powersgd" and 2 * 4 * side >= side**2:
                continue  # too small to compress: sent whole
            expected = bucket_traffic(name, algorithm, nodes, rank, side * side, dtype.itemsize)
            assert sent == expected.sent_bytes, f"{name}, {side} x {side}, rank {rank}"


@pytest.mark.parametrize("num_elements", [1, 255, 256, 257, 1000, 123_457])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_int8_traffic_has_whole_blocks(num_elements, size):
    from allstep.exchange.wires.blocks import BlockParts

    parts = BlockParts.of(num_elements, 0, size, 256)
    row_bytes = parts.length + 4 * parts.num_blocks
    sent = bucket_traffic("int8", "ring", make_nodes(size), 0, num_elements)
    assert sent.sent_bytes == 2 * (size - 1) * row_bytes
