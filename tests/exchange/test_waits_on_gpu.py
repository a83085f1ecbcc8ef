"""Streams on a real GPU: no hidden wait of the host, and no race where either side is late.

`tests/exchange/test_host_waits.py` and `test_streams.py` ask the same of a CPU that plays the GPU.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, device
from allstep.comm.group_wire import GroupWire
from allstep.errors import UsageError
from allstep.exchange import ExchangePolicy, make_policy
from allstep.exchange.runner import StreamRunner
from allstep.train import devices
from allstep.train.devices import to_device
from tests.exchange.test_host_waits import OPTIMIZERS, POLICIES, Parameters
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu, run_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.process]
_SLEEP_CYCLES = 20_000_000  # some 10 ms, in which a host goes through several steps
_WAITS = "synchronizing CUDA operation"


def deep_net() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, 16), *layers, nn.Linear(16, 1))


def warnings_of_steps(
    comm: Communicator,
    policy: ExchangePolicy,
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
) -> list[str]:
    """Where torch saw the host wait for the GPU, once buckets and states are there."""
    model = deep_net().to(comm.device)
    optimizer = make_optimizer(model.parameters())
    exchange = allstep.attach(model, comm, policy)
    x = torch.ones(2, 5, device=comm.device)
    found = []
    for step in range(8):
        if step == 5:
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [f"{w.filename}:{w.lineno}" for w in seen if _WAITS in str(w.message)]
    torch.cuda.set_sync_debug_mode("default")
    exchange.detach()
    return found


def waits_of_all(comm: Communicator) -> dict[str, list[str]]:
    found = {
        f"{policy} {optimizer}": warnings_of_steps(comm, POLICIES[policy], OPTIMIZERS[optimizer])
        for policy in POLICIES
        for optimizer in OPTIMIZERS
    }
    raises = allstep.optim.LAMB
    found["control"] = warnings_of_steps(
        comm, POLICIES["fp32"], lambda p: raises(p, 0.1, nonfinite="raise")
    )
    return found


@pytest.mark.skipif(on_cpu(), reason="a CPU has nothing to wait for")
def test_host_waits_for_nothing_in_a_step() -> None:
    for found in run_on_gpu(2, waits_of_all):
        control = found.pop("control")
        assert len(control) == 3  # one a step, as documented
        assert all("optim" in site for site in control)
        assert not any(found.values()), found


def sleep(*_: object) -> None:
    """Has the current stream stand still for a while."""
    if not on_cpu():
        torch.cuda._sleep(_SLEEP_CYCLES)


@contextmanager
def late_exchange() -> Any:
    """Each sum over the workers begins late, in the stream that asks for it."""
    real = GroupWire.all_reduce

    def all_reduce(self: GroupWire, tensor: Tensor, *args: Any) -> Any:
        if tensor.device.type != "cpu":
            sleep()
        return real(self, tensor, *args)

    with mock.patch.object(GroupWire, "all_reduce", all_reduce):
        yield


LATE_POLICIES = {
    name: make_policy(bucket_bytes=256, algorithm="native", **options)
    for name, options in {
        "fp32": {},
        "fp16": {"compression": "fp16"},
        "int8": {"compression": "int8"},
        "exact": {"compression": "exact"},
        "stale": {"staleness": 1},
        "no overlap": {"overlap": False},
    }.items()
}


def train(
    comm: Communicator, policy: ExchangePolicy, *, slow_backward: bool, own_stream: bool
) -> dict[str, Tensor]:
    """The sum of all gradients of some steps, which no wait of the host parts."""
    torch.manual_seed(0)
    model = deep_net()
    batches = torch.randn(4, comm.size, 3, 5)[:, comm.rank].to(comm.device)
    model.to(comm.device)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    exchange = allstep.attach(model, comm, policy)
    with ExitStack() as stack:
        if own_stream and not on_cpu():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
        for batch in batches:
            hidden = batch
            for index, layer in enumerate(model):
                hidden = layer(hidden)
                if slow_backward and index % 4 == 0:
                    hidden.register_hook(sleep)
            hidden.square().mean().backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                if p.grad is not None:
                    total.add_(p.grad)
            model.zero_grad()
        for _ in exchange.flush():
            for total, p in zip(sums, model.parameters(), strict=True):
                total.add_(p.grad)
        if own_stream and not on_cpu():
            torch.cuda.current_stream().synchronize()
    exchange.detach()
    names = [name for name, _ in model.named_parameters()]
    return {name: total.cpu() for name, total in zip(names, sums, strict=True)}


def whole_gradients(size: int) -> dict[str, Tensor]:
    """Of one process on the whole batches."""
    torch.manual_seed(0)
    model = deep_net()
    for batch in torch.randn(4, size, 3, 5):
        model(batch.flatten(0, 1)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained_late(comm: Communicator) -> dict[str, dict[str, Tensor]]:
    found = {"one process": whole_gradients(comm.size)}
    for name, policy in LATE_POLICIES.items():
        found[f"{name} on time"] = train(comm, policy, slow_backward=False, own_stream=False)
        for own_stream in (False, True):
            where = "own stream" if own_stream else "default stream"
            found[f"{name} late backward, {where}"] = train(
                comm, policy, slow_backward=True, own_stream=own_stream
            )
            with late_exchange():
                found[f"{name} late exchange, {where}"] = train(
                    comm, policy, slow_backward=False, own_stream=own_stream
                )
    return found


def test_gradients_are_the_same_bits_whoever_is_late() -> None:
    for found in run_on_gpu(2, trained_late):
        whole = found.pop("one process")
        for name, gradient in whole.items():
            torch.testing.assert_close(found["fp32 on time"][name], gradient, rtol=1e-4, atol=1e-6)
        for name, sums in found.items():
            expected = found[f"{next(n for n in LATE_POLICIES if name.startswith(n))} on time"]
            for parameter, total in sums.items():
                assert torch.equal(total, expected[parameter]), (name, parameter)


class DeafStream(torch.Stream):
    """A mutant: waits for no other stream."""

    def wait_stream(self, stream: Any) -> None:
        pass


class DeafStreams(device.Driver):
    def new_stream(self, device: torch.device, *, is_urgent: bool) -> Any:
        return DeafStream(device, priority=-1 if is_urgent else 0)


def read_beside(runner: StreamRunner) -> float:
    """What the runner's stream reads of a number that the current stream writes late."""
    written, read = torch.zeros(1, device=gpu()), torch.zeros(1, device=gpu())
    torch.cuda.synchronize()
    sleep()
    written.fill_(1.0)
    runner.submit(lambda: read.copy_(written)).wait()
    return read.item()


@pytest.mark.skipif(on_cpu(), reason="a CPU has no streams")
def test_a_stream_that_waits_for_nothing_reads_too_early() -> None:
    """The control: here a race shows."""
    assert read_beside(StreamRunner(gpu())) == 1.0
    with device.using_driver(DeafStreams()):
        assert read_beside(StreamRunner(gpu())) == 0.0


def read_two_copies() -> list[float]:
    """What the current stream reads, late, of two copies from the host, the first let go of."""
    first, second = (torch.full((1 << 20,), value).pin_memory() for value in (1.0, 2.0))
    torch.cuda.synchronize()
    with device.copy_stream(gpu()):
        sleep()
    copied = to_device(first, gpu())
    sleep()
    read = copied.max() - copied.min() + copied.mean()
    del copied
    other = to_device(second, gpu())
    return [read.item(), other.mean().item()]


@pytest.mark.skipif(on_cpu(), reason="a CPU has no streams")
def test_copies_from_the_host_are_waited_for_and_kept() -> None:
    assert read_two_copies() == [1.0, 2.0]
    with mock.patch.object(devices, "lend_to_current_stream"):
        assert read_two_copies() != [1.0, 2.0]  # the control: the second lies where the first lay


def capture(comm: Communicator, *, is_refused: bool) -> None:
    """A whole step in a graph, which a lone worker may capture."""
    torch.manual_seed(0)
    model = deep_net().to(comm.device)
    oracle = copy.deepcopy(model)
    exchange = allstep.attach(model, comm)
    x = torch.ones(2, 5, device=comm.device)
    with torch.cuda.stream(torch.cuda.Stream()):
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if is_refused:
        refused = pytest.raises(UsageError, match="is captured in a graph")
        with refused, torch.cuda.graph(graph):
            model(x)
        return
    model.zero_grad()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    x.copy_(torch.randn(2, 5))
    graph.replay()
    oracle(x).square().mean().backward()
    for own, other in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    exchange.detach()


def train_a_captured_part(comm: Communicator) -> None:
    """Graphs of a part's forward and backward, made before `attach`."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential(nn.Linear(5, 16), part, nn.Linear(16, 1))
    batches = torch.randn(3, comm.size, 4, 5)
    oracle = copy.deepcopy(model).to(comm.device)
    model.to(comm.device)
    example = torch.zeros(4, 16, device=comm.device, requires_grad=True)
    torch.cuda.make_graphed_callables(part, (example,))
    exchange = allstep.attach(model, comm)
    for batch in batches.to(comm.device):
        model.zero_grad()
        oracle.zero_grad()
        model(batch[comm.rank]).square().mean().backward()
        oracle(batch.flatten(0, 1)).square().mean().backward()
        for own, other in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
    exchange.detach()


@pytest.mark.skipif(on_cpu(), reason="a CPU has no graphs")
@pytest.mark.parametrize("size", [1, 2])
def test_a_captured_step_is_right_or_refused(size: int) -> None:
    run_on_gpu(size, partial(capture, is_refused=size > 1))


@pytest.mark.skipif(on_cpu(), reason="a CPU has no graphs")
def test_parts_of_a_model_can_be_captured() -> None:
    run_on_gpu(2, train_a_captured_part)
