"""Workers that drifted apart are told so within one sweep over the model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import DisagreementError
from allstep.exchange import ExchangePolicy, LocalSGD, Stale, Synchronous, attach
from allstep.exchange.optimizer_watch import watch
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.state_sweep import StateSweep, checksum, words_of
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks

Drift = Callable[[nn.Module, torch.optim.Optimizer], None]
Messages = list[tuple[int, str]]


def edits(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 2] += 1e-6


def loads(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


def edits_frozen(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.get_parameter("0.bias").data.neg_()


def swaps(model: nn.Module, _: torch.optim.Optimizer) -> None:
    p = model.get_parameter("2.weight").data
    p.copy_(p.flip(0))


def edits_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("2.weight")]["exp_avg"].zero_()


def follows_its_own_loss(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 1.0, 1.0):
        scheduler.step(loss)


def sets_rate(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] *= 1.5


def steps_twice(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def train(
    size: int,
    drift: Drift | None,
    policy: ExchangePolicy,
    *,
    culprit: int = 1,
    is_read_late: bool | None = None,
    num_steps: int = 8,
) -> Messages:
    """Per rank how many steps it made until it was told, and what."""
    start = mlp()
    start.get_parameter("0.bias").requires_grad_(False)
    xs = torch.randn(num_steps, size, 4, 5)

    def worker(comm: Communicator) -> tuple[int, str]:
        model = copy.deepcopy(start)
        if is_read_late is None:
            optimizer = make_optimizer(model)
            exchange = attach(model, comm, policy, optimizer=optimizer)
        else:
            exchange = OverlappedExchange(model, comm, policy, is_read_late=is_read_late)
            watch(exchange)
            optimizer = make_optimizer(model)
        for step, x in enumerate(xs):
            try:
                model(x[comm.rank]).square().mean().backward()
            except DisagreementError as error:
                return step, str(error)
            if exchange.has_gradients:
                optimizer.step()
            optimizer.zero_grad()
            if step == 3 and drift is not None and comm.rank == culprit:
                drift(model, optimizer)
        return num_steps, ""

    return run_ranks(size, worker, timeout_s=20)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 1e-2}], lr=1e-3)


@pytest.mark.parametrize(
    ("drift", "named"),
    [
        (edits, "values of 2.weight"),
        (loads, "values of 0.weight"),
        (edits_frozen, "values of 0.bias"),
        (swaps, "values of 2.weight"),
        (edits_moments, "values of 2.weight"),
        (follows_its_own_loss, "AdamW's lr in group 1` is 0.01 on rank 0; 0.0025 on rank 1"),
        (sets_rate, "AdamW's lr in group 1` is 0.01 on rank 0; 0.015 on rank 1"),
        (steps_twice, "updates since the last exchange` is 1 on rank 0; 2 on rank 1"),
    ],
)
@pytest.mark.parametrize("is_read_late", [False, True])
def test_a_drift_is_named_on_all_workers(drift: Drift, named: str, is_read_late: bool) -> None:
    """A rate is compared once a step has been made with it, one of two groups in each exchange."""
    policy = Synchronous(bucket_bytes=64)
    (steps, *_), *_ = found = train(2, drift, policy, is_read_late=is_read_late)
    assert [step for step, _ in found] == [steps] * 2
    assert steps <= 6 + is_read_late
    for _, message in found:
        assert message.startswith("Workers that exchange gradients")
        assert named in message


def test_other_optimizers_or_gradients_on_some_workers_are_named() -> None:
    """The class of an optimizer, and a gradient that is changed after its exchange."""
    start = mlp()

    def worker(comm: Communicator, *, has_other_class: bool) -> str:
        model = copy.deepcopy(start)
        attach(model, comm)
        kind = torch.optim.Adam if has_other_class and comm.rank else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        with pytest.raises(DisagreementError) as caught:
            for _ in range(2):
                model(torch.ones(4, 5)).sum().backward()
                if comm.rank and not has_other_class:
                    torch.nn.utils.clip_grad_norm_(model.get_parameter("0.bias"), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
        return str(caught.value)

    for message in run_ranks(2, lambda comm: worker(comm, has_other_class=True)):
        assert "`SGD's lr in group 0` is 0.1 on rank 0; missing on rank 1" in message
    for message in run_ranks(2, lambda comm: worker(comm, has_other_class=False)):
        assert "`values of 0.bias` is checksum" in message
        assert "weight" not in message


@pytest.mark.parametrize(
    "policy",
    [
        Synchronous(compression="fp16"),
        Synchronous(compression="int8"),
        Synchronous(compression="exact"),
        Stale(steps=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_read_late", [False, True])
def test_every_exchange_names_the_tensor_and_the_rank(
    policy: ExchangePolicy, is_read_late: bool
) -> None:
    found = train(3, edits, policy, culprit=2, is_read_late=is_read_late)
    is_late = is_read_late and policy.wire_format.name != "exact"  # which looks in each exchange
    assert {step for step, _ in found} == {4 + policy.staleness + is_late}
    for _, message in found:
        assert "`values of 2.weight` is checksum" in message
        assert "on ranks 0, 1; checksum" in message
        assert "on rank 2." in message


def test_the_plain_exchange_names_them_too() -> None:
    found = train(2, edits, Synchronous(plain=True))
    assert [step for step, _ in found] == [4] * 2
    assert all("`values of 2.weight` is checksum" in message for _, message in found)


@pytest.mark.parametrize(
    "policy",
    [
        Synchronous(plain=True),
        Synchronous(compression="powersgd"),
        Stale(steps=1),
        LocalSGD(sync_every=3, local_after_step=2),
    ],
    ids=str,
)
def test_workers_that_are_alike_are_left_alone(policy: ExchangePolicy) -> None:
    assert train(2, None, policy) == [(8, "")] * 2


def test_a_sweep_takes_each_element_once() -> None:
    """One wrong bit anywhere is found by one part, at the place where it lies."""
    big = torch.zeros(70_000, dtype=torch.float32)
    small = [torch.zeros(3, dtype=torch.float16) for _ in range(40)]
    tensors = {"big": big, "empty": torch.zeros(0), **{f"small{i}": t for i, t in enumerate(small)}}
    sweep, device = StateSweep(), torch.device("cpu")
    sweep.set_tensors(tensors)
    num_parts = 11  # nine with big, which end with 15 small ones, then 16 and 9
    before = [sweep.next_part(k, device) for k in range(num_parts)]
    assert sum(sum(part.tensors.values()) for part in before) == 70_000 + 120
    assert sweep.next_part(num_parts, device).tensors == before[0].tensors
    for name, tensor, index in (("big", big, 0), ("big", big, 69_999), ("small39", small[39], 2)):
        tensor[index] = -0.0
        after = [sweep.next_part(k, device) for k in range(num_parts)]
        changed = {
            now[0]
            for old, new in zip(before, after, strict=True)
            for was, now in zip(old.entries(), new.entries(), strict=True)
            if was != now
        }
        assert changed == {f"values of {name}"}
        tensor[index] = 0.0


def reverse(words: Tensor) -> Tensor:
    return words.flip(0)


def double(words: Tensor) -> Tensor:
    return words_of(2 * words.view(torch.float32))


@pytest.mark.parametrize("change", [reverse, double, torch.neg])
def test_a_checksum_depends_on_values_and_places(change: Callable[[Tensor], Tensor]) -> None:
    """A plain sum of words is the same for a reversed tensor, and for many doubled ones."""
    words = words_of(torch.randn(4096, dtype=torch.float32))
    assert checksum(words) != checksum(change(words))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_words_of_every_dtype_and_memory_order(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(dtype)
    lying = tensor.to(memory_format=torch.channels_last)
    assert words_of(lying).data_ptr() == lying.data_ptr()
    assert torch.equal(words_of(lying), words_of(tensor.permute(0, 2, 3, 1).contiguous()))
    if dtype.is_complex:
        assert torch.equal(words_of(tensor.conj()), words_of(tensor.conj().clone()))
    gaps = torch.zeros(2, 8).to(dtype)[:, ::2]
    assert len(words_of(gaps)) == len(words_of(torch.zeros(8).to(dtype)))
