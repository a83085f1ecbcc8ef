"""Waits for a device that end, and what is asked of torch."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import allstep
from allstep import device
from allstep.comm import Communicator
from allstep.comm.failures import wait_for_event
from allstep.comm.group_wire import GroupWire, backend_name, backend_timeout, shut_down
from allstep.comm.missing import RankNames
from allstep.errors import CollectiveTimeoutError, UsageError
from allstep.exchange.reducer import Reducer
from allstep.nn.batch_norm_across import batch_norm_across
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks
from tests.helpers.sites import Site
from tests.helpers.streams import StreamsAsNames


class Never:
    def query(self) -> bool:
        return False


class After:
    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0


def test_a_wait_for_an_event_ends() -> None:
    assert device.wait_until(After(3), 30.0)
    assert not device.wait_until(Never(), 0.01)


def test_a_device_that_never_comes_is_a_timeout_that_names_the_call() -> None:
    names = RankNames(range(2), 1, 2)
    wait_for_event(After(1), "exchange", names, 30.0)
    with pytest.raises(CollectiveTimeoutError, match=r"`exchange` on rank 1 of 2 did not finish"):
        wait_for_event(Never(), "exchange", names, 0.01)


def test_ranks_that_wait_for_a_device_say_who_is_missing() -> None:
    def worker(comm: Communicator) -> str:
        comm.barrier()
        if comm.rank == 2:
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            wait_for_event(Never(), "exchange", comm.wire.names, 0.2)
        return str(caught.value)

    for message in run_ranks(3, worker)[:2]:
        assert "Waiting: ranks 0, 1 in `exchange`; missing: rank 2." in message


class _Backend:
    def __init__(self) -> None:
        self.timeouts: list[timedelta] = []

    def name(self) -> str:
        return "nccl"

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)


class _Group:
    """A group of torch's whose tensors travel from accelerators only."""

    def __init__(self) -> None:
        self.backend = _Backend()
        self._device_types = [torch.device("cuda")]

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def get_group_store(self) -> None:
        return None

    def _get_backend(self, device: torch.device) -> _Backend:
        return self.backend


def test_a_new_timeout_reaches_a_backend_that_ignores_those_of_calls() -> None:
    """And leaves it time to be outlived by whoever waits, and says who is missing."""
    group = _Group()
    wire = GroupWire(group, 300.0)  # type: ignore[arg-type]
    assert group.backend.timeouts == []
    wire.timeout_s = 7.0
    assert group.backend.timeouts == [timedelta(seconds=14)] == [backend_timeout(7.0)]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_aborted_group_does_not_wait_for_its_device(is_aborted: bool) -> None:
    """Which may wait for ever: for another group's call, to which a rank never comes."""
    calls: list[str] = []

    class Busy(device.Driver):
        def synchronize(self, device: torch.device) -> None:
            calls.append("synchronize")

    class Group:
        def shutdown(self) -> None:
            calls.append("shutdown")

    with device.using_driver(Busy()):
        shut_down(Group(), torch.device("cuda", 0), is_aborted)  # type: ignore[arg-type]
    assert calls == ([] if is_aborted else ["synchronize"]) + ["shutdown"]


def test_backends_are_those_of_torchs_table() -> None:
    kinds = {"cuda": "nccl", "xpu": "xccl", "cpu": None, "meta": None, "mps": None}
    assert {kind: backend_name(torch.device(kind)) for kind in kinds} == kinds


def test_a_model_elsewhere_than_its_communicator_is_refused() -> None:
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match=r"`0.weight` on meta, and `comm` computes on cpu"):
        allstep.attach(mlp().to("meta"), comm)


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"several devices \(`0.bias` on cpu, `1.bias` on meta\)"):
        allstep.attach(model, Communicator.single_process())


ODD = {"scalar": (), "vector": (7,), "empty": (0, 3), "matrix": (5, 3), "last": (33,)}


def odd_model() -> nn.Module:
    model = nn.Module()
    for number, (name, shape) in enumerate(ODD.items()):
        generator = torch.Generator().manual_seed(number)
        setattr(model, name, nn.Parameter(torch.randn(shape, generator=generator)))
    return model


def exchanged(comm: Communicator, compression: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The second exchange's gradients, with a checkpoint before it; where each of them begins."""
    model = odd_model()
    policy = allstep.Synchronous(compression=compression)
    exchange = allstep.attach(model, comm, policy)
    for step in range(2):
        model.zero_grad()
        sum((p * p * (1 + comm.rank + step)).sum() for p in model.parameters()).backward()
        if step == 0:
            saved = exchange.state_dict()
            exchange.load_state_dict(saved)
    found = [p.grad.clone() for p in model.parameters()]
    saved["offsets"] = [p.grad.storage_offset() for p in model.parameters() if p.numel()]
    exchange.detach()
    return found, saved


@pytest.mark.parametrize("compression", ["fp32", "fp16", "powersgd", "exact"])
def test_gradients_in_buckets_of_an_accelerator_begin_where_kernels_want_it(
    compression: str,
) -> None:
    driver = StreamsAsNames()

    def worker(comm: Communicator) -> tuple[list[torch.Tensor], dict[str, Any]]:
        with driver.rank():
            return exchanged(comm, compression)

    plain = run_ranks(2, partial(exchanged, compression=compression))
    with device.using_driver(driver):
        aligned = run_ranks(2, worker)
    for (expected, saved), (found, saved_there) in zip(plain, aligned, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert not any(offset % 16 for offset in saved_there["offsets"])
        assert any(offset % 16 for offset in saved["offsets"])
        assert str(saved_there["residuals"]) == str(saved["residuals"])  # for devices of any kind


def test_buckets_of_an_accelerator_are_large() -> None:
    driver = StreamsAsNames()

    def usual_bytes(comm: Communicator) -> int:
        policy = allstep.Synchronous(compression="fp16")
        with driver.rank():
            reducer = Reducer(comm, policy)
            found = reducer.usual_bucket_bytes
            reducer.close()
        return found

    with device.using_driver(driver):
        assert run_ranks(2, usual_bytes) == [32 << 20] * 2


def test_batch_norm_over_workers_never_makes_the_host_wait() -> None:
    driver = StreamsAsNames()

    def worker(comm: Communicator) -> list[Site]:
        with driver.rank(lints=True) as rank:
            x = torch.ones(2, 3, 4, 4, requires_grad=True)
            for _ in range(2):  # in the first call workers compare what they came with
                rank.waits.clear()
                batch_norm_across(comm, x, torch.ones(3), torch.zeros(3), 1e-5)[0].sum().backward()
        return list(rank.waits)

    with device.using_driver(driver):
        assert run_ranks(2, worker) == [[], []]


def test_residuals_of_all_workers_are_gathered_on_the_host() -> None:
    """One at a time: all workers' together are many models, on one accelerator."""
    driver = StreamsAsNames()

    def worker(comm: Communicator) -> tuple[int, int]:
        with driver.rank(lints=True) as rank:
            model = mlp()
            policy = allstep.Synchronous(bucket_bytes=64, compression="int8")
            exchange = allstep.attach(model, comm, policy)
            model(torch.ones(2, 5)).sum().backward()
            rank.waits.clear()
            saved = exchange.state_dict()
            exchange.detach()
        copies = [site for site in rank.waits if site.verb == "cpu" and "gather" in site.function]
        return len(copies), sum(len(worker) for worker in saved["residuals"] or ())

    with device.using_driver(driver):
        (on_root, num_residuals), (elsewhere, nothing) = run_ranks(2, worker)
    assert on_root == num_residuals > 2
    assert elsewhere == nothing == 0
