"""A step never makes the host wait for an accelerator, but where that is listed with its reason.

CPU tensors are taken for an accelerator's, as in `test_streams`.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, device
from allstep.nn import AvgPool2d, Grid, LocalContrastNorm, LocallyConnected2d
from allstep.optim import LAMB
from allstep.recipes.classification import Classifier
from allstep.recipes.digits import digits_net
from allstep.train import Evaluator
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks
from tests.helpers.sites import Site
from tests.helpers.streams import StreamsAsNames

POLICIES = {
    "fp32": allstep.Synchronous(bucket_bytes=64),
    "fp16": allstep.Synchronous(bucket_bytes=64, compression="fp16"),
    "int8": allstep.Synchronous(bucket_bytes=64, compression="int8"),
    "stale": allstep.Stale(bucket_bytes=64),
}
SITES_OF_EXACT = Counter(
    {
        "exchange/exact_sums.py ExactSums.settle tolist": 3,
        "exchange/buckets.py BucketSet.complete tolist": 1,
        "exchange/grid.py Grid.follow tolist": 1,
    }
)
Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    # A device's optimizer keeps its count of steps there.
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "LAMB": lambda p: LAMB(p, 0.1, nonfinite="propagate"),
}


def waits_of_steps(
    policy: allstep.exchange.ExchangePolicy, make: Callable[[Parameters], torch.optim.Optimizer]
) -> list[list[list[Site]]]:
    """Of each worker and step, once buckets and states are there."""
    driver = StreamsAsNames()

    def worker(comm: Communicator) -> list[list[Site]]:
        with driver.rank(lints=True) as rank:
            model = mlp()
            optimizer = make(model.parameters())
            exchange = allstep.attach(model, comm, policy)
            found = []
            for _ in range(5):
                rank.waits.clear()
                model(torch.ones(2, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(list(rank.waits))
            exchange.detach()
        return found[3:]

    with device.using_driver(driver):
        return run_ranks(2, worker)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_host_waits_for_nothing_in_a_step(optimizer: str, policy: str) -> None:
    for steps in waits_of_steps(POLICIES[policy], OPTIMIZERS[optimizer]):
        assert steps == [[], []]


def waits_of_exact_sums(comm: Communicator, num_layers: int) -> list[Counter[str]]:
    """Of each global batch of three micro-batches."""
    layers = [nn.Linear(5, 5) for _ in range(num_layers)]
    model = nn.Sequential(*layers).float()
    exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
    samples = TensorDataset(torch.ones(18 * comm.size, 5, dtype=torch.float32))
    loader = allstep.data.loader(samples, comm, global_batch=3 * comm.size, micro_batch=1)
    driver, found = StreamsAsNames(), []
    with device.using_driver(driver), driver.rank(lints=True) as rank:
        for batch in allstep.steps(loader, exchange):
            rank.waits.clear()
            for (x,) in batch:
                batch.backward(model(x).square().mean())
            model.zero_grad()
            found.append(Counter(map(str, rank.waits)))
    return found


def test_host_waits_once_a_micro_batch_for_exact_sums() -> None:
    """And once for the flags, and once to look at sums, whatever the number of parameters."""
    lone = Communicator.single_process()
    first, *later = waits_of_exact_sums(lone, 2)
    assert all(waits == SITES_OF_EXACT for waits in later)
    assert first.total() > SITES_OF_EXACT.total()  # nothing is known of the parameters yet
    assert waits_of_exact_sums(lone, 5)[1:] == later


def test_host_waits_once_for_an_optimizer_that_stops_before_a_bad_gradient() -> None:
    for steps in waits_of_steps(POLICIES["fp32"], lambda p: LAMB(p, 0.1, nonfinite="raise")):
        assert [len(waits) for waits in steps] == [1, 1]
        assert {site.function for waits in steps for site in waits} == {"_nonfinite_norms"}


def test_host_waits_for_nothing_in_layers_of_distributed_arrays() -> None:
    grid = Grid(Communicator.single_process())
    layout = grid.split((6, 6))
    layers = [
        AvgPool2d(grid, layout, 3, 1, 1, count_include_pad=False),
        LocalContrastNorm(grid, layout, 3),
        LocallyConnected2d(grid, layout, 2, 3, 1, (2, 1, 1), seed=0),
    ]
    driver = StreamsAsNames()
    for layer in layers:
        with device.using_driver(driver), driver.rank(lints=True) as rank:
            layer(torch.ones(2, 2, 6, 6, requires_grad=True)).sum().backward()
        assert rank.waits == []


def test_host_waits_for_nothing_in_a_step_of_shards() -> None:
    shards = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    for shard in shards:
        shard.grad = torch.ones_like(shard)
        shard.shard_group = Communicator.single_process()
    optimizer = LAMB(shards, nonfinite="propagate")
    driver = StreamsAsNames()
    with device.using_driver(driver), driver.rank(lints=True) as rank:
        optimizer.step()
        rank.waits.clear()
        optimizer.step()
    assert rank.waits == []


def waits_of_recipe(num_samples: int) -> tuple[list[list[Site]], list[Site]]:
    """Of each step of a loop with `steps`, and of an evaluation, on one worker."""
    driver = StreamsAsNames()
    classifier = Classifier(mean=[5.0], std=[6.0])
    images = torch.randint(0, 16, (num_samples, 1, 8, 8), dtype=torch.uint8)
    samples = TensorDataset(images, torch.randint(0, 10, (num_samples,)))
    comm, found = Communicator.single_process(), []
    with device.using_driver(driver), driver.rank(lints=True) as rank:
        model = digits_net(width=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(samples, comm, global_batch=16, micro_batch=4)
        for batch in allstep.steps(loader, exchange):
            rank.waits.clear()
            for data in batch:
                batch.backward(classifier.loss(model, data))
            batch.local_sums()
            optimizer.step()
            optimizer.zero_grad()
            found.append(list(rank.waits))
        evaluator = Evaluator(classifier.metrics, samples, comm, micro_batch=4)
        rank.waits.clear()
        evaluator(model)
        exchange.detach()
    return found, list(rank.waits)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of the evaluator
def test_host_waits_at_the_end_of_an_evaluation_and_in_no_step_of_a_recipe() -> None:
    few, many = waits_of_recipe(16), waits_of_recipe(40)
    assert [len(steps) for steps, _ in (few, many)] == [1, 3]
    assert not [wait for steps, _ in (few, many) for waits in steps for wait in waits]
    assert Counter(map(str, many[1])) == Counter(map(str, few[1]))  # however long it is


def test_host_waits_are_found() -> None:
    """The control: each way to look at numbers, or to write one, is seen."""
    driver = StreamsAsNames()
    ways: dict[str, Callable[[Tensor], object]] = {
        "_local_scalar_dense": lambda x: x.sum().item(),
        "tolist": lambda x: x.tolist(),
        "cpu": lambda x: x.cpu(),
        "nonzero": lambda x: x.nonzero(),
        "new_tensor": lambda x: x.new_tensor([1.0]),
        "tensor": lambda x: torch.tensor([1.0], device=x.device),
        "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
        "to": lambda x: torch.tensor([1.0]).to(x.device),
        "to of another": lambda x: torch.tensor([1.0]).to(x),
        "copy_ of a scalar": lambda x: x.__setitem__(0, 1.0),
    }
    for name, way in ways.items():
        with device.using_driver(driver), driver.rank(lints=True) as rank:
            x = torch.ones(3)
            x[:1].fill_(2.0)
            torch.tensor([1.0]).to(x.device, non_blocking=True)
            assert not rank.waits
            way(x)
        assert [site.verb for site in rank.waits] == [name.removesuffix(" of another")]
