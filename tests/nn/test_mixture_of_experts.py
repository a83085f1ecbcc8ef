"""Experts on several workers are the layer of one: its gradients, its drops, its training."""

import copy
import itertools
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator, Mesh, Shard, ShardHook
from allstep.errors import DisagreementError, UsageError
from allstep.nn import MixtureOfExperts
from tests.helpers.divided import misfit, save_whole
from tests.helpers.generators import seeded_thread, thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

D, E = 4, 12  # features, and experts: they divide over 1, 2, 3 and 4 workers
SIZES = [2, 3, 4]
EXACT = allstep.Synchronous(compression="exact")
LAYERS = {
    "top 1": {"top_k": 1},
    "top 2": {"top_k": 2},
    "top 1, capacity": {"top_k": 1, "capacity_factor": 1.0},
    "top 2, capacity": {"top_k": 2, "capacity_factor": 1.25},
}


def values(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 5), nn.GELU(), nn.Linear(5, D)).double()


def make_layer(comm: Communicator, **options: Any) -> MixtureOfExperts:
    given: dict[str, Any] = {"num_experts": E, "seed": 5, "seeded": seeded_thread} | options
    return MixtureOfExperts(given.pop("expert", expert), comm, D, **given).double()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a if a[name].numel())


def merged(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What each worker has, in the order of one worker's; what several have is the same."""
    everything: dict[str, Tensor] = {}
    for own in found:
        for name, value in own.items():
            assert torch.equal(everything.setdefault(name, value), value), name
    return everything


# -- the layer, against a loop over its experts --------------------------------------------------


def plain_layer(
    layer: MixtureOfExperts, x: Tensor, *, top_k: int, capacity_factor: float | None = None
) -> tuple[Tensor, Tensor, int]:
    """Token after token, choice after choice; y, balance loss, dropped."""
    p = torch.softmax(x @ layer.router.weight.t(), -1)
    room = [math.inf] * E
    if capacity_factor is not None:
        room = [float(math.ceil(capacity_factor * top_k * len(x) / E))] * E
    y, dropped = [torch.zeros(D, dtype=x.dtype) for _ in x], 0
    chosen = [sorted(range(E), key=lambda i, q=q: -float(q[i]))[:top_k] for q in p.detach()]
    for choice in range(top_k):
        for t in range(len(x)):
            number = chosen[t][choice]
            if not room[number]:
                dropped += 1
                continue
            room[number] -= 1
            total = sum(p[t, i] for i in chosen[t]) if top_k > 1 else 1.0
            y[t] = y[t] + p[t, number] / total * layer.experts[str(number)](x[t])
    balance = sum(
        sum(row.count(i) for row in chosen) / (len(x) * top_k) * p[:, i].mean() for i in range(E)
    )
    return torch.stack(y), E * balance, dropped


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_one_worker_is_a_loop_over_experts(options: dict[str, Any]) -> None:
    def check(comm: Communicator) -> None:
        layer = make_layer(comm, **options)
        found, wanted = [], []
        for take, into in ((layer, found), (lambda x: plain_layer(layer, x, **options), wanted)):
            layer.zero_grad()
            x = values(40, D, seed=1).requires_grad_()
            y, balance, *dropped = take(x)
            (y.square().sum() + 3 * balance).backward()
            into.append({"x": x.grad, "y": y.detach(), "balance": balance, **gradients(layer)})
        assert largest_difference(found[0], wanted[0]) < 1e-12
        assert layer.num_dropped == dropped[0]
        assert (layer.num_dropped > 0) == ("capacity_factor" in options)

    run_ranks(1, check)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_workers_is_one(size: int, options: dict[str, Any]) -> None:
    """Each worker calls the layer on tokens of its own, one worker on all, call after call."""
    num_tokens = [17, 30, 0, 9]  # of a call: one is without any

    def run(comm: Communicator) -> dict[str, Any]:
        layer = make_layer(comm, **options)
        found: dict[str, Any] = {}
        for call in range(4):
            if comm.size > 1 and call % comm.size != comm.rank:
                continue
            x = values(num_tokens[call], 1, D, seed=call).requires_grad_()
            y, balance = layer(x)
            ((y - 1).square().sum() + 3 * balance).backward()
            found |= {f"x {call}": x.grad, f"y {call}": y.detach(), f"loss {call}": balance}
            found[f"dropped {call}"] = torch.tensor(layer.num_dropped)
        if comm.size == 3 and comm.rank > 0:  # the fourth call is rank 0's alone
            layer.serve().backward()
        router = gradients(layer).pop("router.weight")
        comm.all_reduce(router)
        return found | gradients(layer) | {"router.weight": router}

    one, *_ = run_ranks(1, run)
    assert largest_difference(one, merged(run_ranks(size, run))) < 1e-10


def test_equal_probabilities_are_ordered_alike() -> None:
    """Of tokens that are zero, as padding is, and of a router that knows nothing yet."""

    def run(comm: Communicator) -> dict[str, Any]:
        layer = make_layer(comm, top_k=3, capacity_factor=1.5)
        nn.init.zeros_(layer.router.weight)
        y, _ = layer(values(20, D, seed=1))
        y.square().sum().backward()
        return {"y": y.detach(), "dropped": torch.tensor(layer.num_dropped)}

    (one,) = run_ranks(1, run)
    assert one["dropped"] > 0
    for found in run_ranks(3, run):
        assert largest_difference(one, found) < 1e-12


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_sum_is_in_the_order_of_threads(top_k: int) -> None:
    """`index_put` adds what has one place in any order."""
    num_sums = 0

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal num_sums
            if "index_put" in func.__name__ or "index_add" in func.__name__:
                indices = args[1][0] if "index_put" in func.__name__ else args[2]
                assert len(indices.unique()) == indices.numel()
                num_sums += 1
            return func(*args, **(kwargs or {}))

    def check(comm: Communicator) -> None:
        layer = make_layer(comm, top_k=top_k)
        y, balance = layer(values(40, D, seed=1).requires_grad_())
        with Seen():
            (y.square().sum() + balance).backward()

    run_ranks(1, check)
    assert num_sums


def test_compiled_around_it() -> None:
    """What meets other workers runs as it is written."""
    graphs: list[Any] = []

    class Between(nn.Module):
        def __init__(self, comm: Communicator) -> None:
            super().__init__()
            self.moe = MixtureOfExperts(expert, comm, D, E, top_k=2, seed=5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x + 1)[0].tanh()

    def collect(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Between(Communicator.single_process())
    x = values(9, D, seed=0)
    compiled = torch.compile(model, backend=collect)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 2  # before and after the layer


def test_an_expert_is_the_same_wherever_it_is() -> None:
    """The state dicts of the workers are together that of one."""

    def state(comm: Communicator) -> dict[str, Tensor]:
        return make_layer(comm).state_dict()

    one, *_ = run_ranks(1, state)
    for size in SIZES:
        found = run_ranks(size, state)
        assert largest_difference(one, merged(found)) == 0
        assert all(len(own) == 1 + 4 * E // size for own in found)
    assert not torch.equal(one["experts.0.0.weight"], one["experts.1.0.weight"])


# -- what routing counts -------------------------------------------------------------------------


def route_by_first_feature(comm: Communicator, **options: Any) -> MixtureOfExperts:
    """A token with x_0 = i goes to expert i, almost surely."""
    layer = make_layer(comm, expert=nn.Identity, **options)
    numbers = torch.arange(E, dtype=torch.float64)
    with torch.no_grad():  # -(i - x_0)^2 but for what all experts have in common
        layer.router.weight.zero_()
        layer.router.weight[:, 0], layer.router.weight[:, 1] = 200 * numbers, -100 * numbers**2
    return layer


def tokens_for(*experts: int) -> Tensor:
    x = torch.zeros(len(experts), D, dtype=torch.float64)
    x[:, 0], x[:, 1] = torch.tensor(experts), 1
    return x


def test_the_balance_loss_is_its_closed_form() -> None:
    def check(comm: Communicator) -> None:
        layer = route_by_first_feature(comm)
        # f = P = 1/12 each: 12 * 12 / 144; all on one: 12 * 1 * 1; half on each of two: 12 * 2 / 4.
        for x, loss in (
            (tokens_for(*range(E)), 1),
            (tokens_for(3, 3, 3), 12),
            (tokens_for(3, 8), 6),
            (tokens_for(), 0),
        ):
            assert layer(x)[1].item() == pytest.approx(loss, abs=1e-12)
        even = make_layer(comm, top_k=3)
        nn.init.zeros_(even.router.weight)  # P is even, whatever f is
        assert even(values(50, D, seed=0))[1].item() == pytest.approx(1, abs=1e-12)

    run_ranks(1, check)
    run_ranks(2, check)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_drops_are_counted_a_call(size: int) -> None:
    def check(comm: Communicator) -> None:
        layer = route_by_first_feature(comm, capacity_factor=2.0)
        x = tokens_for(7, 7, 7, 1, 7, 2, 7, 11, 7)  # ceil(2 * 9 / 12) = 2 places an expert
        y, _ = layer(x)
        assert layer.num_dropped == 4
        kept = (y != 0).any(1).tolist()
        assert kept == [True, True, False, True, False, True, False, True, False]
        layer(x[:2])  # ceil(2 * 2 / 12) = 1
        assert layer.num_dropped == 1
        layer(tokens_for(1, 2, 3))
        assert layer.num_dropped == 0

    run_ranks(size, check)


def test_first_choices_come_before_second_ones() -> None:
    def check(comm: Communicator) -> None:
        layer = make_layer(comm, expert=nn.Identity, top_k=2, capacity_factor=6.0)
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[0, 0], layer.router.weight[1, 1] = 1, 1
        x = torch.tensor([[2.0, 1, 0, 0], [1, 2, 0, 0]], dtype=torch.float64)
        y, _ = layer(x)  # ceil(6 * 2 * 2 / 12) = 2 places: no drop
        assert layer.num_dropped == 0
        assert torch.allclose(y, x)  # weights add up to 1
        layer.capacity_factor = 3.0  # one place: that of the first choice
        y, _ = layer(x)
        assert layer.num_dropped == 2
        assert torch.allclose(y, x * torch.sigmoid(torch.tensor(1.0, dtype=torch.float64)))

    run_ranks(1, check)


# -- training ------------------------------------------------------------------------------------

GLOBAL_BATCH, MICRO_BATCH, NUM_SAMPLES = 20, 4, 51  # 5 micro-batches; 5; 3, the last one short


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Two layers with dropout in their experts, and a dense one between."""

    def __init__(self, comm: Communicator, num_experts: int = E, copies: int = 1) -> None:
        super().__init__()

        def noisy() -> nn.Module:
            return nn.Sequential(expert(), nn.Dropout(0.3))

        layers = [{"top_k": 2, "capacity_factor": 1.5, "seed": 1}, {"top_k": 1, "seed": 2}]
        self.moe = nn.ModuleList(
            make_layer(comm, expert=noisy, num_experts=num_experts, copies=copies, **options)
            for options in layers
        )
        self.dense = nn.Linear(D, D).double()
        with torch.no_grad():
            for i, p in enumerate(self.dense.parameters()):
                p.copy_(values(*p.shape, seed=50 + i))
        self.num_dropped = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self.moe[0](x)
        y, second = self.moe[1](self.dense(x + y))
        self.num_dropped += self.moe[0].num_dropped
        return y, first + second


def samples() -> TensorDataset:
    return TensorDataset(values(NUM_SAMPLES, 3, D, seed=1), values(NUM_SAMPLES, 3, D, seed=2))


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
    x, target = data
    y, balance = model(x)
    scale = len(x) if reduction == "sum" else 1
    error = (y - target).square().mean((1, 2))
    return (error.sum() if reduction == "sum" else error.mean()) + 0.1 * scale * balance


def train(
    comm: Communicator,
    *,
    policy: allstep.Synchronous | None = None,
    weigh: bool = False,
    spoil: Callable[[nn.Module, Communicator], None] = lambda model, comm: None,
    shares: Any = "equal",
    num_passes: int = 1,
    clip: Callable[[Any], None] = lambda exchange: None,
    num_epochs: int = 2,
    num_experts: int = E,
    copies: int = 1,
    kind: Callable[..., torch.optim.Optimizer] = MOMENTUM,
) -> dict[str, Tensor]:
    """Three steps an epoch; parameters, and how often an expert had no room."""
    model = Net(comm, num_experts, copies)
    exchange = allstep.attach(model, comm, policy)
    spoil(model, comm)
    optimizer = kind(model.parameters())
    with allstep.data.loader(
        samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=11, shares=shares
    ) as loader:
        while loader.epoch < num_epochs:
            for batch in allstep.steps(loader, exchange, replay=num_passes > 1):
                for _ in range(num_passes):
                    optimizer.zero_grad()
                    for data in batch:
                        if weigh:
                            loss = loss_of(model, data, "sum")
                            batch.backward(loss, weight=len(data[0]))
                        else:
                            batch.backward(loss_of(model, data))
                clip(exchange)
                optimizer.step()
        assert loader.step == 3 * num_epochs
    dropped = comm.all_reduce(torch.tensor(model.num_dropped))
    exchange.detach()
    return {name: p.detach() for name, p in model.named_parameters()} | {"dropped": dropped}


@pytest.fixture
def run(thread_generators: Any) -> Callable[..., dict[str, Tensor]]:  # noqa: F811
    def run(size: int, **options: Any) -> dict[str, Tensor]:
        if size == 1 and not options:
            return trained_by_one()
        return merged(run_ranks(size, lambda comm: train(comm, **options)))

    return run


@cache
def trained_by_one() -> dict[str, Tensor]:
    """What most runs are compared with; of the same inputs in each test."""
    return merged(run_ranks(1, train))


@pytest.mark.parametrize("size", SIZES)
def test_training_is_that_of_one_worker(size: int, run: Callable[..., dict[str, Tensor]]) -> None:
    """Workers have different numbers of micro-batches, and in short steps some have none."""
    one = run(1)
    assert one["dropped"] > 0
    assert largest_difference(one, run(size)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, max(SIZES)])
def test_twenty_one_steps(size: int, run: Callable[..., dict[str, Tensor]]) -> None:
    assert largest_difference(run(1, num_epochs=7), run(size, num_epochs=7)) < 1e-10


def clip_over_all(exchange: Any) -> None:
    exchange.clip_grad_norm_(0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": allstep.Synchronous(plain=True)},
        {"policy": allstep.Synchronous(overlap=False, bucket_bytes=64)},
        {"weigh": True},
        {"weigh": True, "policy": allstep.Synchronous(plain=True)},
        {"weigh": True, "policy": EXACT},
        {"shares": [1, 4, 1]},
        {"num_passes": 2},
        {"clip": clip_over_all},
    ],
    ids=[
        *("plain", "no overlap", "weights", "weights, plain", "weights, exact", "shares"),
        *("two passes", "clipping"),
    ],
)
def test_training_in_other_ways(
    options: dict[str, Any], run: Callable[..., dict[str, Tensor]]
) -> None:
    one = run(1, **{name: x for name, x in options.items() if name != "shares"})
    assert largest_difference(one, run(3, **options)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param(
            {"weigh": True, "kind": partial(allstep.optim.LAMB, lr=0.05)}, marks=pytest.mark.long
        ),
        {"kind": partial(torch.optim.AdamW, lr=0.02), "num_passes": 2},
        {"clip": clip_over_all, "policy": EXACT},
        pytest.param(
            {"clip": clip_over_all, "policy": allstep.Synchronous(plain=True)},
            marks=pytest.mark.long,
        ),
        {"shares": [1, 4, 1, 0.5, 1, 1, 1, 2]},
    ],
    ids=["momentum", "lamb, weights", "adamw, two passes", "exact", "plain", "shares"],
)
def test_eight_workers(options: dict[str, Any], run: Callable[..., dict[str, Tensor]]) -> None:
    """Five micro-batches a step, or three: some workers have none from the first step on."""
    usual = {"num_experts": 8, "num_epochs": 7}
    one = run(1, **usual, **{name: x for name, x in options.items() if name != "shares"})
    assert largest_difference(one, run(8, **usual, **options)) < 1e-10


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_controls_of_training(size: int, run: Callable[..., dict[str, Tensor]]) -> None:
    """Expert gradients as the mean over workers, or dropout by worker, are another model."""
    run = partial(run, num_experts=8)
    one = run(1)

    def average(model: nn.Module, comm: Communicator) -> None:
        for layer in model.moe:
            for p in layer.experts.parameters():
                p.register_hook(lambda gradient: gradient / comm.size)

    def draw_by_worker(model: nn.Module, comm: Communicator) -> None:
        for layer in model.moe:
            layer._seeded = lambda seed, device: seeded_thread(seed + comm.rank, device)

    assert largest_difference(one, run(size, spoil=average)) > 1e-3
    assert largest_difference(one, run(size, spoil=draw_by_worker)) > 1e-3


@pytest.mark.parametrize("policy", [allstep.Synchronous(), EXACT])
def test_norm_of_experts_whose_layers_are_cut(policy: allstep.Synchronous) -> None:
    """Shards on data x tensor of 2 x 2; what is whole counts once."""

    class Cut(ShardHook):
        def __init__(self, mesh: Mesh[Communicator]) -> None:
            self.shards = {"weight": Shard(mesh, "tensor", 0)}

        def __call__(self, *_: object) -> None:
            pass

    def clip(comm: Communicator) -> float:
        mesh = comm.mesh(data=2, tensor=2)
        layer = make_layer(mesh["data"], expert=lambda: nn.Linear(D, D), num_experts=4)
        for linear in layer.experts.values():
            linear.register_forward_pre_hook(Cut(mesh))
        exchange = allstep.attach(layer, mesh["data"], policy)
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        return float(exchange.clip_grad_norm_(1.0))

    expected = math.sqrt(4 * D + 4 * (2 * D * D + D))  # the router's, and 4 experts'
    assert run_ranks(4, clip) == pytest.approx([expected] * 4, rel=1e-12)


def test_two_runs_have_the_same_bits(run: Callable[..., dict[str, Tensor]]) -> None:
    assert largest_difference(run(2), run(2)) == 0


def test_clipping_by_one_workers_norm_is_noticed(
    run: Callable[..., dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    def clip(exchange: Any) -> None:
        nn.utils.clip_grad_norm_(exchange.model.parameters(), 0.02)

    with pytest.raises(DisagreementError, match="values of "):
        run(2, clip=clip)
    assert "Use `exchange.clip_grad_norm_(max_norm)`" in caplog.text
    assert largest_difference(run(1, clip=clip), run(1)) > 1e-3  # it does something


def train_scaled(comm: Communicator, *, tells: bool) -> dict[str, Tensor]:
    """With a GradScaler; the gradient of one expert, and of no other, overflows in step 2."""
    model = Net(comm, num_experts=8)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with allstep.data.loader(
        samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=11
    ) as loader:
        while loader.epoch < 2:
            for batch in allstep.steps(loader, exchange):
                for data in batch:
                    batch.backward(scaler.scale(loss_of(model, data)))
                if batch.step == 2 and "0" in model.moe[0].experts:
                    model.moe[0].experts["0"].get_parameter("0.0.weight").grad.fill_(math.inf)
                if tells:
                    exchange.unscale_(scaler, optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    exchange.detach()
    assert scaler.get_scale() == 512
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_step_that_an_expert_overflows_is_skipped_on_all(
    thread_generators: Any,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, *_ = run_ranks(1, lambda comm: train_scaled(comm, tells=False))
    for size in (2, 4):
        found = merged(run_ranks(size, lambda comm: train_scaled(comm, tells=True)))
        assert largest_difference(one, found) < 1e-10
    assert caplog.text == ""
    with pytest.raises(DisagreementError, match="updates since the last exchange"):
        run_ranks(2, lambda comm: train_scaled(comm, tells=False))


def test_a_scaler_steps_for_experts_without_a_gradient() -> None:
    """As those that no token was sent to."""

    def worker(comm: Communicator) -> float:
        layer = make_layer(comm)
        exchange = allstep.attach(layer, comm)
        optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        scaler.scale(layer(values(10, D, seed=0))[0].sum()).backward()
        if comm.rank == 1:
            optimizer.zero_grad()
        exchange.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(2, worker) == [128, 128]


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_a_loop_without_steps_takes_the_mean(is_frozen_first: bool) -> None:
    """Each worker has one micro-batch, weighed by nobody: the exchange scales."""

    def step(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, top_k=2)
        layer.experts.requires_grad_(not is_frozen_first)
        exchange = allstep.attach(layer, comm)
        layer.experts.requires_grad_(True)
        for number in range(2):  # the second adds to what the first has left
            parts = [values(10, D, seed=2 * number + i) for i in range(2)]
            for x in parts if comm.size == 1 else parts[comm.rank :][:1]:
                y, balance = layer(x)
                (((y - 1).square().mean() + balance) / (2 if comm.size == 1 else 1)).backward()
        exchange.detach()
        return gradients(layer)

    one, *_ = run_ranks(1, step)
    assert largest_difference(one, merged(run_ranks(2, step))) < 1e-10
    assert max(float(g.abs().max()) for name, g in one.items() if "experts" in name) > 1e-3


def test_one_expert_that_is_frozen_and_thawed() -> None:
    """Which other workers need not know."""

    def train(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, top_k=2)
        exchange = allstep.attach(layer, comm)
        found = {}
        for number, is_trained in enumerate((True, False, True)):
            if "1" in layer.experts:
                layer.experts["1"].requires_grad_(is_trained)
            layer.zero_grad()
            parts = [values(20, D, seed=2 * number + i) for i in range(2)]
            for x in parts if comm.size == 1 else parts[comm.rank :][:1]:
                (layer(x)[0].square().sum() / (2 if comm.size == 1 else 1)).backward()
            found |= {f"{name} {number}": g.clone() for name, g in gradients(layer).items()}
        exchange.detach()
        return found

    one, *_ = run_ranks(1, train)
    assert largest_difference(one, merged(run_ranks(2, train))) < 1e-10
    norms = [float(one[f"experts.1.0.weight {number}"].norm()) for number in range(3)]
    assert norms[0] > 0 and norms[1] == 0 and norms[2] > 0


@pytest.mark.parametrize("policy", [allstep.Synchronous(), allstep.Synchronous(plain=True), EXACT])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_only_experts_are_trained(weight: float | None, policy: allstep.Synchronous) -> None:
    """There is nothing to exchange but the losses' weights."""

    def train(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm)
        layer.router.requires_grad_(False)
        exchange = allstep.attach(layer, comm, policy)
        with allstep.data.loader(samples(), comm, global_batch=20, micro_batch=4) as loader:
            for batch in allstep.steps(loader, exchange):
                layer.zero_grad()
                for x, target in batch:
                    error = (layer(x)[0] - target).square()
                    if weight is None:
                        batch.backward(error.mean())
                    else:
                        batch.backward(error.sum(), weight=weight * len(x))
        exchange.detach()
        return {name: g for name, g in gradients(layer).items() if "experts" in name}

    one, *_ = run_ranks(1, train)
    assert largest_difference(one, merged(run_ranks(3, train))) < 1e-10


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_else_changes_experts_gradients_in_the_loop_over_a_batch(size: int) -> None:
    def train(comm: Communicator) -> None:
        layer = make_layer(comm)
        exchange = allstep.attach(layer, comm)
        with allstep.data.loader(samples(), comm, global_batch=20, micro_batch=4) as loader:
            for batch in allstep.steps(loader, exchange):
                for data in batch:
                    layer.experts.zero_grad()
                    batch.backward(loss_of(layer, data))

    with pytest.raises(UsageError, match=r"gradient of `experts\..*` was dropped, as by `zero_gr"):
        run_ranks(size, train)


def test_an_experts_earlier_gradient_goes_with_no_weights() -> None:
    """It would be divided by them; that of others' samples in this batch may be there."""

    def train(comm: Communicator) -> None:
        layer = make_layer(comm)
        exchange = allstep.attach(layer, comm)
        with allstep.data.loader(samples(), comm, global_batch=20, micro_batch=4) as loader:
            for batch in allstep.steps(loader, exchange):
                for x, _ in batch:
                    batch.backward(layer(x)[0].sum(), weight=len(x))
                layer.router.zero_grad()

    for size in (1, 2):
        with pytest.raises(UsageError, match=r"gradient of `experts\..*` was not zero before glo"):
            run_ranks(size, train)


def test_experts_without_parameters() -> None:
    """Workers with fewer micro-batches run them for others, too."""

    def train(comm: Communicator) -> Tensor:
        layer = make_layer(comm, expert=nn.Tanh, top_k=2)
        exchange = allstep.attach(layer, comm)
        with allstep.data.loader(samples(), comm, global_batch=20, micro_batch=4) as loader:
            for batch in allstep.steps(loader, exchange):
                layer.zero_grad()
                for data in batch:
                    batch.backward(loss_of(layer, data))
        return layer.router.weight.grad

    (one,) = run_ranks(1, train)
    for found in run_ranks(2, train):
        assert (found - one).abs().max() < 1e-12


def test_evaluation_counts_each_sample_once() -> None:
    """On workers with different numbers of micro-batches, some without any."""

    def evaluate(comm: Communicator, size: int) -> dict[str, float]:
        def metrics(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
            return {"error": (loss_of(model, data) * len(data[0]), len(data[0]))}

        dataset = torch.utils.data.Subset(samples(), range(size))
        evaluator = allstep.Evaluator(metrics, dataset, comm, micro_batch=5)
        return evaluator(Net(comm))

    for size in (51, 13):
        (one,) = run_ranks(1, lambda comm, size=size: evaluate(comm, size))
        for found in run_ranks(4, lambda comm, size=size: evaluate(comm, size)):
            assert found["error"] == pytest.approx(one["error"], rel=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_has_the_same_bits(size: int) -> None:
    """Nothing is summed over the workers in the forward pass."""

    def run(comm: Communicator) -> dict[str, Tensor]:
        layer = make_layer(comm, top_k=2, capacity_factor=1.25).bfloat16()
        y, balance = layer(values(20, D, seed=3).bfloat16())
        (y.square().sum() + balance).backward()
        return {"y": y.detach(), "balance": balance, "router": layer.router.weight.grad}

    (one,) = run_ranks(1, run)
    assert one["y"].dtype == torch.bfloat16
    for found in run_ranks(size, run):
        assert largest_difference(one, found) == 0


def test_autocast_of_the_caller_holds_for_its_tokens() -> None:
    """On a worker that runs experts outside of it, too."""
    dtypes: list[torch.dtype] = []

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ torch.ones(D, D)
            dtypes.append(y.dtype)
            return y

    def check(comm: Communicator) -> None:
        layer = MixtureOfExperts(Seen, comm, D, 2, seed=0, seeded=seeded_thread)
        if comm.rank == 0:
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(torch.randn(64, D))[0].dtype == torch.float32
        else:
            layer.serve()

    run_ranks(2, check)
    assert dtypes == [torch.bfloat16] * 2


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 6}, "unexpected: experts.6.0.weight, experts.6.0.bias, "),
        (
            {"expert": lambda: nn.Sequential(nn.Linear(D, 3), nn.Linear(3, D))},
            "of another shape: experts.0.0.weight [5, 4] instead of [3, 4], ",
        ),
    ],
    ids=["fewer", "narrower"],
)
def test_a_checkpoint_of_other_experts(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    run_ranks(1, lambda comm: save_whole(make_layer(comm), tmp_path))
    for said in run_ranks(2, lambda comm: misfit(make_layer(comm, **options), comm, tmp_path)):
        assert words in said


ONE = nn.Linear(D, D)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 7}, r"`num_experts` \(=7\) must be a multiple of the 2 workers; .* 6, 8"),
        ({"num_experts": 0}, r"`num_experts` \(=0\) must be an int of at least 1"),
        ({"top_k": 13}, r"`top_k` \(=13\) must be at most `num_experts` \(=12\)"),
        ({"top_k": 1.0}, r"`top_k` \(=1.0\) must be an int"),
        ({"capacity_factor": 0}, r"`capacity_factor` \(=0\) must be positive"),
        ({"capacity_factor": math.nan}, r"`capacity_factor` \(=nan\) must be positive"),
        ({"capacity_factor": "1"}, r"`capacity_factor` \(='1'\) must be positive"),
        ({"expert": ONE}, r"`expert` \(a Linear\) must be a function .* `lambda: nn.L"),
        ({"expert": lambda: None}, r"`expert\(\)` \(=None\) must be a Module: return the module"),
        ({"expert": lambda: ONE}, "modules with the same parameters"),
        ({"expert": lambda: nn.LazyLinear(D)}, r"without a shape \(\d+.weight\)"),
        ({"expert": lambda: nn.BatchNorm1d(D)}, r"batch norm with running statistics \(\d+\)"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x.items())).__repr__()[:30],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_ranks(2, lambda comm: make_layer(comm, **options))


def test_experts_along_an_axis_of_their_own() -> None:
    """Whose copies along `data` nobody would sum."""

    def attach(comm: Communicator) -> None:
        mesh = comm.mesh(data=2, expert=2)
        with pytest.raises(UsageError, match=r"`comm` \(a Mesh\) must be a Communicator"):
            make_layer(mesh)
        layer = make_layer(mesh["expert"])
        for workers in (comm, mesh["data"]):
            with pytest.raises(UsageError, match="over the 2 workers of another communicator than"):
                allstep.attach(layer, workers)

    run_ranks(4, attach)


def test_workers_must_make_the_same_layer() -> None:
    with pytest.raises(DisagreementError, match="top_k"):
        run_ranks(2, lambda comm: make_layer(comm, top_k=1 + comm.rank))


def test_bad_inputs() -> None:
    def wrong_features(comm: Communicator) -> None:
        make_layer(comm)(values(3, 5, seed=0))

    with pytest.raises(UsageError, match=r"`x` has shape \(3, 5\).*`in_features` \(=4\)"):
        run_ranks(1, wrong_features)

    def wrong_shape(comm: Communicator) -> None:
        make_layer(comm, expert=lambda: nn.Linear(D, 3))(values(9, D, seed=0))

    with pytest.raises(UsageError, match=r"`expert` returned shape \(\d+, 3\)"):
        run_ranks(1, wrong_shape)

    def several(comm: Communicator) -> None:
        make_layer(comm, expert=lambda: nn.LSTM(D, D))(values(9, D, seed=0))

    with pytest.raises(UsageError, match=r"`expert` returned a tuple for shape"):
        run_ranks(1, several)


def test_one_worker_in_another_mode() -> None:
    def without_gradients(comm: Communicator) -> None:
        with torch.set_grad_enabled(comm.rank == 1):
            make_layer(comm)(values(3, D, seed=0))

    with pytest.raises(DisagreementError, match="0 in train mode without gradients; rank 1: Mix"):
        run_ranks(2, without_gradients)

    def evaluating(comm: Communicator) -> None:
        make_layer(comm).train(comm.rank == 0)(values(3, D, seed=0))

    with pytest.raises(DisagreementError, match="rank 1: MixtureOfExperts 0 in eval mode with"):
        run_ranks(2, evaluating)


def test_ddp_around_it() -> None:
    """It would average different experts. DDP's mark is the process's, so one rank calls."""

    def call(comm: Communicator) -> None:
        model = nn.ModuleList([make_layer(comm)])
        model.forward = model[0].forward
        ddp = DistributedDataParallel(model, process_group=comm.process_group)
        if comm.rank == 0:
            ddp(values(3, D, seed=0))

    with pytest.raises(UsageError, match="called by a DistributedDataParallel around it"):
        run_ranks(2, call)


def test_layers_in_different_orders() -> None:
    def call(comm: Communicator) -> None:
        layers = [make_layer(comm), make_layer(comm)]
        layers[comm.rank](values(3, D, seed=0))

    with pytest.raises(
        DisagreementError, match=r"\(rank 0: MixtureOfExperts 0 in .*; rank 1: M\w+ 1 in"
    ):
        run_ranks(2, call)


def test_a_call_of_one_worker_only() -> None:
    """The other one goes on to the next global batch."""

    def train(comm: Communicator) -> None:
        layer = make_layer(comm)
        exchange = allstep.attach(layer, comm)
        loader = allstep.data.loader(samples(), comm, global_batch=8, micro_batch=4)
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                batch.backward(loss_of(layer, data))
                if comm.rank == 0:
                    layer(data[0])

    with pytest.raises(DisagreementError, match="rank 1: the beginning of a global batch"):
        run_ranks(2, train)


@pytest.mark.parametrize(
    "policy",
    [
        allstep.Stale(steps=1, compression="exact"),
        allstep.LocalSGD(sync_every=2, compression="exact"),
    ],
    ids=["stale", "local"],
)
def test_policies_that_need_whole_models(policy: Any) -> None:
    def attach(comm: Communicator) -> None:
        layer = make_layer(comm)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        allstep.attach(layer, comm, policy, optimizer=optimizer)

    run_ranks(1, attach)
    with pytest.raises(UsageError, match=r"`model.experts` is divided over them"):
        run_ranks(2, attach)


def test_attached_to_other_workers() -> None:
    def attach(comm: Communicator) -> None:
        allstep.attach(make_layer(comm), comm.split(0))

    with pytest.raises(UsageError, match="of another communicator than `comm`"):
        run_ranks(2, attach)


def test_parameters_of_an_expert_and_of_others() -> None:
    def attach(comm: Communicator) -> None:
        model = nn.Module()
        model.moe = make_layer(comm)
        model.head = nn.Linear(D, 5).double()
        number = next(iter(model.moe.experts))
        model.head.weight = model.moe.experts[number][0].weight
        allstep.attach(model, comm)

    run_ranks(1, attach)
    with pytest.raises(UsageError, match=r"`head.weight` is also one of `model.moe.experts`"):
        run_ranks(2, attach)


def test_several_exchanges() -> None:
    def train(comm: Communicator) -> None:
        exchanges = [allstep.attach(make_layer(comm), comm) for _ in range(2)]
        loader = allstep.data.loader(samples(), comm, global_batch=4, micro_batch=2)
        allstep.steps(loader, *exchanges)

    with pytest.raises(UsageError, match="`exchanges` are 2, and a model has experts"):
        run_ranks(2, train)


def test_checkpoints_lose_no_expert(tmp_path: Path) -> None:
    """What stores rank 0's is refused."""

    def save(comm: Communicator) -> None:
        allstep.train.Checkpoints(tmp_path, comm).save(1, make_layer(comm).state_dict())

    with pytest.raises(DisagreementError, match="lie on several workers is saved by"):
        run_ranks(2, save)


class StopError(Exception):
    pass


def train_on(
    comm: Communicator, run_dir: Path, stops_after: int | None = None, copies: int = 1
) -> dict[str, Tensor]:
    """A loop with checkpoints, for two epochs or until it is interrupted."""
    model = Net(comm, copies=copies)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"optimizer": optimizer}
    with (
        allstep.data.loader(
            samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        ) as loader,
        allstep.AutoCheckpoint(run_dir, loader, exchange, state=state, every_steps=1) as checkpoint,
    ):
        for _ in checkpoint.epochs(2):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for data in batch:
                    batch.backward(loss_of(model, data))
                optimizer.step()
                optimizer.zero_grad()
                if batch.step == stops_after:
                    raise StopError
    return model.state_dict()


def test_an_own_loop_with_experts_goes_on_on_other_workers(
    tmp_path: Path,
    thread_generators: Any,  # noqa: F811
) -> None:
    def go_on(size: int, name: str) -> dict[str, Tensor]:
        found = run_ranks(size, lambda comm: train_on(comm, tmp_path / name))
        return merged(found)

    (straight,) = run_ranks(1, lambda comm: train_on(comm, tmp_path / "straight"))
    with pytest.raises(StopError):
        run_ranks(2, lambda comm: train_on(comm, tmp_path / "run", 4))
    for size in (1, 4):
        shutil.copytree(tmp_path / "run", tmp_path / f"on {size}")
        assert largest_difference(go_on(size, f"on {size}"), straight) < 1e-10
    (newest,) = sorted(tmp_path.glob("run/checkpoints/*"))[-1:]
    state = allstep.train.read_checkpoint(newest)
    state["state"]["optimizer"]["state"] = {}  # the control: each one's momentum is lost
    allstep.train.write_checkpoint(newest, state, step=int(newest.name[5:]))
    assert largest_difference(go_on(2, "run"), straight) > 1e-4


def test_sharpness_needs_whole_models() -> None:
    def measure(comm: Communicator) -> None:
        loader = allstep.data.loader(samples(), comm, global_batch=4, micro_batch=2)
        batch = next(loader.global_batches())
        allstep.train.sharpness(make_layer(comm), loss_of, batch, comm)

    with pytest.raises(UsageError, match=r"`model.experts` is divided over the 2 workers"):
        run_ranks(2, measure)


def test_optimizers_that_name_parameters(thread_generators: Any) -> None:  # noqa: F811
    """Workers have others in the same group."""

    def train(comm: Communicator) -> None:
        model = Net(comm)
        exchange = allstep.attach(model, comm)
        optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
        loader = allstep.data.loader(samples(), comm, global_batch=20, micro_batch=4)
        for batch in allstep.steps(loader, exchange):
            for data in batch:
                batch.backward(loss_of(model, data))
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, train)


class Late(nn.Module):
    """Whose experts come, if at all, from a list that may be empty when it is attached."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_experts_that_join_after_attach() -> None:
    def run(comm: Communicator, *, is_late: bool) -> tuple[dict[str, Tensor], set[str]]:
        model, layer = Late(), make_layer(comm)
        if not is_late:
            model.layers.append(layer)
        exchange = allstep.attach(model, comm)
        if is_late:
            model.layers.append(layer)
        model(values(20, D, seed=comm.rank)).square().mean().backward()
        return gradients(model), set(exchange.divided)

    early = run_ranks(2, lambda comm: run(comm, is_late=False))
    late = run_ranks(2, lambda comm: run(comm, is_late=True))
    for (wanted, of_early), (found, of_late) in zip(early, late, strict=True):
        assert of_late == of_early != set()
        assert largest_difference(found, wanted) == 0


def test_experts_that_join_what_needs_whole_models() -> None:
    def run(comm: Communicator) -> None:
        model = Late()
        model.layers.append(make_layer(Communicator.single_process()))  # whole on each worker
        allstep.attach(model, comm, allstep.Stale(steps=1))
        model.layers.append(make_layer(comm))
        model(values(20, D, seed=comm.rank))

    with pytest.raises(UsageError, match=r"`model.layers.1.experts` is divided over them"):
        run_ranks(2, run)


def test_a_copy_has_the_same_workers() -> None:
    def check(comm: Communicator) -> None:
        layer = make_layer(comm)
        exchange = allstep.attach(layer, comm)
        average = torch.optim.swa_utils.AveragedModel(layer)
        other = copy.deepcopy(layer)
        x = values(9, D, seed=comm.rank)
        assert torch.equal(other(x)[0], layer(x)[0])
        assert torch.equal(average(x)[0], layer(x)[0])
        other(x)[0].sum().backward()  # nobody scales its gradients
        exchange.detach()
        layer(x)[0].sum().backward()
        assert largest_difference(gradients(other), gradients(layer)) == 0
        allstep.attach(other, comm)

    run_ranks(2, check)


def test_checkpoint_tells_which_experts_have_a_gradient(tmp_path: Path) -> None:
    """Momentum moves those whose gradient is zero, and none whose gradient is missing."""

    def gradients(comm: Communicator) -> dict[str, bool]:
        model = Net(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(
            samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        state = {"optimizer": optimizer}
        with loader, allstep.AutoCheckpoint(tmp_path, loader, exchange, state=state) as checkpoint:
            for _ in checkpoint.epochs(1):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    for data in batch:
                        batch.backward(loss_of(model, data))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
        return {name: p.grad is not None for name, p in model.named_parameters()}

    first, resumed = run_ranks(2, gradients), run_ranks(2, gradients)
    assert first == resumed
    assert any(".experts." in name and has for name, has in resumed[1].items())


def test_checkpoint_tells_which_experts_are_frozen(tmp_path: Path) -> None:
    """Also of a worker that is not rank 0; they stay so on any other number of workers."""

    def frozen(comm: Communicator, *numbers: int) -> list[str]:
        model = make_layer(comm)
        for number in (str(number) for number in numbers):
            if number in model.experts:
                model.experts[number].requires_grad_(False)
        exchange = allstep.attach(model, comm)
        loader = allstep.data.loader(
            samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        with loader, allstep.AutoCheckpoint(tmp_path, loader, exchange, state={}) as checkpoint:
            for _ in checkpoint.epochs(1):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    for x, _ in batch:
                        batch.backward(model(x)[0].mean())
        return [name for name, p in model.named_parameters() if not p.requires_grad]

    first = run_ranks(2, lambda comm: frozen(comm, 1, E - 1))
    resumed = run_ranks(3, frozen)
    assert [len(names) for names in first] == [4, 4]
    assert sorted(itertools.chain(*resumed)) == sorted(itertools.chain(*first))


@pytest.mark.parametrize("size", [1, 3])
def test_average_of_a_model_goes_on_on_other_workers(
    size: int,
    tmp_path: Path,
    thread_generators: Any,  # noqa: F811
) -> None:
    """From a checkpoint of two, which has the average of all experts."""

    def train(comm: Communicator, run_dir: Path, num_epochs: int) -> dict[str, Tensor]:
        model = Net(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = allstep.attach(model, comm)
        average = AveragedModel(model)
        loader = allstep.data.loader(
            samples(), comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        state = {"optimizer": optimizer, "average": average}
        with loader, allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as checkpoint:
            for _ in checkpoint.epochs(num_epochs):
                for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                    for data in batch:
                        batch.backward(loss_of(model, data))
                    optimizer.step()
                    optimizer.zero_grad()
                    exchange.sync_buffers()
                    average.update_parameters(model)
        return {name: x.detach() for name, x in average.state_dict().items()}

    def lives(size: int, name: str, num_epochs: int) -> dict[str, Tensor]:
        return merged(run_ranks(size, lambda comm: train(comm, tmp_path / name, num_epochs)))

    whole = lives(1, "whole", 2)
    lives(2, "lives", 1)
    assert largest_difference(lives(size, "lives", 2), whole) < 1e-10
