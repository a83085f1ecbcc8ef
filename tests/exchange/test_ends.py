"""The end of an exchange's group while calls that nobody waits for are under way."""

import threading

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import PeerLostError
from allstep.exchange import Stale
from allstep.exchange.layout import BucketLayout
from allstep.exchange.reducer import Bucket, Reducer
from tests.helpers.ranks import run_ranks

LENGTH = 1 << 20  # whose sum takes longer than to close a connection


def begin(comm: Communicator, compression: str) -> tuple[Reducer, Bucket]:
    """By "fp32" the backend sums by itself, by "fp16" a thread asks it."""
    reducer = Reducer(comm, Stale(algorithm="native", compression=compression))
    layout = BucketLayout.of([("weight", nn.Parameter(torch.zeros(LENGTH)))])
    reducer.set_layouts([layout])
    return reducer, Bucket(layout, torch.full((LENGTH,), 1.0 + comm.rank))


@pytest.mark.parametrize("compression", ["fp32", "fp16"])
def test_an_exchange_that_ends_lets_others_have_the_sums_it_began(compression: str) -> None:
    torch.set_default_dtype(torch.float32)
    is_closing = threading.Event()

    def worker(comm: Communicator) -> Tensor:
        reducer, bucket = begin(comm, compression)
        if comm.rank == 0:
            reducer.start(bucket)
            end = threading.Thread(target=reducer.close)
            end.start()
            while compression == "fp32" and reducer.comm.process_group is not None:
                end.join(0.001)
            is_closing.set()
            end.join()
        else:
            assert is_closing.wait(20)
            reducer.start(bucket).wait()
        return bucket.flat

    for found in run_ranks(2, worker):
        assert torch.equal(found, torch.full((LENGTH,), 3.0))


def test_an_exchange_that_ends_does_not_wait_for_long_for_others() -> None:
    """Who comes afterwards learns it at once."""
    torch.set_default_dtype(torch.float32)
    has_ended = threading.Event()

    def worker(comm: Communicator) -> None:
        reducer, bucket = begin(comm, "fp16")
        if comm.rank == 0:
            reducer.start(bucket)
            reducer.close()
            has_ended.set()
        else:
            assert has_ended.wait(20)
            with pytest.raises(PeerLostError, match="rank 0 closed its connection"):
                reducer.start(bucket).wait()

    run_ranks(2, worker, timeout_s=60)
