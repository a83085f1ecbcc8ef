"""Local SGD equals a simulation of all workers in one process."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.exchange import LocalSGD, Nesterov
from allstep.exchange.local_sgd import ParameterAveraging
from tests.exchange.nets import MakeOptimizer, assert_same, differs, mlp, states
from tests.helpers.ranks import run_ranks

SIZE = 3
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
}


def loss(model: nn.Module, samples: Tensor) -> Tensor:
    return model(samples).square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Tensor,
    before_step: Callable[[int], None] = lambda step: None,
    skipped: tuple[int, ...] = (),
) -> None:
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss(model, batch).backward()
        before_step(step)
        if step not in skipped:
            optimizer.step()


def run(
    start: nn.Module,
    batches: Tensor,
    make_optimizer: MakeOptimizer,
    skipped: dict[int, tuple[int, ...]] | None = None,
    counts: bool = False,
    **rounds: object,
) -> list[dict[str, Tensor]]:
    """The parameters of each worker; worker r trains on batches[:, r]."""

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = make_optimizer(model)
        averaging = ParameterAveraging(model, comm, optimizer, LocalSGD(**rounds))

        def before_step(step: int) -> None:
            if not counts:
                return
            if not averaging.is_local(step):
                comm.all_reduce(tuple(p.grad for p in model.parameters()), "mean")
            averaging.count_batch(was_exchanged=not averaging.is_local(step))

        mine = batches[:, comm.rank]
        train(model, optimizer, mine, before_step, (skipped or {}).get(comm.rank, ()))
        averaging.flush()
        return states(model)

    return run_ranks(batches.shape[1], worker)


def simulate(
    start: nn.Module,
    batches: Tensor,
    make_optimizer: MakeOptimizer,
    *,
    sync_every: int,
    local_after_step: int = 0,
    outer_optimizer: Nesterov | None = None,
    skipped: dict[int, tuple[int, ...]] | None = None,
    average_optimizer_state: bool = False,
) -> dict[str, Tensor]:
    """All workers in one process; torch's SGD is the outer optimizer."""
    models = [copy.deepcopy(start) for _ in range(batches.shape[1])]
    optimizers = [make_optimizer(model) for model in models]
    shared = copy.deepcopy(start)
    outer = outer_optimizer
    together = outer and torch.optim.SGD(
        shared.parameters(), outer.lr, outer.momentum, nesterov=outer.momentum > 0
    )
    for step, batch in enumerate(batches):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, batch[rank]).backward()
        if step < local_after_step:
            for group in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.grad for p in group]).mean(0)
                for p in group:
                    p.grad = mean.clone()
        for rank, optimizer in enumerate(optimizers):
            if step not in (skipped or {}).get(rank, ()):
                optimizer.step()
        is_last = step == len(batches) - 1
        ends_round = (step + 1 - local_after_step) % sync_every == 0 or is_last
        if step < local_after_step or not ends_round:
            if step < local_after_step:
                shared.load_state_dict(models[0].state_dict())
            continue
        for p, group in zip(
            shared.parameters(), zip(*(m.parameters() for m in models), strict=True), strict=True
        ):
            mean = torch.stack([q.detach() for q in group]).mean(0)
            p.grad = p.detach() - mean
            if not together:
                p.data = mean
        if together:
            together.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
        if average_optimizer_state:
            _average_states(models, optimizers)
    return states(shared)


def _average_states(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for group in zip(*(m.parameters() for m in models), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            moments = [o.state[p][key] for o, p in zip(optimizers, group, strict=True)]
            mean = torch.stack(moments).mean(0)
            for moment in moments:
                moment.copy_(mean)


ROUNDS = {
    "every": {"sync_every": 1},
    "four": {"sync_every": 4},
    "post-local": {"sync_every": 3, "local_after_step": 5},
    "diloco": {"sync_every": 4, "outer_optimizer": Nesterov()},
    "post-local-diloco": {
        "sync_every": 4,
        "local_after_step": 3,
        "outer_optimizer": Nesterov(lr=0.5, momentum=0.5),
    },
}


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS.keys())
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_simulation_in_one_process(name: str, rounds: dict) -> None:
    start, batches = mlp(), torch.randn(13, SIZE, 4, 5)
    expected = simulate(start, batches, OPTIMIZERS[name], **rounds)
    for actual in run(start, batches, OPTIMIZERS[name], counts=True, **rounds):
        assert_same(actual, expected)
    if rounds["sync_every"] > 1:
        assert differs(simulate(start, batches, OPTIMIZERS[name], sync_every=1), expected, by=1e-6)


def test_every_step_with_sgd_is_the_mean_gradient() -> None:
    start, batches = mlp(), torch.randn(13, SIZE, 4, 5)
    whole = copy.deepcopy(start)
    train(whole, OPTIMIZERS["sgd"](whole), batches.flatten(1, 2))
    for actual in run(start, batches, OPTIMIZERS["sgd"], sync_every=1):
        assert_same(actual, states(whole))
    for actual in run(start, batches, OPTIMIZERS["sgd"], sync_every=4):
        assert differs(actual, states(whole), by=1e-5)
    for actual in run(start, batches, OPTIMIZERS["adamw"], sync_every=1):
        assert differs(actual, states(whole), by=1e-3)


def test_outer_step_of_rate_one_without_momentum_is_the_mean() -> None:
    start, batches = mlp(), torch.randn(8, SIZE, 4, 5)
    plain = run(start, batches, OPTIMIZERS["adamw"], sync_every=4)
    outer = run(
        start,
        batches,
        OPTIMIZERS["adamw"],
        sync_every=4,
        outer_optimizer=Nesterov(lr=1, momentum=0),
    )
    assert_same(outer[0], plain[0])


def test_without_an_exchange_parameters_are_averaged_until_the_rounds_begin() -> None:
    start, batches = mlp(), torch.randn(10, SIZE, 4, 5)
    rounds = {"sync_every": 3, "local_after_step": 4, "outer_optimizer": Nesterov()}
    expected = simulate(start, batches, OPTIMIZERS["sgd"], **rounds)
    for actual in run(start, batches, OPTIMIZERS["sgd"], **rounds):  # equal for SGD alone
        assert_same(actual, expected)


@pytest.mark.parametrize(
    "skipped", [{1: (3,)}, {0: (4, 7), 2: (3,)}, {1: (0, 1, 2, 3)}, {2: (11,)}]
)
@pytest.mark.parametrize("outer", [None, Nesterov()])
def test_a_worker_may_skip_steps(skipped: dict[int, tuple[int, ...]], outer: Nesterov) -> None:
    """Also the step before an average, all steps of a round, and the last of all."""
    start, batches = mlp(), torch.randn(12, SIZE, 4, 5)
    rounds = {"sync_every": 4, "outer_optimizer": outer, "skipped": skipped}
    expected = simulate(start, batches, OPTIMIZERS["momentum"], **rounds)
    for actual in run(start, batches, OPTIMIZERS["momentum"], counts=True, **rounds):
        assert_same(actual, expected)
    assert differs(
        simulate(start, batches, OPTIMIZERS["momentum"], sync_every=4, outer_optimizer=outer),
        expected,
        by=1e-6,
    )


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


@pytest.mark.parametrize("make", [mlp, ComplexLinear])
def test_moments_by_choice(make: Callable[[], nn.Module]) -> None:
    start, batches = make(), torch.randn(9, SIZE, 4, 5)
    rounds = {"sync_every": 3, "average_optimizer_state": True}
    expected = simulate(start, batches, OPTIMIZERS["adamw"], **rounds)
    for actual in run(start, batches, OPTIMIZERS["adamw"], **rounds):
        assert_same(actual, expected)
    alone = simulate(start, batches, OPTIMIZERS["adamw"], sync_every=3)
    assert differs(alone, expected, by=1e-6)


def test_moments_that_a_worker_does_not_have_yet_stay_local() -> None:
    start, batches = mlp(), torch.randn(2, SIZE, 4, 5)
    rounds = {
        "sync_every": 1,
        "average_optimizer_state": True,
        "skipped": {1: (0,)},
        "counts": True,
    }
    results = run(start, batches, OPTIMIZERS["adamw"], **rounds)
    assert_same(results[1], results[0])


def test_goes_on_after_a_checkpoint() -> None:
    start, batches = mlp(), torch.randn(10, SIZE, 4, 5)
    rounds = {"sync_every": 4, "outer_optimizer": Nesterov()}

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizer = OPTIMIZERS["momentum"](model)
        averaging = ParameterAveraging(model, comm, optimizer, LocalSGD(**rounds))
        train(model, optimizer, batches[:6, comm.rank])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), averaging.state_dict()))
        averaging.detach()
        model = mlp()
        optimizer = OPTIMIZERS["momentum"](model)
        averaging = ParameterAveraging(model, comm, optimizer, LocalSGD(**rounds))
        for thing, state in zip((model, optimizer, averaging), saved, strict=True):
            thing.load_state_dict(state)
        assert not averaging.is_synchronized
        train(model, optimizer, batches[6:, comm.rank])
        averaging.flush()
        assert averaging.is_synchronized
        return states(model)

    expected = simulate(start, batches, OPTIMIZERS["momentum"], **rounds)
    for actual in run_ranks(SIZE, worker):
        assert_same(actual, expected)


def test_low_precision_parameters_keep_small_outer_steps() -> None:
    """The anchor is kept in float32: 1 - 0.001 is 1 in bfloat16, but not after many rounds."""
    outer, p = Nesterov(lr=1e-3, momentum=0), torch.ones(1, dtype=torch.bfloat16)
    model = nn.Module()
    model.weight = nn.Parameter(p)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    policy = LocalSGD(sync_every=1, outer_optimizer=outer)
    averaging = ParameterAveraging(model, Communicator.single_process(), optimizer, policy)
    for _ in range(20):
        model.weight.grad = torch.ones_like(p)
        optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(0.98, abs=4e-3)
    averaging.detach()


def test_detach_leaves_no_hook() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    averaging = ParameterAveraging(
        model, Communicator.single_process(), optimizer, LocalSGD(sync_every=2)
    )
    copied = copy.deepcopy(model)
    averaging.detach()
    train(model, optimizer, torch.randn(3, 4, 5))
    copied(torch.randn(4, 5))
    assert averaging.num_batches == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _made(sync_every=0), r"`sync_every` \(=0\) must be at least 1"),
        (
            lambda: _made(sync_every=1, local_after_step=-1),
            r"`local_after_step` \(=-1\) must be at least 0",
        ),
        (lambda: Nesterov(lr=0), r"`lr` \(=0\) must be above 0 and finite; DiLoCo uses 0.7"),
        (lambda: Nesterov(lr="a"), r"`lr` \(='a'\) must be above 0"),
        (lambda: Nesterov(momentum=None), r"`momentum` \(=None\) must be at least 0"),
        (
            lambda: LocalSGD(sync_every=2, outer_optimizer=0.7),
            r"`outer_optimizer` \(=0.7\) must be None, or an `allstep.Nesterov`",
        ),
        (lambda: Nesterov(momentum=1), r"`momentum` \(=1\) must be at least 0 and below 1"),
    ],
)
def test_wrong_parameters(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def _made(**rounds: int) -> ParameterAveraging:
    model = mlp()
    return ParameterAveraging(
        model, Communicator.single_process(), OPTIMIZERS["sgd"](model), LocalSGD(**rounds)
    )


def test_checkpoint_of_another_model() -> None:
    averaging = _made(sync_every=1, outer_optimizer=Nesterov())
    state = averaging.state_dict() | {"anchors": {"other": torch.ones(2)}}
    with pytest.raises(CheckpointError, match=r"a parameter `other` of shape \[2\], which the"):
        averaging.load_state_dict(state)
