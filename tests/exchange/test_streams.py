"""The exchange's streams, without an accelerator: no races, and no wait of the host in a step.

CPU tensors are taken for an accelerator's, streams are names, torch's sanitizer looks. Then each
wait in the package is left out, one at a time, and must be found.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep import Communicator, device
from allstep.errors import UsageError
from allstep.exchange import Exchange, ExchangePolicy, make_policy
from allstep.exchange.ddp_comm_hook import ddp_hook
from allstep.exchange.fsdp_comm_hook import FSDPCommHook
from allstep.train.devices import to_device
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks
from tests.helpers.sites import Site, waits_of_package
from tests.helpers.streams import Rank, StreamsAsNames

POLICIES = {
    name: make_policy(bucket_bytes=64, **options)
    for name, options in {
        "fp32": {},
        "bf16": {"compression": "bf16"},
        "fp16": {"compression": "fp16"},
        "int8": {"compression": "int8"},
        "topk": {"compression": "topk"},
        "powersgd": {"compression": "powersgd"},
        "exact": {"compression": "exact"},
        "no overlap": {"overlap": False},
        "ring": {"algorithm": "ring"},
        "stale": {"staleness": 1},
        "stale 2 int8": {"staleness": 2, "compression": "int8"},
        "local": {"sync_every": 2},
    }.items()
}
Train = Callable[[Communicator, ExchangePolicy], None]


def attached(comm: Communicator, policy: ExchangePolicy) -> tuple[nn.Module, Exchange, Any]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    given = {"optimizer": optimizer} if isinstance(policy, allstep.LocalSGD) else {}
    return model, allstep.attach(model, comm, policy, **given), optimizer


def train(comm: Communicator, policy: ExchangePolicy, num_steps: int = 3) -> None:
    """Steps with clipping, a checkpoint in between, then the gradients that are under way."""
    model, exchange, optimizer = attached(comm, policy)
    for step in range(num_steps):
        model(torch.ones(2, 5)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            exchange.load_state_dict(copy.deepcopy(exchange.state_dict()))
    for _ in exchange.flush():
        optimizer.step()
    exchange.sync_buffers()
    exchange.detach()


def accumulate(comm: Communicator, policy: ExchangePolicy) -> None:
    model, exchange, optimizer = attached(comm, policy)
    for _ in range(3):
        with exchange.no_sync():
            model(torch.ones(2, 5)).square().mean().backward()
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.detach()


def in_global_batches(comm: Communicator, policy: ExchangePolicy) -> None:
    """Of two micro-batches; the gradients of the third batch leave the grid of "exact"."""
    model, exchange, optimizer = attached(comm, policy)
    for step, scale in enumerate((1.0, 1.0, 1e9, 1.0)):
        with exchange.global_batch(step, num_micro_batches=2 * comm.size):
            exchange.begin_micro_batch()
            with exchange.no_sync():
                (scale * model(torch.ones(2, 5))).sum().backward()
            exchange.begin_micro_batch()
            model(torch.ones(2, 5)).sum().backward()
        optimizer.zero_grad()
    exchange.detach()


def leave_out(comm: Communicator, policy: ExchangePolicy) -> None:
    """A worker without a gradient for some parameters."""
    model, exchange, optimizer = attached(comm, policy)
    for step in range(3):
        part = model[2:] if (step + comm.rank) % 2 else model
        part(torch.ones(2, part[0].in_features)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.detach()


def with_ddp(comm: Communicator, policy: ExchangePolicy) -> None:
    hook, model = ddp_hook(policy, comm), mlp()
    ddp = DistributedDataParallel(model, process_group=comm.process_group, bucket_cap_mb=1e-4)
    ddp.register_comm_hook(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    for _ in hook.flush():
        optimizer.step()
    DistributedDataParallel._active_ddp_module = None


def with_fsdp(comm: Communicator, policy: ExchangePolicy) -> None:
    """What FSDP2 does around the hook: each module's gradient goes through two of its streams."""
    hook = FSDPCommHook(nn.Linear(4, 4), comm, policy)
    scatters, reduces = device.new_stream(comm.device), device.new_stream(comm.device)

    def reduce(gradient: Tensor) -> None:
        for name in ("second", "first"):
            scatters.wait_stream(device.current_stream(comm.device))
            with scatters:
                flat = gradient.expand(16) * 2
            reduces.wait_stream(scatters)
            with reduces:
                hook.reduce_(name, flat)
                flat.mul_(2)
            device.current_stream(comm.device).wait_stream(reduces)
            flat.add_(1)

    for _ in range(4):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(reduce)
        x.sum().backward()


def with_copies(comm: Communicator, policy: ExchangePolicy) -> None:
    """Batches that come from the host."""
    model, exchange, optimizer = attached(comm, policy)
    device_of_batches = torch.device("cpu", 0)  # torch takes it for another than "cpu"
    for _ in range(3):
        on_host = device._driver.new_pinned(torch.ones(2, 5)).fill_(1.0)
        x = to_device({"x": on_host}, device_of_batches)["x"]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.detach()


CASES: list[tuple[str, Train]] = [
    *((name, train) for name in POLICIES),
    *((name, accumulate) for name in ("fp32", "int8", "stale")),
    ("exact", in_global_batches),
    *((name, leave_out) for name in ("fp32", "int8", "stale")),
    *((name, with_ddp) for name in ("fp32", "int8", "stale")),
    *((name, with_fsdp) for name in ("fp32", "int8", "stale")),
    ("fp32", with_copies),
]
IDS = [f"{train.__name__}-{name}" for name, train in CASES]


def run(case: Train, policy: ExchangePolicy, driver: StreamsAsNames) -> list[Rank]:
    def worker(comm: Communicator) -> Rank:
        torch.manual_seed(0)
        with driver.rank() as rank:
            case(comm, policy)
        return rank

    with device.using_driver(driver):
        return run_ranks(2, worker)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_streams_have_no_races(name: str, case: Train) -> None:
    for rank in run(case, POLICIES[name], StreamsAsNames()):
        assert not rank.races
        assert rank.handler.seq_num > 20


# Each call of the package that orders streams, keeps memory or lets the host wait, and the training
# in which its loss shows: as a race, or as memory that nobody lent.
SITES = {
    Site("exchange/runner.py", "StreamRunner._submit", "wait_stream"): ("fp32", train),
    Site("comm/work.py", "StreamWork.wait", "wait_event"): ("fp32", train),
    Site("comm/failures.py", "wait_for_event", "wait_until"): ("fp32", train),
    Site("exchange/fsdp_comm_hook.py", "FSDPCommHook.reduce_", "record_stream"): (
        "fp32",
        with_fsdp,
    ),
    Site("train/devices.py", "_copy_beside", "wait_stream"): ("fp32", with_copies),
    Site("train/devices.py", "_copy_beside", "record_stream"): ("fp32", with_copies),
}

# They only keep a clock or a copy from being read too early, or a group from being left too early.
CLOCKS = {
    Site("comm/algorithms/auto.py", "Auto._time_sum", "synchronize"),
    Site("comm/group_wire.py", "shut_down", "synchronize"),
    Site("cli/measure_gpus.py", "measure_product", "synchronize"),
    Site("cli/measure_gpus.py", "what_arrives", "synchronize"),
    Site("doctor/timing.py", "synchronize", "synchronize"),
    Site("exchange/tuning.py", "_wait", "synchronize"),
    Site("train/probe.py", "shortest_s", "synchronize"),
}

# Of a thread of its own, whose work is not watched here; `tests/comm/test_on_gpu.py` receives what
# comes late.
IN_A_THREAD = {
    Site("comm/collectives.py", "_hand_over", "wait_event"),
    Site("comm/collectives.py", "_hand_over", "record_stream"),
}


@pytest.mark.parametrize("site", SITES, ids=str)
def test_a_wait_that_is_left_out_is_found(site: Site) -> None:
    name, case = SITES[site]
    ranks = run(case, POLICIES[name], StreamsAsNames(left_out=site))
    if site.verb == "record_stream":
        assert not any(rank.lent for rank in ranks)
        assert all(rank.lent for rank in run(case, POLICIES[name], StreamsAsNames()))
    else:
        assert all(rank.races for rank in ranks)


def test_every_wait_has_a_mutant() -> None:
    """A new one goes into `SITES`, with a training that needs it."""
    assert waits_of_package() == SITES.keys() | CLOCKS | IN_A_THREAD


class Capturing(StreamsAsNames):
    def is_capturing(self, device: torch.device) -> bool:
        return True


def test_a_captured_training_step_is_refused() -> None:
    def infer(comm: Communicator, policy: ExchangePolicy) -> None:
        model, _, _ = attached(comm, policy)
        with torch.no_grad():
            model(torch.ones(2, 5))

    with pytest.raises(UsageError, match="step of an attached model is captured in a graph"):
        run(train, POLICIES["fp32"], Capturing())
    run(infer, POLICIES["fp32"], Capturing())


def test_times_of_exchanges_are_those_of_the_device() -> None:
    """Choices by measured times wait for the device; without, they would time launches."""
    driver = StreamsAsNames()
    policy = allstep.Synchronous(algorithm="auto", bucket_bytes="auto")
    for rank in run(partial(train, num_steps=4), policy, driver):
        files = {site.file for site in rank.clocked}
        assert files == {"comm/algorithms/auto.py", "exchange/tuning.py"}
