"""On a GPU: multi-tensor and fused kernels against the plain way on the CPU, and CUDA graphs."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.optim import LAMB, LARS, TrustRatio, schedules
from tests.helpers.compare import equal, largest_difference
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu
from tests.optim.table import for_all, gradients, parameters, train
from tests.optim.test_launches import bert_large

pytestmark = pytest.mark.gpu

needs_cuda = pytest.mark.skipif(on_cpu(), reason="CUDA's own: graphs, waits, kernels")

NUM_STEPS = 20


def on_gpu(params: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().to(gpu())) for parameter in params]


def on_host(params: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in params]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    """In the memory of those before, where a graph looks for them."""
    for parameter, gradient in zip(params, gradients(step), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient)


def train_there(
    optimizer: Optimizer, params: Sequence[nn.Parameter], num_steps: int = NUM_STEPS, first: int = 0
) -> list[Tensor]:
    for step in range(first, first + num_steps):
        set_gradients(params, step)
        optimizer.step()
    return on_host(params)


def in_two_groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """With and without weight decay and trust ratios, as `groups` makes them."""
    return [
        {"params": list(params[:3]), "weight_decay": 0.1},
        {"params": list(params[3:]), "adapt": False},
    ]


# -- what is computed ----------------------------------------------------------------------------


@for_all
def test_gpu_is_cpu(make: Callable[..., Optimizer]) -> None:
    here, there = parameters(), on_gpu(parameters())
    expected = train(make(here, weight_decay=0.1), here, NUM_STEPS)
    assert largest_difference(train_there(make(there, weight_decay=0.1), there), expected) < 1e-12


@for_all
def test_gpu_in_float32_is_cpu_in_float64(make: Callable[..., Optimizer]) -> None:
    """A step rounds each weight once, by up to 2**-24 of it, and its change by a few times that.

    Gradients are numbers of float32. Eight roundings of 2**-24 a step, all in one direction.
    """
    bound = NUM_STEPS * 8 * 2**-24
    there = on_gpu(parameters(torch.float32))
    here = [nn.Parameter(p.detach().double()) for p in parameters(torch.float32)]
    oracle, optimizer = make(here, weight_decay=0.1), make(there, weight_decay=0.1)
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(here, gradients(step), strict=True):
            parameter.grad = gradient.float().double()
        oracle.step()
    found = train_there(optimizer, there)
    assert largest_difference(found, here) < bound
    lower = [x.bfloat16() for x in found]  # the control
    assert largest_difference(lower, here) > bound


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_layers_that_take_several_kernels(kind: type[Any], norm: Any) -> None:
    """More layers than one multi-tensor kernel takes, and one that is cut into several pieces."""
    sizes = [*range(1, 150), 70_001]
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]
    made.append(torch.randn(4, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last))
    here, there = [nn.Parameter(x) for x in made], on_gpu(made)
    assert there[-1].stride() == here[-1].stride()
    options = {"weight_decay": 0.1, "trust_ratio": TrustRatio(norm=norm)}
    oracle, optimizer = kind(here, 0.01, fused=False, **options), kind(there, 0.01, **options)
    for step in range(3):
        for parameter, other in zip(here, there, strict=True):
            generator.manual_seed(step)
            parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
            other.grad = parameter.grad.to(gpu())
        oracle.step()
        optimizer.step()
    assert largest_difference(on_host(there), here) < 1e-11


@for_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_dict_goes_to_the_cpu_and_back(
    make: Callable[..., Optimizer], dtype: torch.dtype
) -> None:
    """Master copies and counts of steps too, and not one bit changes on the way."""
    whole = on_gpu(parameters(dtype))
    expected = train_there(make(whole, weight_decay=0.1), whole, 6)

    first = on_gpu(parameters(dtype))
    optimizer = make(first, weight_decay=0.1)
    train_there(optimizer, first, 3)
    here = [nn.Parameter(parameter) for parameter in on_host(first)]
    between = make(here)
    between.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {x.device.type for state in between.state.values() for x in state.values()} == {"cpu"}
    there = on_gpu(here)
    back = make(there)
    back.load_state_dict(between.state_dict())
    kept = {x.device.type for state in back.state.values() for x in state.values()}
    assert kept == {gpu().type}
    assert equal(train_there(back, there, 3, first=3), expected)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_schedule_of_a_rate_on_the_gpu(kind: type[Any]) -> None:
    """It writes to the rate's memory, and the momentum follows the rate where it shall."""
    schedule = schedules.cosine(10, warmup_steps=3)
    options = {} if kind is LAMB else {"momentum_correction": True}
    here, there = parameters(), on_gpu(parameters())
    oracle = kind(in_two_groups(here), 0.1, **options)
    expected = train(oracle, here, 10, rate=lambda step: 0.1 * schedule(step))
    lr = torch.tensor(0.1, dtype=torch.float64, device=gpu())
    optimizer = kind(in_two_groups(there), lr, **options)
    follower = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(10):
        set_gradients(there, step)
        optimizer.step()
        follower.step()
    assert {group["lr"].device for group in optimizer.param_groups} == {lr.device}
    # The group that does not adapt is torch's fused AdamW, which reads a rate there as a float.
    assert largest_difference(on_host(there), expected) < (1e-7 if kind is LAMB else 1e-12)


# -- graphs --------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_steps_can_be_captured(kind: type[Any]) -> None:
    """With rates that change between the replays, and a group that does not adapt."""
    rates = [2**-7, 2**-6, 2**-7, 2**-8, 2**-9]  # also in float32
    options = {"nonfinite": "propagate"} | ({"momentum_correction": True} if kind is LARS else {})
    here, there = parameters(), on_gpu(parameters())
    oracle = kind(in_two_groups(here), rates[0], **options)
    lr = torch.tensor(rates[0], dtype=torch.float64, device=gpu())
    optimizer = kind(in_two_groups(there), lr, capturable=True, **options)
    set_gradients(there, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, len(rates)):
        set_gradients(there, step)
        lr.fill_(rates[step])
        graph.replay()
    expected = train(oracle, here, len(rates), rate=rates.__getitem__)
    assert largest_difference(on_host(there), expected) < 1e-12
    ratios = oracle.trust_ratios()
    assert optimizer.trust_ratios() == pytest.approx(ratios, rel=1e-12) and len(ratios) == 3


# -- what the host waits for ---------------------------------------------------------------------


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@for_all
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_tensor_rate", [False, True])
def test_host_waits_for_nothing_in_a_step(
    make: Callable[..., Optimizer], dtype: torch.dtype, has_tensor_rate: bool
) -> None:
    params = on_gpu(parameters(dtype))
    lr = torch.tensor(0.01, device=gpu()) if has_tensor_rate else 0.01
    optimizer = make(in_two_groups(params), lr, nonfinite="propagate")
    train_there(optimizer, params, 2)
    for step in range(2):
        set_gradients(params, step)
        with waits_are_errors():
            optimizer.step()


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_control_of_waits() -> None:
    """Who must not make an update from a bad gradient waits for it."""
    params = on_gpu(parameters())
    optimizer = LAMB(params)
    train_there(optimizer, params, 2)
    # Where torch's sanitizer has been imported, its hook meets the error, and makes it another.
    with pytest.raises((RuntimeError, SystemError)), waits_are_errors():
        optimizer.step()


# -- kernels -------------------------------------------------------------------------------------


def num_kernels(step: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    on_device = [
        event.name
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    others = ("Memcpy", "Memset", "Optimizer.", "ProfilerStep", "Context Sync", "Stream ")
    return sum(not name.startswith(others) for name in on_device)


@needs_cuda
@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_a_step_of_bert_large_has_fewer_kernels_than_parameters(kind: type[Any]) -> None:
    """A loop over the parameters has many for each.

    A multi-tensor kernel takes a few MB of a large matrix, or some dozens of vectors: for 335 M
    elements and 391 parameters that is about 20 a pass, of which there are ten.
    """
    if not num_kernels(lambda: torch.ones(1, device=gpu())):
        pytest.skip("torch's profiler sees no kernels here")
    decayed, others = (
        [nn.Parameter(torch.ones_like(p, device=gpu())) for p in params] for params in bert_large()
    )
    for p in [*decayed, *others]:
        p.grad = torch.ones_like(p)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "adapt": False}]
    optimizer = kind(groups, 0.1, nonfinite="propagate")
    optimizer.step()
    assert 20 < num_kernels(optimizer.step) < len(decayed) + len(others)

    some = on_gpu(parameters())
    loop = kind(some, 0.1, fused=False, nonfinite="propagate")  # the control
    train_there(loop, some, 1)
    assert num_kernels(loop.step) > 5 * len(some)
