"""Experts with copies: more workers than experts train the model of one."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep.comm import Communicator, DividedModules
from allstep.errors import UsageError
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks
from tests.nn.test_mixture_of_experts import (
    EXACT,
    StopError,
    clip_over_all,
    gradients,
    largest_difference,
    make_layer,
    merged,
    run,  # noqa: F401
    train_on,
    values,
)

PLAIN = allstep.Synchronous(plain=True)
Run = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {"copies": 2}),
        pytest.param(3, {"copies": 3}, marks=pytest.mark.slow),
        pytest.param(6, {"copies": 3, "num_experts": 2}, marks=pytest.mark.slow),
        (4, {"copies": 2, "policy": PLAIN}),
        pytest.param(4, {"copies": 2, "weigh": True}, marks=pytest.mark.slow),
        (4, {"copies": 2, "weigh": True, "policy": EXACT}),
        (4, {"copies": 2, "shares": [1, 4, 1, 2]}),
        pytest.param(4, {"copies": 2, "num_passes": 2}, marks=pytest.mark.slow),
        (4, {"copies": 2, "clip": clip_over_all}),
        (4, {"copies": 2, "kind": partial(allstep.optim.LAMB, lr=0.05)}),
    ],
    ids=[
        *("2 x 2", "3 x 1", "3 x 2", "plain", "weights", "weights, exact", "shares"),
        *("two passes", "clipping", "lamb"),
    ],
)
def test_training_is_that_of_one_worker(
    size: int,
    options: dict[str, Any],
    run: Run,  # noqa: F811
) -> None:
    """Workers have different numbers of micro-batches, and in short steps some have none."""
    one = run(1, **{name: x for name, x in options.items() if name not in ("shares", "copies")})
    assert largest_difference(one, run(size, **options)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("policy", [allstep.Synchronous(), EXACT], ids=["float", "exact"])
def test_twenty_one_steps_of_eight_workers(policy: allstep.Synchronous, run: Run) -> None:  # noqa: F811
    options = {"num_experts": 4, "num_epochs": 7, "policy": policy, "weigh": True}
    one = run(1, **options)
    assert largest_difference(one, run(8, copies=2, **options)) < 1e-10
    assert largest_difference(one, run(8, copies=4, **options)) < 1e-10


@pytest.mark.slow
def test_exact_sums_have_the_same_bits(thread_generators: Any) -> None:  # noqa: F811
    """In float32, on any number of workers and copies; float sums have others."""

    def train(comm: Communicator, copies: int, policy: allstep.Synchronous) -> dict[str, Tensor]:
        layer = make_layer(comm, num_experts=2, top_k=2, copies=copies).float()
        exchange = allstep.attach(layer, comm, policy)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        x, y = values(36, 3, 4, seed=1).float(), values(36, 3, 4, seed=2).float()
        data = torch.utils.data.TensorDataset(x, y)
        with allstep.data.loader(data, comm, global_batch=12, micro_batch=2) as loader:
            while loader.epoch < 3:
                for batch in allstep.steps(loader, exchange):
                    for x, y in batch:
                        batch.backward((layer(x)[0] - y).square().mean())
                    if batch.step == 5:  # leaves the grid
                        for p in layer.parameters():
                            p.data *= 1000
                    optimizer.step()
                    optimizer.zero_grad()
        assert policy is not EXACT or comm.size == 1 or exchange.stats().num_completed > 0
        exchange.detach()
        return {name: p.detach() for name, p in layer.named_parameters()}

    def bits(policy: allstep.Synchronous) -> list[float]:
        (one,) = run_ranks(1, lambda comm: train(comm, 1, policy))
        layouts = [(2, 1), (2, 2), (4, 2), (6, 3), (4, 4)]
        found = [merged(run_ranks(n, lambda comm: train(comm, c, policy))) for n, c in layouts]  # noqa: B023
        return [largest_difference(one, other) for other in found]

    assert bits(EXACT) == [0.0] * 5
    assert min(bits(allstep.Synchronous())) > 0


def test_a_control_that_leaves_copies_to_themselves() -> None:
    def step(comm: Communicator, *, sums: bool = True) -> dict[str, Tensor]:
        layer = make_layer(comm, copies=min(2, comm.size))
        if not sums:
            own = layer.experts
            layer.experts = DividedModules(own.comm, own.names, workers=comm)
            layer.experts.update(own.items())
        exchange = allstep.attach(layer, comm)
        for i in range(4)[comm.rank :: comm.size]:
            (layer(values(10, 4, seed=i))[0].square().sum() * comm.size / 4).backward()
        exchange.detach()
        return gradients(layer)

    (one,), four = run_ranks(1, step), run_ranks(4, step)
    assert largest_difference(one, merged(four)) < 1e-10
    apart = run_ranks(4, lambda comm: step(comm, sums=False))
    with pytest.raises(AssertionError, match="experts"):
        merged(apart)


@pytest.mark.parametrize("policy", [allstep.Synchronous(), PLAIN])
@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_loop_without_steps_takes_the_mean(
    policy: allstep.Synchronous, sets_to_none: bool
) -> None:
    """What an earlier pass has left counts once, and what was dropped never."""

    def step(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, top_k=2, copies=2 if comm.size > 1 else 1)
        exchange = allstep.attach(layer, comm, policy)
        num_parts = 4 // comm.size

        def backward(number: int) -> None:
            for i in range(comm.rank * num_parts, (comm.rank + 1) * num_parts):
                y, balance = layer(values(10, 4, seed=4 * number + i))
                (((y - 1).square().mean() + balance) / num_parts).backward()

        for number in range(2):  # the second adds to what the first has left
            backward(number)
        with exchange.no_sync():
            backward(2)
        backward(3)
        found = {f"{name}, added": g.clone() for name, g in gradients(layer).items()}
        with exchange.no_sync():
            backward(4)
        layer.zero_grad(sets_to_none)
        backward(5)
        exchange.detach()
        return found | gradients(layer)

    one, *_ = run_ranks(1, step)
    assert largest_difference(one, merged(run_ranks(4, step))) < 1e-10


def test_an_expert_that_no_token_chooses_has_no_gradient() -> None:
    """And keeps what it had; one that only another copy's tokens choose has theirs."""

    def step(comm: Communicator) -> dict[str, Tensor | None]:
        layer = make_layer(comm, num_experts=4, copies=2 if comm.size > 1 else 1)
        with torch.no_grad():
            layer.router.weight.copy_(10 * torch.eye(4))
        exchange = allstep.attach(layer, comm)
        for p in layer.experts["1"].parameters() if "1" in layer.experts else ():
            p.grad = torch.full_like(p, 7.0)
        tokens = torch.eye(4)[[0, 0, 0, 2]].double().split(4 // comm.size)
        layer(tokens[comm.rank])[0].sum().backward()
        exchange.detach()
        return {name: p.grad for name, p in layer.experts.named_parameters()}

    def all_of(found: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
        return {name: g for own in found for name, g in own.items()}

    one, four = all_of(run_ranks(1, step)), run_ranks(4, step)
    for own in (all_of(four[:2]), all_of(four[2:])):
        assert own.keys() == one.keys()
        for name, g in own.items():
            expected = one[name]
            assert (g is None) == (expected is None) == (name[0] == "3"), name
            if g is not None and expected is not None:
                torch.testing.assert_close(g, expected if name[0] == "1" else expected / 4)


def train_frozen(comm: Communicator, ranks: set[int]) -> dict[str, Tensor]:
    """Expert 1 is frozen in the second of three steps on workers of these ranks."""
    layer = make_layer(comm, top_k=2, num_experts=4, copies=min(2, comm.size))
    exchange = allstep.attach(layer, comm)
    found = {}
    for number, is_trained in enumerate((True, False, True)):
        if "1" in layer.experts and comm.rank in ranks:
            layer.experts["1"].requires_grad_(is_trained)
        layer.zero_grad()
        for i in range(4)[comm.rank :: comm.size]:
            x = values(20, 4, seed=4 * number + i)
            (layer(x)[0].square().sum() * comm.size / 4).backward()
        found |= {f"{name} {number}": g.clone() for name, g in gradients(layer).items()}
    exchange.detach()
    return found


def test_an_expert_that_is_frozen_and_thawed() -> None:
    one, *_ = run_ranks(1, lambda comm: train_frozen(comm, {0}))
    four = run_ranks(4, lambda comm: train_frozen(comm, {0, 2}))
    assert largest_difference(one, merged(four)) < 1e-10
    norms = [float(one[f"experts.1.0.weight {number}"].norm()) for number in range(3)]
    assert norms[0] > 0 and norms[1] == 0 and norms[2] > 0
    with pytest.raises(UsageError, match=r"`experts\.1\.0\.weight` is frozen on some of the 2 "):
        run_ranks(4, lambda comm: train_frozen(comm, {0}))


@pytest.mark.parametrize("policy", [allstep.Synchronous(), PLAIN])
def test_only_experts_are_trained_in_a_loop_without_steps(policy: allstep.Synchronous) -> None:
    """No parameter of the rest asks for the exchange; some workers' experts see no token."""

    def step(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, num_experts=4, copies=min(2, comm.size))
        layer.router.requires_grad_(False)
        exchange = allstep.attach(layer, comm, policy)
        for number in range(2):
            for i in range(4)[comm.rank :: comm.size]:
                x = values(2, 4, seed=4 * number + i).requires_grad_()
                (layer(x)[0].square().sum() * comm.size / 4).backward()
        exchange.detach()
        return gradients(layer)

    (one,) = run_ranks(1, step)
    assert largest_difference(one, merged(run_ranks(4, step))) < 1e-10


def test_buffers_of_copies() -> None:
    """Each is of its own data until they are made the first copy's, as other buffers."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, dtype=torch.float64)
            self.register_buffer("num_tokens", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.num_tokens += len(x)
            return super().forward(x)

    def step(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layer = make_layer(comm, expert=Counting, num_experts=2, copies=2)
        exchange = allstep.attach(layer, comm)
        layer(values(7 + comm.rank // 2, 4, seed=1))[0].sum().backward()
        own = {n: x.clone() for n, x in layer.state_dict().items()}
        exchange.sync_buffers()
        return own, layer.state_dict()

    found = run_ranks(4, step)
    with pytest.raises(AssertionError, match="num_tokens"):
        merged([own for own, _ in found])
    merged([synced for _, synced in found])


def test_copies_begin_with_the_same_values() -> None:
    def attach(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, num_experts=2, copies=2)
        with torch.no_grad():
            for p in layer.parameters():
                p += comm.rank
        allstep.attach(layer, comm).detach()
        return dict(layer.named_parameters())

    merged(run_ranks(4, attach))


@pytest.mark.slow
def test_a_run_goes_on_with_other_copies(
    tmp_path: Path,
    thread_generators: Any,  # noqa: F811
) -> None:
    (straight,) = run_ranks(1, lambda comm: train_on(comm, tmp_path / "straight"))
    with pytest.raises(StopError):
        run_ranks(4, lambda comm: train_on(comm, tmp_path / "run", 4, copies=2))
    for size, copies in ((1, 1), (4, 2), (3, 3), (2, 1)):
        folder = tmp_path / f"on {size}"
        shutil.copytree(tmp_path / "run", folder)
        found = run_ranks(size, lambda comm: train_on(comm, folder, copies=copies))  # noqa: B023
        assert largest_difference(merged(found), straight) < 1e-10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"copies": 3}, r"`copies` \(=3\) must divide the number of workers, 4"),
        ({"copies": 0}, r"`copies` \(=0\) must be an int of at least 1"),
        (
            {"copies": 2, "num_experts": 7},
            r"`num_experts` \(=7\) must be a multiple of the 2 workers of a copy; nearest: 6, 8\."
            r" Or take `copies=4`",
        ),
        ({"num_experts": 6}, r"of the 4 workers; nearest: 4, 8\. Or take `copies=2`"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_ranks(4, lambda comm: make_layer(comm, **options))


def test_layers_of_a_model_have_as_many_copies() -> None:
    def attach(comm: Communicator) -> None:
        model = nn.ModuleList(make_layer(comm, copies=copies) for copies in (1, 2))
        allstep.attach(model, comm)

    with pytest.raises(UsageError, match=r"over 4 workers, and `model\.1.experts` over 2: give"):
        run_ranks(4, attach)
