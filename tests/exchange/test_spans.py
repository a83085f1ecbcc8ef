"""What torch.profiler shows of an exchange, to a user who knows nothing of its threads."""

import time

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from allstep.comm import Communicator
from allstep.comm.algorithms import Ring
from allstep.exchange import Stale, Synchronous, attach, ddp_hook
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks

SLOW_S = 0.02


class Slow(Ring):
    """Takes at least `SLOW_S`."""

    def _reduce_(self, flat: Tensor) -> None:
        time.sleep(SLOW_S)
        super()._reduce_(flat)


def profiled_step(model: nn.Module, comm: Communicator) -> list[FunctionEvent]:
    """Rank 0's spans in the third step."""

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 5)).sum().backward()

    for _ in range(2):
        step()
    comm.barrier()
    if comm.rank:
        step()
        return []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return [event for event in profiler.events() if event.name.startswith("allstep::")]


POLICIES = {
    "own": Synchronous(algorithm=Slow, bucket_bytes=1),
    "fp16": Synchronous(algorithm=Slow, bucket_bytes=1, compression="fp16"),
    "exact": Synchronous(algorithm=Slow, bucket_bytes=1, compression="exact"),
    "shared_memory": Synchronous(bucket_bytes=1),
    "native": Synchronous(algorithm="native", bucket_bytes=1),
}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
@pytest.mark.parametrize("name", POLICIES)
def test_every_bucket_has_its_spans(name: str) -> None:
    def worker(comm: Communicator) -> tuple[list[FunctionEvent], int]:
        model = mlp()
        exchange = attach(model, comm, POLICIES[name])
        return profiled_step(model, comm), len(exchange.buckets)

    events, num_buckets = run_ranks(2, worker)[0]
    assert num_buckets > 2
    for what in ("reduce", "wait"):
        found = [event for event in events if event.name.endswith(what)]
        assert sorted(e.name for e in found) == [
            f"allstep::bucket {index} {what}" for index in range(num_buckets)
        ]
    if POLICIES[name].algorithm is Slow:
        for event in events:
            if event.name.endswith("reduce"):
                assert event.is_async  # it ends in another thread
                assert event.time_range.elapsed_us() >= 1e6 * SLOW_S


def test_buckets_of_ddp_have_spans() -> None:
    def worker(comm: Communicator) -> list[FunctionEvent]:
        model = DistributedDataParallel(mlp(), process_group=comm.process_group)
        model.register_comm_hook(None, ddp_hook(Synchronous(algorithm=Slow), comm))
        return profiled_step(model, comm)

    (event,) = run_ranks(2, worker)[0]
    DistributedDataParallel._active_ddp_module = None
    assert event.name == "allstep::bucket reduce"
    assert event.time_range.elapsed_us() >= 1e6 * SLOW_S


@pytest.mark.parametrize("algorithm", [Slow, "native"])
def test_profiler_stops_before_stale_gradients_are_summed(algorithm: object) -> None:
    """Nothing is written to a trace that is no more; waiting is seen all the same."""

    def worker(comm: Communicator) -> list[str]:
        model = mlp()
        attach(model, comm, Stale(algorithm=algorithm, steps=1))
        for _ in range(5):
            events = profiled_step(model, comm)
        return [event.name for event in events]

    assert run_ranks(2, worker)[0] == ["allstep::bucket 0 wait"]
