"""Every kind of backward pass ends with one exchange, whatever happened in the one before."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from allstep.comm import Communicator
from allstep.exchange import ExchangePolicy, attach
from tests.exchange.nets import Failing, assert_same, clone, differs, gradients, mlp, shard, states
from tests.helpers.ranks import run_ranks
from tests.helpers.versions import needs_torch_2_13


def test_no_sync_accumulates_until_the_next_exchange(policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(3, 8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        parts = [shard(batch, comm) for batch in batches]
        with exchange.no_sync():
            for part in parts[:2]:
                model(part).square().mean().backward()
        assert exchange.num_exchanges == 0
        model(parts[2]).square().mean().backward()
        assert exchange.num_exchanges == 1
        return gradients(model)

    model = copy.deepcopy(start)
    sum(model(batch).square().mean() for batch in batches).backward()
    for actual in run_ranks(2, worker):
        assert_same(actual, gradients(model))


def test_no_sync_gradients_are_sent_by_the_next_backward(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> float:
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        exchange = attach(model, comm, policy)
        with exchange.no_sync():
            model[0](torch.full((1, 1), float(comm.rank))).sum().backward()
        model[1](torch.ones(1, 1)).sum().backward()
        return model[0].weight.grad.item()

    assert run_ranks(3, worker) == [1.0, 1.0, 1.0]


def test_second_backward_adds_to_an_exchanged_gradient(policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(2, 9, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        attach(model, comm, policy)
        for batch in batches:
            model(shard(batch, comm)).square().mean().backward()
        return gradients(model)

    model = copy.deepcopy(start)
    sum(model(batch).square().mean() for batch in batches).backward()
    for actual in run_ranks(3, worker):
        assert_same(actual, gradients(model))


def test_retained_graph_can_be_run_twice(policy: ExchangePolicy) -> None:
    start, batch = mlp(), torch.randn(8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        loss = model(shard(batch, comm)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert exchange.num_exchanges == 2
        return gradients(model)

    model = copy.deepcopy(start)
    (2 * model(batch).square().mean()).backward()
    for actual in run_ranks(2, worker):
        assert_same(actual, gradients(model))


def test_create_graph(policy: ExchangePolicy) -> None:
    torch.set_warn_always(True)
    start, batch = mlp(), torch.randn(8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        attach(model, comm, policy)
        inputs = list(model.parameters())
        model(shard(batch, comm)).square().mean().backward(create_graph=True, inputs=inputs)
        found = gradients(model)
        model.zero_grad()  # breaks the cycle that create_graph makes
        return {name: g.detach() for name, g in found.items()}

    model = copy.deepcopy(start)
    model(batch).square().mean().backward()
    with pytest.warns(UserWarning, match="create_graph"):
        found = run_ranks(2, worker)
    torch.set_warn_always(False)
    for actual in found:
        assert_same(actual, gradients(model))


def test_gradient_of_an_input_is_no_exchange(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, policy)
        if comm.rank == 0:  # alone: a collective would wait for ever
            x = torch.ones(2, 5, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
        assert exchange.num_exchanges == 0

    run_ranks(2, worker)


class Checkpointed(nn.Module):
    """Layers in two checkpointed segments, and a rank-dependent use of a third."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, uses_third: bool) -> Tensor:
        x = x.clone().requires_grad_()
        layers = [self.first, self.second, *([self.third] if uses_third else [])]
        for layer in layers:
            x = checkpoint(layer, x.tanh(), use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_is_one_exchange(
    use_reentrant: bool, policy: ExchangePolicy
) -> None:
    start, batches = Checkpointed(use_reentrant), torch.randn(2, 4, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        model(batches[comm.rank], comm.rank == 0).square().mean().backward()
        assert exchange.num_exchanges == 1
        return gradients(model)

    model = copy.deepcopy(start)
    losses = [model(batches[r], r == 0).square().mean() for r in range(2)]
    (sum(losses) / 2).backward()
    for actual in run_ranks(2, worker):
        assert_same(actual, gradients(model))


def test_failed_backward_leaves_nothing_behind(policy: ExchangePolicy) -> None:
    start, batch = mlp(), torch.randn(8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        hidden = Failing.apply(model[:2](shard(batch, comm)))
        with pytest.raises(ArithmeticError) as caught:
            model[2:](hidden).sum().backward()
        assert exchange.num_exchanges == 0
        model.zero_grad()
        model(shard(batch, comm)).square().mean().backward()
        assert exchange.num_exchanges == 1
        assert caught.value is not None  # its traceback, alive until here, keeps nothing going
        return gradients(model)

    model = copy.deepcopy(start)
    model(batch).square().mean().backward()
    for actual in run_ranks(2, worker):
        assert_same(actual, gradients(model))


@needs_torch_2_13
def test_compiled_model(policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(3, 8, 5)

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        exchange = attach(compiled, comm, policy)
        assert exchange.model is model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches:
            compiled(shard(batch, comm)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        is_active = comm.size > 1 or policy.wire_format.name == "exact"
        assert exchange.num_exchanges == (3 if is_active else 0)
        return states(model)

    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for actual in run_ranks(1, worker) + run_ranks(2, worker):
        assert_same(actual, states(model))


class Gan:
    """Two models with an optimizer each; the generator's backward runs through both."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        self.generator, self.discriminator = generator, discriminator
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), 0.01) for model in (generator, discriminator)
        ]

    def step(self, real: Tensor, noise: Tensor) -> None:
        on_generator, on_discriminator = self.optimizers
        on_discriminator.zero_grad()
        fake = self.generator(noise)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        (softplus(-on_real) + softplus(on_fake)).mean().backward()
        on_discriminator.step()
        on_generator.zero_grad()
        softplus(-self.discriminator(fake)).mean().backward()
        on_generator.step()

    def states(self) -> dict[str, Tensor]:
        ours = {f"g.{name}": value for name, value in states(self.generator).items()}
        return ours | {f"d.{name}": value for name, value in states(self.discriminator).items()}


def test_gan_with_two_exchanges(policy: ExchangePolicy) -> None:
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    discriminator = mlp()
    real, noise = torch.randn(5, 8, 5), torch.randn(5, 8, 3)

    def worker(comm: Communicator, attached: bool = True) -> dict[str, Tensor]:
        gan = Gan(clone(generator, comm), clone(discriminator, comm))
        if attached:
            attach(gan.generator, comm, policy)
            attach(gan.discriminator, comm, policy)
        for x, z in zip(real, noise, strict=True):
            gan.step(shard(x, comm), shard(z, comm))
        return gan.states()

    expected = Gan(copy.deepcopy(generator), copy.deepcopy(discriminator))
    for x, z in zip(real, noise, strict=True):
        expected.step(x, z)
    for actual in run_ranks(2, worker):
        assert_same(actual, expected.states(), rtol=1e-11)
    assert differs(run_ranks(2, lambda comm: worker(comm, False))[1], expected.states(), by=0.1)
