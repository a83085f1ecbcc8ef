"""What buckets that travel during the backward pass add to the contract of all exchanges."""

import copy
import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.comm.algorithms import Native
from allstep.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    PeerLostError,
    UsageError,
)
from allstep.exchange import (
    BucketPlan,
    Exchange,
    ExchangePolicy,
    Stale,
    Synchronous,
    attach,
    make_policy,
)
from allstep.exchange.piggyback import check_size, note_size
from allstep.exchange.reducer import NUM_AT_ONCE, Reducer
from allstep.exchange.tuning import NUM_PROBES, probe_s
from allstep.exchange.wires import WIRES, PowerSGD, TopK
from tests.exchange.measured import Favouring, favouring
from tests.exchange.nets import clone, mlp, shard
from tests.helpers.generators import seed_this_thread
from tests.helpers.ranks import run_ranks

SMALL = Synchronous(algorithm="native", bucket_bytes=64)


class Announced(Native):
    """Says when it is called."""

    def __init__(self, comm: Communicator, called: threading.Event) -> None:
        super().__init__(comm)
        self._called = called

    def reduce_(self, flat: Tensor) -> None:
        self._called.set()
        super().reduce_(flat)


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_sends_the_first_bucket_during_backward(overlap: bool) -> None:
    def worker(comm: Communicator) -> list[bool]:
        model, called = mlp(), threading.Event()
        policy = Synchronous(
            algorithm=lambda comm: Announced(comm, called), bucket_bytes=64, overlap=overlap
        )
        attach(model, comm, policy)
        waits: list[bool] = []
        model[0].weight.register_hook(
            lambda _: waits.append(called.wait(5 if overlap and waits else 0.1))
        )
        for _ in range(3):
            called.clear()
            model(torch.ones(2, 5)).sum().backward()
            model.zero_grad()
        return waits

    # The first pass only records the order.
    for waits in run_ranks(2, worker):
        assert waits[1:] == [overlap, overlap]


def test_buckets_follow_rank_0s_order_of_gradients() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
            self.order = (0, 1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = self.parts[index](x)
            return x

    def worker(comm: Communicator) -> list[list[str]]:
        model = Crossed()
        model.order = (2, 0, 3, 1) if comm.rank == 0 else (0, 1, 2, 3)
        exchange = attach(model, comm, Synchronous(algorithm="native", bucket_bytes=1))
        model(torch.ones(1, 2)).sum().backward()
        return exchange.buckets

    expected = [[f"parts.{index}.weight"] for index in (1, 3, 0, 2)]
    assert run_ranks(2, worker) == [expected, expected]


def test_buckets_hold_one_dtype_and_about_their_bytes() -> None:
    def worker(comm: Communicator) -> list[list[str]]:
        model = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.float32) for _ in range(6))
        model[2].to(torch.bfloat16)
        return attach(model, comm, Synchronous(bucket_bytes=128)).buckets

    buckets = run_ranks(2, worker)[0]
    assert buckets == [
        ["5.weight", "4.weight"],
        ["3.weight", "1.weight"],
        ["2.weight"],
        ["0.weight"],
    ]


def test_automatic_buckets_are_the_same_on_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    def worker(comm: Communicator) -> tuple[list[list[str]], dict[str, Any]]:
        model = mlp()
        exchange = attach(model, comm, Synchronous(bucket_bytes="auto"))
        for _ in range(5):
            model(torch.ones(2, 5)).sum().backward()
        return exchange.buckets, exchange.state_dict()

    with caplog.at_level(logging.INFO, "allstep"):
        found = run_ranks(3, worker)
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1]["is_tuned"]
    (message,) = [r.message for r in caplog.records if r.message.startswith("buckets of")]
    assert f"buckets of {found[0][1]['bucket_bytes'] / 2**20:g} MiB" in message

    def resumed(comm: Communicator) -> dict[str, Any]:
        exchange = attach(mlp(), comm, Synchronous(bucket_bytes="auto"))
        exchange.load_state_dict(found[0][1])
        return exchange.state_dict()

    assert all(state == found[0][1] for state in run_ranks(2, resumed))


def test_auto_bucket_bytes_probes_with_matrices() -> None:
    """PowerSGD sends vectors as they are."""
    policy = Synchronous(algorithm="native", compression=PowerSGD(rank=4))

    def worker(comm: Communicator) -> list[float]:
        reducer, sent = Reducer(comm, policy), []
        for num_bytes in (32 << 10, 1 << 20):
            before = reducer.sent_bytes
            probe_s(reducer, num_bytes, torch.zeros(num_bytes // 8))
            sent.append((reducer.sent_bytes - before) / (NUM_PROBES * NUM_AT_ONCE) / num_bytes)
        reducer.close()
        return sent

    for shares in run_ranks(2, worker):  # a ring of two sends all of it
        assert max(shares) < 0.2


def test_checkpoint_keeps_measured_algorithms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another clock would choose others, whose sums have other last bits."""
    torch.set_default_dtype(torch.float32)

    def gradient(comm: Communicator, exchange: Exchange) -> Tensor:
        exchange.model.zero_grad()
        x = torch.randn(7, 50, generator=torch.Generator().manual_seed(comm.rank))
        exchange.model(x).sin().sum().backward()
        return exchange.model.weight.grad.clone()

    def worker(comm: Communicator) -> tuple[bool, bool]:
        seed_this_thread(0)
        model = nn.Linear(50, 50, bias=False)
        found: list[Tensor] = []
        state: dict[str, Any] = {}
        for favourite, resumes in (("ring", False), ("native", True), ("native", False)):
            exchange = attach(model, comm, Synchronous(algorithm=favouring(favourite)))
            if resumes:
                exchange.load_state_dict(state)
            found.append(gradient(comm, exchange))
            state = exchange.state_dict()
            exchange.detach()
        return torch.equal(found[0], found[1]), torch.equal(found[0], found[2])

    with caplog.at_level(logging.INFO, "allstep"):
        assert run_ranks(4, worker) == [(True, False)] * 4
    told = [r.message for r in caplog.records if r.message.startswith("all-reduce by size")]
    ring, native = (
        "all-reduce by size: "
        + ", ".join(f"{kib:,} KiB {name}" for kib in (4, 64, 256, 1024, 8192))
        for name in ("ring", "native")
    )
    assert told == [ring, native, ring, native]


@pytest.mark.parametrize(
    ("of_64_kib", "of_1_mib", "posts"),
    [("native", "native", True), ("ring", "native", False), ("native", "ring", False)],
)
def test_auto_algorithm_posts_all_buckets_or_none(
    of_64_kib: str, of_1_mib: str, posts: bool
) -> None:
    """It works on several at once, in the order of the calls; so does a thread of ours. Both
    would meet in another order on each worker.
    """
    favourites = {1 << 16: of_64_kib, 1 << 20: of_1_mib}
    algorithms = (lambda comm: Favouring(comm, favourites), "native")
    policies = [Synchronous(algorithm=each, bucket_bytes=1 << 16) for each in algorithms]
    initial = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 1024), nn.Linear(1024, 256))

    def worker(comm: Communicator) -> tuple[bool, Tensor, Tensor]:
        gradients = []
        for policy in policies:
            model = copy.deepcopy(initial)
            exchange = attach(model, comm, policy)
            for step in range(3):
                model.zero_grad()
                model(torch.full((2, 128), comm.rank + step + 1.0)).sin().sum().backward()
            gradients.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
            if policy.algorithm != "native":
                reducer = Reducer(comm, policy)
                parameters = dict(model.named_parameters())
                plan = BucketPlan.of(exchange.buckets, parameters, comm.size)
                reducer.set_layouts(plan.layouts)
                found = reducer.is_left_to_backend
                reducer.close()
            exchange.detach()
        return found, *gradients

    for found, measured, native in run_ranks(3, worker):
        assert found == posts
        torch.testing.assert_close(measured, native, rtol=1e-10, atol=1e-10)


def test_checkpoint_of_one_worker_resumes_on_two() -> None:
    alone = attach(mlp(), Communicator.single_process(), SMALL).state_dict()

    def worker(comm: Communicator) -> int:
        model = mlp()
        exchange = attach(model, comm, SMALL)
        exchange.load_state_dict({**alone, "num_exchanges": 7})
        model(torch.ones(2, 5)).sum().backward()
        return exchange.num_exchanges

    assert run_ranks(2, worker) == [8, 8]


def assert_disagreement(worker: Any, size: int, words: str) -> None:
    """Every rank's worker must end with a DisagreementError."""

    def run(comm: Communicator) -> str:
        with pytest.raises(DisagreementError) as caught:
            worker(comm)
        return str(caught.value)

    for message in run_ranks(size, run, timeout_s=20):
        assert words in message


def test_disagreement_names_a_rank_with_an_extra_no_sync() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, SMALL)
        for step in range(4):
            if comm.rank == 1 and step == 2:
                with exchange.no_sync():
                    model(torch.ones(2, 5)).sum().backward()
            else:
                model(torch.ones(2, 5)).sum().backward()

    assert_disagreement(
        worker,
        3,
        "ranks 0, 2 want: exchange gradients 2, after 0 `no_sync`;"
        " rank 1 wants: exchange gradients 2, after 1 `no_sync`",
    )


def test_disagreement_names_a_rank_that_skips_a_global_batch() -> None:
    samples = TensorDataset(torch.randn(24, 3))

    def worker(comm: Communicator) -> None:
        model = nn.Linear(3, 1)
        exchange = attach(model, comm, SMALL)
        loader = allstep.data.loader(samples, comm, global_batch=6, micro_batch=2)
        for batch in allstep.steps(loader, exchange):
            if comm.rank == 2 and batch.step == 1:
                continue
            for (x,) in batch:
                batch.backward(model(x).square().mean())

    assert_disagreement(worker, 3, "rank 2 wants: exchange gradients 1, of global batch 2")


def test_timeout_names_a_rank_that_stops() -> None:
    def worker(comm: Communicator) -> str:
        model = mlp()
        attach(model, comm, SMALL)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        if comm.rank == 1:
            return "stopped"
        comm.set_timeout(2)  # the other one comes within it on any machine
        with pytest.raises((CollectiveTimeoutError, PeerLostError)) as caught:
            model(torch.ones(2, 5)).sum().backward()
        return str(caught.value)

    messages = run_ranks(3, worker)
    assert messages[1] == "stopped"
    # Who times out first says who is missing, and closes its connections to the others.
    assert "missing: rank 1" in messages[0] + messages[2], messages
    for rank in (0, 2):
        assert "missing: rank 1" in messages[rank] or "closed its connection" in messages[rank]


@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
def test_the_first_exchange_has_a_timeout_of_its_own(algorithm: str) -> None:
    is_over = threading.Event()

    def worker(comm: Communicator) -> str:
        model = mlp()
        attach(model, comm, Synchronous(algorithm=algorithm, first_timeout_s=0.5))
        if comm.rank == 0:
            is_over.wait(30)
            return "did not come"
        with pytest.raises(CollectiveTimeoutError) as caught:
            model(torch.ones(2, 5)).sum().backward()
        is_over.set()
        return str(caught.value)

    assert "missing: rank 0" in run_ranks(2, worker, timeout_s=60)[1]


@pytest.mark.parametrize("algorithm", ["native", "hierarchical", "shared_memory"])
def test_a_timeout_set_later_holds_in_the_exchange_too(algorithm: str) -> None:
    """Also after more exchanges have landed, and in the groups of an algorithm."""
    is_over = threading.Event()

    def worker(comm: Communicator) -> str:
        model = mlp()
        attach(model, comm, Synchronous(algorithm=algorithm, first_timeout_s=30))
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            comm.set_timeout(0.5)
        if comm.rank == 0:
            is_over.wait(20)
            return "did not come"
        with pytest.raises(CollectiveTimeoutError) as caught:
            model(torch.ones(2, 5)).sum().backward()
        is_over.set()
        return str(caught.value)

    message = run_ranks(2, worker, timeout_s=60)[1]
    assert "within 0.5 s" in message and "missing: rank 0" in message


class Stubborn(torch.autograd.Function):
    """Fails in backward when told to."""

    fails = threading.local()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if getattr(Stubborn.fails, "now", False):
            raise ArithmeticError("no")
        return gradient


def test_backward_that_failed_after_sending_fails_on_all_ranks() -> None:
    def worker(comm: Communicator) -> str:
        model = mlp()
        attach(model, comm, SMALL)

        def backward() -> None:
            hidden = Stubborn.apply(model[:2](torch.ones(2, 5)))
            model[2:](hidden).sum().backward()

        backward()
        if comm.rank == 1:
            Stubborn.fails.now = True
            with pytest.raises(ArithmeticError):
                backward()
            Stubborn.fails.now = False
        with pytest.raises((UsageError, DisagreementError)) as caught:
            backward()
        return f"{type(caught.value).__name__} {caught.value}"

    others, failed = run_ranks(2, worker, timeout_s=20)
    assert failed.startswith("UsageError An earlier backward pass ended with an exception")
    assert others.startswith("DisagreementError")
    assert "rank 1 wants: An earlier backward pass" in others


def give_up(model: nn.Sequential) -> None:
    """A backward pass that fails when the last layer's gradients are there."""
    Stubborn.fails.now = True
    with pytest.raises(ArithmeticError):
        model[4:](Stubborn.apply(model[:4](torch.ones(2, 5)))).sum().backward()
    Stubborn.fails.now = False


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("goes_on", ["backward", "synchronize"])
def test_backward_that_failed_before_sending_is_forgotten(goes_on: str, bucket_bytes: int) -> None:
    """It had sent nothing yet, and what comes next reaches fewer parameters, or none."""

    def worker(comm: Communicator) -> None:
        model, x = mlp(), torch.ones(2, 5)
        policy = Synchronous(algorithm="native", bucket_bytes=bucket_bytes)
        exchange = attach(model, comm, policy)
        model(x).sum().backward()
        assert {"4.weight", "2.weight"} <= set(exchange.buckets[0])
        model.zero_grad()
        give_up(model)
        model.zero_grad()
        if goes_on == "backward":
            model[:4](x).sum().backward()
        else:
            exchange.synchronize()
        expected = [goes_on == "backward"] * 4 + [False] * 2
        assert [p.grad is not None for p in model.parameters()] == expected

    run_ranks(2, worker, timeout_s=20)


def test_synchronize_after_a_backward_that_failed_after_sending() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, Synchronous(algorithm="native", bucket_bytes=1))
        model(torch.ones(2, 5)).sum().backward()
        give_up(model)
        with pytest.raises(UsageError, match="An earlier backward pass ended with an exception"):
            exchange.synchronize()

    run_ranks(2, worker, timeout_s=20)


@pytest.mark.parametrize("goes_on", ["backward", "no_sync", "synchronize", "zeroed"])
def test_large_gradients_of_a_backward_that_failed_are_not_added_to(goes_on: str) -> None:
    """They were scaled already, before their bucket was full."""

    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 128), nn.Linear(128, 128))
        exchange = attach(model, comm, Synchronous(algorithm="native"))

        def backward() -> None:
            model[1:](Stubborn.apply(model[:1](torch.ones(2, 2)))).sum().backward()

        for _ in range(2):
            model.zero_grad()
            backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        Stubborn.fails.now = True
        with pytest.raises(ArithmeticError):
            backward()
        Stubborn.fails.now = False
        assert torch.equal(2 * model[2].weight.grad, expected[4])  # a control: it is scaled
        if goes_on == "zeroed":
            model.zero_grad()
            backward()
            assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
            return
        if goes_on == "no_sync":
            with exchange.no_sync():
                backward()
        with pytest.raises(UsageError, match=r"call `optimizer.zero_grad\(\)` before the next"):
            exchange.synchronize() if goes_on == "synchronize" else backward()

    run_ranks(2, worker)


class Twice(nn.Module):
    """One layer in two reentrant segments: its gradient comes in two pieces."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.shared, self.first = nn.Linear(size, size), nn.Linear(size, size)
        self.is_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.is_reentrant:
                x = checkpoint(self.shared, x, use_reentrant=True)
            else:
                x = self.shared(x)
        return x


def double_in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def double_anew(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 2


@pytest.mark.parametrize("double", [double_in_place, double_anew])
@pytest.mark.parametrize(("width", "bucket_bytes"), [(8, 1), (8, 8 << 20), (160, 1)])
def test_hooks_of_after_attach_change_what_is_sent(
    double: Callable[[Tensor], None], width: int, bucket_bytes: int
) -> None:
    """As those of before `attach` do; the widest layer's gradient is scaled in place."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2, 3, width, generator=generator, dtype=torch.float64)

    def worker(comm: Communicator, policy: Synchronous | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p) * (number + 1))
        if policy is not None:
            attach(model, comm, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / width)
        for step in range(6):
            if step == 2:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(double)
            x = inputs[comm.rank] if policy is not None else inputs.flatten(0, 1)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    whole = worker(Communicator.single_process(), None)
    for found in run_ranks(2, lambda comm: worker(comm, Synchronous(bucket_bytes=bucket_bytes))):
        for p, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


def test_reentrant_checkpointing_sends_whole_gradients() -> None:
    def gradient(model: Twice) -> Tensor:
        model.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        assert model.shared.weight.grad is not None
        return model.shared.weight.grad.clone()

    def worker(comm: Communicator) -> None:
        model = Twice()
        attach(model, comm, SMALL)
        for _ in range(3):
            found = gradient(model)
        other = Twice()
        other.load_state_dict(model.state_dict())
        other.is_reentrant = False
        torch.testing.assert_close(found, gradient(other))

    run_ranks(2, worker)


def test_checkpoint_keeps_reentrant_checkpointing() -> None:
    """Also if they come so on another worker than the one that wrote the checkpoint."""

    def gradient(model: Twice) -> Tensor:
        model.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        return model.shared.weight.grad.clone()

    def worker(comm: Communicator) -> dict[str, Any]:
        model = Twice()
        model.is_reentrant = comm.rank == 1
        exchange = attach(model, comm, SMALL)
        expected = gradient(model)
        state = comm.broadcast_object(exchange.state_dict(), root=0)
        exchange.detach()
        exchange = attach(model, comm, SMALL)
        exchange.load_state_dict(state)
        for _ in range(2):
            torch.testing.assert_close(gradient(model), expected)
        return state

    assert run_ranks(2, worker)[0]["comes_twice"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_second_gradient_before_its_bucket_is_sent(set_to_none: bool) -> None:

    def worker(comm: Communicator) -> None:
        model = Twice()
        exchange = attach(model, comm, Synchronous(algorithm="native", bucket_bytes=120))

        def gradients(is_reentrant: bool) -> list[Tensor]:
            model.is_reentrant = is_reentrant
            model.zero_grad(set_to_none=set_to_none)
            model(torch.full((2, 3), comm.rank + 1.0)).square().sum().backward()
            return [p.grad.clone() for p in model.parameters()]

        gradients(is_reentrant=False)  # its order makes the buckets
        assert exchange.buckets[0] == ["shared.bias", "shared.weight", "first.bias"]
        torch.testing.assert_close(gradients(is_reentrant=True), gradients(is_reentrant=False))

    run_ranks(2, worker)


@pytest.mark.parametrize(("size", "bucket_bytes"), [(3, 1), (128, 1 << 20)])
def test_second_gradient_after_the_first_was_scaled_is_an_error(
    size: int, bucket_bytes: int
) -> None:
    """Because its bucket was sent, or because it is a large one."""

    def worker(comm: Communicator) -> None:
        model = Twice(size)
        model.is_reentrant = False
        attach(model, comm, Synchronous(algorithm="native", bucket_bytes=bucket_bytes))
        model(torch.ones(2, size)).sum().backward()
        model.zero_grad()
        model.is_reentrant = True
        with pytest.raises(UsageError, match=r"second gradient.*`Synchronous\(overlap=False\)`"):
            model(torch.ones(2, size)).sum().backward()

    run_ranks(2, worker)


def test_a_changed_dtype_is_an_error_on_all_ranks() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        attach(model, comm, SMALL)
        model(torch.ones(2, 5)).sum().backward()
        model.zero_grad()
        if comm.rank == 0:
            model.float()
        with pytest.raises(
            (UsageError, DisagreementError), match=r"`\d.\w+` was .*float64 at `att"
        ):
            model(torch.ones(2, 5, dtype=model[0].weight.dtype)).sum().backward()

    run_ranks(2, worker)


BOUNDS = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3, "int8": 3e-2, "exact": 1e-6}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("wire", BOUNDS)
def test_formats_with_mixed_dtypes_and_unused_parameters(wire: str, staleness: int) -> None:
    """Mixed dtypes, an empty parameter, one that some and one that none of the ranks use."""
    scales = torch.randn(4)

    def worker(comm: Communicator, policy: ExchangePolicy) -> list[Tensor | None]:
        seed_this_thread(3)
        parts = [nn.Parameter(torch.ones(shape, dtype=torch.float32)) for shape in (5, 0, 3, 300)]
        parts.append(nn.Parameter(torch.ones(2, 3, dtype=torch.float64)))
        parts.append(nn.Parameter(torch.ones(7, dtype=torch.bfloat16)))
        parts.append(nn.Parameter(torch.ones(2)))
        model = nn.ParameterList(parts)
        exchange = attach(model, comm, policy)
        for _ in range(1 + policy.staleness):
            model.zero_grad()
            used = [p for i, p in enumerate(parts[:-1]) if i != 2 or comm.rank == 1]
            factor = float(scales[comm.rank])
            sum(
                (p.double() * torch.arange(p.numel()).view_as(p)).sum() * factor for p in used
            ).backward()
        assert exchange.has_gradients
        found = [None if p.grad is None else p.grad.clone() for p in parts]
        for _ in exchange.flush():  # else the groups end while a call is under way
            pass
        return found

    plain = Synchronous(plain=True)
    late = make_policy(algorithm="native", compression=wire, bucket_bytes=512, staleness=staleness)
    for size in (2, 3):
        expected = run_ranks(size, lambda comm: worker(comm, plain))[0]
        found = run_ranks(size, lambda comm: worker(comm, late))
        for ours in found:
            assert ours[-1] is None and expected[-1] is None
            for one, other in zip(ours[:-1], expected[:-1], strict=True):
                # Of the workers' own gradients: their mean may be small by chance.
                largest = float(scales[:size].abs().max()) * max(one.numel() - 1, 0)
                tolerance = max(BOUNDS[wire], 1e-2 if one.dtype is torch.bfloat16 else 0) * largest
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
            assert all(torch.equal(a, b) for a, b in zip(ours[:-1], found[0][:-1], strict=True))


@pytest.mark.parametrize("wire", [TopK(fraction=0.2), PowerSGD(rank=1)], ids=["topk", "powersgd"])
def test_residual_of_a_parameter_without_gradient_is_unchanged(wire: Any) -> None:
    def worker(comm: Communicator) -> None:
        model = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
        exchange = attach(model, comm, Synchronous(algorithm="native", compression=wire))
        x = torch.randn(4, 6)
        (model[0](x) + model[1](x)).square().mean().backward()

        before = exchange.unsent()["0.weight"]
        assert before.abs().max() > 0
        model.zero_grad()
        model[1](x).square().mean().backward()
        assert model[0].weight.grad is None
        assert torch.equal(exchange.unsent()["0.weight"], before)

    for seed in range(5):
        run_ranks(2, worker, seed=seed)


def test_a_residual_follows_the_scale_of_the_gradients() -> None:
    """Feedback under a GradScaler whose scale doubles is that without one, times the scale."""
    xs, start = torch.randn(6, 2, 4, 6), nn.Linear(6, 6, bias=False)

    def worker(comm: Communicator, knows: bool, growth: float) -> Tensor:
        model = copy.deepcopy(start)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0, growth_interval=1, growth_factor=growth, backoff_factor=0.5
        )
        policy = Synchronous(algorithm="native", compression=TopK(fraction=0.3))
        attach(model, comm, policy, scaler=scaler if knows else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in xs:
            scaler.scale(model(x[comm.rank]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.weight.detach()

    expected = run_ranks(2, lambda comm: worker(comm, True, 1.0 + 1e-9))[0]
    found = run_ranks(2, lambda comm: worker(comm, True, 2.0))[0]
    naive = run_ranks(2, lambda comm: worker(comm, False, 2.0))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert float((naive - expected).abs().max()) > 1e-4


def test_unknown_and_excluded_arguments_name_the_cure() -> None:
    assert len(WIRES) == 7
    for arguments, words in (
        ({"compression": "fp15"}, "did you mean"),
        ({"staleness": -1}, "`staleness` \\(=-1\\)"),
        ({"sync_every": 0}, "`sync_every` \\(=0\\)"),
        ({"bucket_bytes": 0}, "`bucket_bytes` \\(=0\\)"),
        ({"algorithm": "rings"}, "`algorithm` \\(='rings'\\)"),
        ({"first_timeout_s": 0}, "`first_timeout_s` \\(=0\\)"),
        ({"plain": True, "compression": "fp16"}, "drop `plain`"),
    ):
        with pytest.raises(UsageError, match=words):
            make_policy(**arguments)


def test_stats_sent_bytes_of_the_ring() -> None:
    def worker(comm: Communicator) -> tuple[int, int]:
        model = nn.Linear(100, 10, bias=False)
        exchange = attach(model, comm, Synchronous(algorithm="ring"))
        for _ in range(2):
            model(shard(torch.ones(12, 100), comm)).sum().backward()
        return exchange.stats().sent_bytes, exchange.stats().num_exchanges

    size = 4
    payload_bytes = 8 * (1000 + check_size(size) + note_size(size) + 1 + 1)
    for sent_bytes, num_exchanges in run_ranks(size, worker):
        assert num_exchanges == 2
        assert abs(sent_bytes - 2 * 2 * (size - 1) / size * payload_bytes) <= 8 * 2 * 2 * size


def test_a_dummy_exchange_leaves_every_rank_its_gradient() -> None:
    def worker(comm: Communicator) -> tuple[float, int]:
        model = nn.Linear(1, 1, bias=False)
        exchange = attach(model, comm, Synchronous(algorithm="dummy"))
        model(torch.full((1, 1), comm.rank + 1.0)).sum().backward()
        return model.weight.grad.item() * comm.size, exchange.stats().sent_bytes

    assert run_ranks(2, worker) == [(1.0, 0), (2.0, 0)]


class Counted(Native):
    """Counts its calls."""

    num_calls = 0

    def reduce_(self, flat: Tensor) -> None:
        self.num_calls += 1
        super().reduce_(flat)


def test_a_step_sends_its_buckets_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(comm: Communicator) -> tuple[int, int, int]:
        made: list[Counted] = []

        def make(channel: Communicator) -> Counted:
            made.append(Counted(channel))
            return made[0]

        model = mlp()
        exchange = attach(model, comm, Synchronous(algorithm=make, bucket_bytes=64))
        model(torch.ones(2, 5)).sum().backward()
        before, others = made[0].num_calls, 0

        def refuse(*_: Any, **__: Any) -> None:
            nonlocal others
            others += 1

        for verb in ("all_reduce", "all_gather", "all_gather_object", "broadcast"):
            monkeypatch.setattr(comm, verb, refuse)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
        return made[0].num_calls - before, 3 * len(exchange.buckets), others

    for num_calls, num_buckets, others in run_ranks(2, worker):
        assert num_calls == num_buckets > 3
        assert others == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_shared_memory_sums_in_place_if_there_is_room(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate, num_calls = os.posix_fallocate, []

    def refuse_the_second(fd: int, offset: int, length: int) -> None:
        num_calls.append(length)
        if not has_room and len(num_calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse_the_second)
    start = mlp()

    def worker(comm: Communicator) -> tuple[bool, list[Tensor]]:
        model = clone(start, comm)
        attach(model, comm, Synchronous(bucket_bytes=64))
        gradients = []
        for step in range(3):
            model(shard(torch.arange(60.0).view(12, 5) + step, comm)).sum().backward()
            gradients.append(_flat_gradient(model))
            memories = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            are_shared = len(memories) == 1
            model.zero_grad()
        return are_shared, gradients

    with caplog.at_level(logging.WARNING, "allstep"):
        results = run_ranks(3, worker)
    single = run_ranks(1, worker)[0][1]
    for are_shared, gradients in results:
        assert are_shared is has_room
        for gradient, expected in zip(gradients, single, strict=True):
            assert torch.allclose(gradient, expected / 3, rtol=1e-4, atol=1e-5)
    words = {record.message for record in caplog.records}
    assert has_room or words == {
        "gradients are copied to be summed: no 0 MiB of memory to share"
        " ([Errno 28] No space left on device)"
    }


@pytest.mark.parametrize("policy", [Synchronous(), Synchronous(algorithm="native"), Stale(steps=1)])
def test_large_gradients_lie_in_their_buckets_from_the_first_micro_batch_on(
    policy: ExchangePolicy,
) -> None:
    """Else they take memory twice; with staleness what comes is of a step before."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(3, 12, 200, dtype=torch.float64, generator=generator)

    def worker(comm: Communicator) -> tuple[list[set[int]], list[Tensor | None]]:
        model = nn.Linear(200, 100, bias=False).double()
        nn.init.constant_(model.weight, 0.1)
        exchange = attach(model, comm, policy)
        places: list[set[int]] = []
        gradients = []
        for step in samples:
            places.append(set())
            for x, is_last in zip(shard(step, comm).chunk(3), (False, False, True), strict=True):
                with nullcontext() if is_last else exchange.no_sync():
                    model(x).square().sum().backward()
                if model.weight.grad is not None:
                    places[-1].add(model.weight.grad.data_ptr())
            gradients.append(None if model.weight.grad is None else model.weight.grad.clone())
            model.zero_grad()
        return places, gradients

    weight = torch.full((100, 200), 0.1, dtype=torch.float64)
    expected = [2 * (x @ weight.T).T @ x / 2 for x in samples]  # the mean of two workers' sums
    for places, gradients in run_ranks(2, worker):
        assert policy.staleness or [len(found) for found in places] == [1, 1, 1]
        for found, mean in zip(gradients[policy.staleness :], expected, strict=False):
            torch.testing.assert_close(found, mean, rtol=1e-10, atol=1e-10)


def _flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
