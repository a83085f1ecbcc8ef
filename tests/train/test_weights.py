"""Losses that are sums over tokens, divided once by the weights of the whole global batch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.exchange import ExchangePolicy
from allstep.exchange.weighing import Weighing
from allstep.train.batch import Batch
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.ranks import run_ranks

LENGTH, FEATURES, CLASSES = 7, 5, 3
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 36, 16, 2  # the last global batch has 2 micro-batches
MOMENTUM = 0.1
TOLERANCE = 1e-10


def padded_samples(dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Sequences of 0 to 7 frames, each frame with a class to be told."""
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, LENGTH, FEATURES, generator=drawn, dtype=dtype)
    y = torch.randint(CLASSES, (NUM_SAMPLES, LENGTH), generator=drawn)
    lengths = torch.randint(0, LENGTH + 1, (NUM_SAMPLES,), generator=drawn)
    return TensorDataset(x, y, lengths)


def make_model(dtype: torch.dtype = torch.float64, batch_norm: bool = True) -> nn.Sequential:
    first = nn.BatchNorm1d(FEATURES, momentum=MOMENTUM) if batch_norm else nn.Identity()
    model = nn.Sequential(first, nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model = model.to(dtype)
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=drawn, dtype=dtype))
    return model


def loss_sum(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """Over all frames, and how many there are."""
    x, y, lengths = data
    is_frame = torch.arange(LENGTH) < lengths[:, None]
    logits = model(x.flatten(0, 1)).unflatten(0, y.shape)
    return F.cross_entropy(logits[is_frame], y[is_frame], reduction="sum"), int(lengths.sum())


def backward_sums(batch: Batch, model: nn.Module, data: Any) -> None:
    total, weight = loss_sum(model, data)
    batch.backward(total, weight=weight)


def backward_means(batch: Batch, model: nn.Module, data: Any) -> None:
    total, weight = loss_sum(model, data)
    batch.backward(total / max(weight, 1))


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def make_loader(comm: Communicator, samples: TensorDataset, **options: Any) -> Any:
    options = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": 2} | options
    return allstep.data.loader(samples, comm, **options)


def train(
    comm: Communicator,
    policy: ExchangePolicy | None = None,
    *,
    backward: Callable[..., None] = backward_sums,
    dtype: torch.dtype = torch.float64,
    batch_norm: bool = True,
    losses: list[float] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Two epochs; the model's state."""
    model = make_model(dtype, batch_norm)
    optimizer = optimizer_of(model)
    exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
    loader = make_loader(comm, padded_samples(dtype), **options)
    for _ in range(2):
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                backward(batch, model, data)
            if losses is not None:
                losses.append(batch.global_loss())
            if exchange.has_gradients:
                optimizer.step()
            optimizer.zero_grad()
    for _ in exchange.flush():
        optimizer.step()
        optimizer.zero_grad()
    exchange.sync_buffers()
    exchange.detach()
    return model.state_dict()


def train_whole(staleness: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle: torch alone; all sums of a global batch are added up and divided once."""
    model = make_model(batch_norm=staleness == 0)
    optimizer = optimizer_of(model)
    loader = make_loader(Communicator.single_process(), padded_samples())
    gradients, losses = [], []
    for _ in range(2):
        for batch in loader.global_batches():
            sums, counts, statistics = [], [], []
            before = copy.deepcopy(model[0].state_dict())
            for micro in batch.micro_batches:
                total, count = loss_sum(model, micro.data)
                sums.append(total)
                counts.append(count)
                frames = micro.data[0].flatten(0, 1)
                statistics.append((frames.mean(0), frames.var(0)))
            mean = sum(sums) / sum(counts)
            losses.append(float(mean.detach()))
            gradients.append(torch.autograd.grad(mean, list(model.parameters())))
            if len(gradients) > staleness:
                apply(model, optimizer, gradients[-1 - staleness])
            if before:
                pairs = list(zip(counts, statistics, strict=True))
                for k, name in enumerate(("running_mean", "running_var")):
                    new = sum(n * s[k] for n, s in pairs) / sum(counts)
                    before[name] = (1 - MOMENTUM) * before[name] + MOMENTUM * new
                before["num_batches_tracked"] += 1
                model[0].load_state_dict(
                    before | {n: p.detach() for n, p in model[0].named_parameters()}
                )
    for late in gradients[len(gradients) - staleness :]:
        apply(model, optimizer, late)
    return model.state_dict(), losses


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Any) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("size", range(1, 7))
def test_sums_over_tokens_are_the_same_on_any_number_of_workers(size: int) -> None:
    """With accumulation, workers without a micro-batch, and micro-batches of unequal weight."""
    whole, whole_losses = train_whole()

    def run(comm: Communicator) -> tuple[dict[str, Tensor], list[float]]:
        losses: list[float] = []
        return train(comm, losses=losses), losses

    for state, losses in run_ranks(size, run):
        assert state_difference(state, whole) < TOLERANCE
        assert losses == pytest.approx(whole_losses, abs=TOLERANCE)
    if size > 2:
        return
    for state in run_ranks(size, lambda comm: train(comm, backward=backward_means)):
        assert state_difference(state, whole) > 1e-3  # the mean of means is another model


@pytest.mark.parametrize(
    "policy",
    [
        allstep.Synchronous(plain=True),
        allstep.Synchronous(overlap=False),
        allstep.Synchronous(bucket_bytes=64),
        allstep.Synchronous(algorithm="ring"),
        allstep.Synchronous(reduction="sum"),
        allstep.LocalSGD(sync_every=2, local_after_step=100),
        allstep.Stale(steps=2),
    ],
    ids=["plain", "no overlap", "many buckets", "ring", "sum", "local sgd at first", "stale"],
)
def test_weights_mean_the_same_with_each_way_to_exchange(policy: ExchangePolicy) -> None:
    whole, _ = train_whole(policy.staleness)
    has_norm = policy.staleness == 0
    for size in (3,):
        for state in run_ranks(size, lambda comm: train(comm, policy, batch_norm=has_norm)):
            assert state_difference(state, whole) < TOLERANCE


def test_exact_sums_with_weights_have_the_same_bits_on_any_number_of_workers() -> None:
    """In float32, fractional weights among them; the usual sums differ."""

    def uneven(batch: Batch, model: nn.Module, data: Any) -> None:
        total, weight = loss_sum(model, data)
        batch.backward(0.1 * total, weight=0.1 * weight)

    def run(size: int, compression: str) -> list[dict[str, Tensor]]:
        policy = allstep.Synchronous(compression=compression)
        return run_ranks(
            size, lambda comm: train(comm, policy, backward=uneven, dtype=torch.float32)
        )

    (alone,) = run(1, "exact")
    for size in (2, 3, 5):
        for state in run(size, "exact"):
            assert not differing_names(state, alone), size
    (rounded,) = run(1, "fp32")
    assert any(differing_names(state, rounded) for state in run(3, "fp32"))


@pytest.mark.parametrize("compression", ["bf16", "fp16", "int8", "powersgd", "topk"])
def test_weights_survive_formats_with_few_digits(compression: str) -> None:
    """The total arrives whole: the first gradients are off by the format's rounding only."""
    seen: dict[str, list[Tensor]] = {}

    def first_gradients(comm: Communicator, name: str) -> None:
        model = make_model(torch.float32)
        exchange = allstep.attach(model, comm, allstep.Synchronous(compression=name))
        loader = make_loader(comm, padded_samples(torch.float32))
        batch = next(iter(allstep.steps(loader, exchange)))
        for data in batch:
            backward_sums(batch, model, data)
        if comm.rank == 0:
            weight = exchange.batch.total_weight()
            seen[name] = [torch.as_tensor(weight), *(p.grad for p in model.parameters())]

    for name in ("fp32", compression):
        run_ranks(3, lambda comm, name=name: first_gradients(comm, name))
    weights = [gradients[0] for gradients in seen.values()]
    assert weights[0] == weights[1] > 0
    if compression in ("bf16", "fp16", "int8"):
        for ours, exact in zip(seen[compression][1:], seen["fp32"][1:], strict=True):
            assert (ours - exact).abs().max() < 0.02 * exact.abs().max()


def test_local_sgd_takes_the_worker_s_own_weighted_mean() -> None:
    policy = allstep.LocalSGD(sync_every=1)

    def gradients(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = make_model(batch_norm=False)
        exchange = allstep.attach(model, comm, policy, optimizer=optimizer_of(model))
        batch = next(iter(allstep.steps(make_loader(comm, padded_samples()), exchange)))
        copied, sums = make_model(batch_norm=False), []
        for data in batch:
            backward_sums(batch, model, data)
            sums.append(loss_sum(copied, data))
        mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
        expected = torch.autograd.grad(mean, list(copied.parameters()))
        return [p.grad for p in model.parameters()], list(expected)

    for ours, expected in run_ranks(2, gradients):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_stale_weights_survive_a_checkpoint() -> None:
    """What is in flight is divided by its own weights, on another number of workers too."""
    whole, _ = train_whole(2)

    def run(comm: Communicator, state: Any, num_steps: int | None) -> Any:
        model = make_model(batch_norm=False)
        optimizer = optimizer_of(model)
        exchange = allstep.attach(model, comm, allstep.Stale(steps=2), optimizer=optimizer)
        loader = make_loader(comm, padded_samples())
        if state is not None:
            state = copy.deepcopy(state)  # the ranks are threads
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            exchange.load_state_dict(state["exchange"])
        while loader.epoch < 2:
            for batch in allstep.steps(loader, exchange):
                for data in batch:
                    backward_sums(batch, model, data)
                if exchange.has_gradients:
                    optimizer.step()
                optimizer.zero_grad()
                if loader.step == num_steps:
                    return {
                        "model": copy.deepcopy(model.state_dict()),
                        "optimizer": copy.deepcopy(optimizer.state_dict()),
                        "loader": loader.state_dict(),
                        "exchange": exchange.state_dict(),
                    }
        for _ in exchange.flush():
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    for before, after in ((2, 2), (3, 1)):
        state = run_ranks(before, lambda comm: run(comm, None, 3))[0]
        for final in run_ranks(after, lambda comm, state=state: run(comm, state, None)):
            assert state_difference(final, whole) < TOLERANCE


def test_a_gradient_scaler_scales_sums_too() -> None:
    def run(comm: Communicator, scale: float | None) -> dict[str, Tensor]:
        model = make_model()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        exchange = allstep.attach(model, comm, scaler=scaler)
        for batch in allstep.steps(make_loader(comm, padded_samples()), exchange):
            for data in batch:
                total, weight = loss_sum(model, data)
                batch.backward(scaler.scale(total), weight=weight)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.state_dict()

    (plain,) = run_ranks(1, lambda comm: run(comm, None))
    for state in run_ranks(2, lambda comm: run(comm, 1024.0)):
        assert state_difference(state, plain) < TOLERANCE


def test_the_total_of_the_weights_costs_no_message() -> None:
    """As many calls of the backend with sums as with means."""

    def num_calls(comm: Communicator, backward: Callable[..., None]) -> int:
        num_before = 0
        model = make_model()
        exchange = allstep.attach(model, comm)
        for index, batch in enumerate(allstep.steps(make_loader(comm, padded_samples()), exchange)):
            if index == 1:
                num_before = exchange.stats().sent_bytes
            for data in batch:
                backward(batch, model, data)
            model.zero_grad()
            if index == 1:
                return exchange.stats().sent_bytes - num_before
        raise AssertionError

    with_sums = run_ranks(2, lambda comm: num_calls(comm, backward_sums))
    assert with_sums == run_ranks(2, lambda comm: num_calls(comm, backward_means))


def test_weights_that_are_all_zero_give_no_number() -> None:
    """As torch's mean over nothing; an optimizer's guard then leaves the step out."""

    def run(comm: Communicator) -> tuple[bool, float]:
        model = make_model()
        exchange = allstep.attach(model, comm)
        batch = next(iter(allstep.steps(make_loader(comm, padded_samples()), exchange)))
        for data in batch:
            total, _ = loss_sum(model, data)
            batch.backward(0 * total, weight=0)
        is_nan = all(bool(p.grad.isnan().all()) for p in model.parameters())
        return is_nan, batch.global_loss()

    for is_nan, loss in (*run_ranks(1, run), *run_ranks(3, run)):
        assert is_nan and math.isnan(loss)


# -- bad input ---------------------------------------------------------------------------------


def one_batch(comm: Communicator, backward: Callable[..., None], **options: Any) -> None:
    model = make_model(batch_norm=options.pop("batch_norm", True))
    policy = options.pop("policy", None)
    optimizer = optimizer_of(model)
    exchange = allstep.attach(model, comm, policy, optimizer=optimizer)
    for batch in allstep.steps(make_loader(comm, padded_samples(), **options), exchange):
        for data in batch:
            backward(batch, model, data)
        optimizer.zero_grad(set_to_none=options.get("zeroes", True))


@pytest.mark.parametrize("policy", [None, allstep.Synchronous(plain=True)], ids=["", "plain"])
def test_workers_that_mix_sums_and_means_all_get_the_error(policy: Any) -> None:
    def mixed(batch: Batch, model: nn.Module, data: Any) -> None:
        is_first = batch.micro_batch is not None and batch.micro_batch.index < 4
        (backward_sums if is_first else backward_means)(batch, model, data)

    def run(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            one_batch(comm, mixed, policy=policy)
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert first == second
    assert "`weight=` (rank 0)" in first and "(rank 1)" in first
    with pytest.raises(UsageError, match="for every micro-batch"):  # on one worker too
        one_batch(Communicator.single_process(), mixed, policy=policy)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, 1e-9])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    def backward(batch: Batch, model: nn.Module, data: Any) -> None:
        batch.backward(loss_sum(model, data)[0], weight=weight)

    with pytest.raises(UsageError, match="`weight`"):
        one_batch(Communicator.single_process(), backward)


def test_weights_whose_sum_has_no_room_are_refused() -> None:
    weighing = Weighing()
    for _ in range(63):
        weighing.add(2.0**48)
    assert weighing.total() == 63 * 2.0**48
    with pytest.raises(UsageError, match=r"add up to 2\^54 or more; divide all weights"):
        weighing.add(2.0**48)


def test_two_sums_of_one_micro_batch_are_refused() -> None:
    def backward(batch: Batch, model: nn.Module, data: Any) -> None:
        backward_sums(batch, model, data)
        backward_sums(batch, model, data)

    with pytest.raises(UsageError, match="called twice with `weight`"):
        one_batch(Communicator.single_process(), backward)


def test_weights_with_several_exchanges_are_refused() -> None:
    comm = Communicator.single_process()
    models = [make_model(), make_model()]
    exchanges = [allstep.attach(model, comm) for model in models]
    batch = next(iter(allstep.steps(make_loader(comm, padded_samples()), *exchanges)))
    with pytest.raises(UsageError, match="single exchange"):
        for data in batch:
            backward_sums(batch, models[0], data)


def test_late_totals_are_refused_where_batch_norm_needs_them() -> None:
    with pytest.raises(UsageError, match="Stale"):
        one_batch(Communicator.single_process(), backward_sums, policy=allstep.Stale(steps=1))


def test_a_gradient_from_before_is_refused() -> None:
    comm = Communicator.single_process()
    model = make_model()
    exchange = allstep.attach(model, comm)
    with pytest.raises(UsageError, match="was not zero before global batch 1"):
        for batch in allstep.steps(make_loader(comm, padded_samples()), exchange):
            for data in batch:
                backward_sums(batch, model, data)
