"""Sharpness against the dense Hessian of a tiny net, on any number of workers."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.errors import AllstepError
from allstep.train.sharpness import Sharpness, sharpness
from tests.helpers.ranks import run_ranks

# torch.func.hessian's, on its first use
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

NUM_SAMPLES = 22  # the last micro-batch is short


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)
        ).double()
        net[1].running_mean.uniform_(-1, 1)
        net[1].running_var.uniform_(0.5, 2)
    return net


NET = make_net()  # once: ranks are threads, and would take each other's random numbers


def make_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator))


def loss_of(model: nn.Module, data: Any) -> Tensor:
    x, y = data
    return nn.functional.cross_entropy(model(x), y)


def batch_for(comm: Communicator, samples: TensorDataset, micro_batch: int = 4) -> Any:
    loader = allstep.data.loader(samples, comm, global_batch=24, micro_batch=micro_batch)
    return next(loader.global_batches())


def measure(comm: Communicator, **arguments: Any) -> Sharpness:
    options = {"max_products": 3000, "tolerance": 1e-9} | arguments
    return sharpness(copy.deepcopy(NET), loss_of, batch_for(comm, make_samples()), comm, **options)


def dense_hessian(net: nn.Module) -> Tensor:
    net.eval()
    names, parameters = zip(*net.named_parameters(), strict=True)
    sizes = [p.numel() for p in parameters]
    x, y = make_samples().tensors

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split(sizes)
        state = {n: t.view_as(p) for n, t, p in zip(names, pieces, parameters, strict=True)}
        logits = torch.func.functional_call(net, state, (x,))
        return nn.functional.cross_entropy(logits, y)

    return torch.func.hessian(loss)(torch.cat([p.detach().flatten() for p in parameters]))


@pytest.fixture(scope="module")
def alone() -> Sharpness:
    return measure(Communicator.single_process())


def test_sharpness_top_eigenvalue_is_the_dense_hessians(alone: Sharpness) -> None:
    eigenvalues = torch.linalg.eigvalsh(dense_hessian(make_net()))
    assert alone.top_eigenvalue == pytest.approx(eigenvalues[-1].item(), rel=1e-8)
    assert alone.residual < 1e-9
    assert alone.num_samples == NUM_SAMPLES


@pytest.mark.parametrize("num_workers", [2, 3])
def test_sharpness_is_the_same_on_any_workers(num_workers: int, alone: Sharpness) -> None:
    for measured in run_ranks(num_workers, measure):
        assert measured.loss == pytest.approx(alone.loss, rel=1e-12)
        assert measured.top_eigenvalue == pytest.approx(alone.top_eigenvalue, rel=1e-9)
        assert measured.loss_rise == pytest.approx(alone.loss_rise, rel=1e-10)


def test_sharpness_control_mean_over_micro_batches_differs(alone: Sharpness) -> None:
    """The short micro-batch must weigh less: the plain mean over micro-batches is another loss."""
    comm, net = Communicator.single_process(), make_net().eval()
    losses = [loss_of(net, m.data).item() for m in batch_for(comm, make_samples()).micro_batches]
    assert abs(sum(losses) / len(losses) - alone.loss) > 1e-3


def test_sharpness_with_a_larger_negative_eigenvalue() -> None:
    """loss = w0**2 - 3 * w1**2: eigenvalues 2 and -6."""
    net = nn.Linear(2, 1, bias=False).double()
    comm = Communicator.single_process()

    def loss(model: nn.Module, data: Any) -> Tensor:
        first, second = model.weight[0]
        return first**2 - 3 * second**2 + 0 * data[0].sum()

    samples = TensorDataset(torch.zeros(24, 2, dtype=torch.float64))
    measured = sharpness(net, loss, batch_for(comm, samples), comm)
    assert measured.top_eigenvalue == pytest.approx(2.0, rel=1e-4)
    # half of the products are kept for the second search
    few = sharpness(net, loss, batch_for(comm, samples), comm, max_products=6, tolerance=1e-9)
    assert few.top_eigenvalue == pytest.approx(2.0, rel=0.01)
    assert few.num_products == 6


def test_sharpness_refuses_a_batch_that_is_used_up() -> None:
    net, comm = make_net(), Communicator.single_process()
    batch = batch_for(comm, make_samples())
    sharpness(net, loss_of, batch, comm, max_products=2)
    with pytest.raises(UsageError, match="`batch` has been iterated over already"):
        sharpness(net, loss_of, batch, comm, max_products=2)


def test_sharpness_loss_rise_is_half_the_trace_for_small_noise() -> None:
    """Each weight's noise has variance (sigma * rms)**2: the mean rise is half their sum with H."""
    net, sigma = make_net(), 1e-3
    measured = measure(Communicator.single_process(), sigma=sigma, num_draws=1000, max_products=2)
    scales = [torch.full((p.numel(),), p.square().mean().item()) for p in net.parameters()]
    expected = 0.5 * sigma**2 * (dense_hessian(net).diagonal() * torch.cat(scales)).sum().item()
    assert abs(measured.loss_rise - expected) < 4 * measured.loss_rise_error


def test_sharpness_loss_rise_of_a_wider_minimum() -> None:
    """The same function with weights in a flatter direction, on a quadratic."""

    def rise(scale: float) -> float:
        comm, net = Communicator.single_process(), nn.Linear(2, 1, bias=False).double()
        nn.init.constant_(net.weight, 1.0)

        def loss(model: nn.Module, data: Any) -> Tensor:
            return scale * (model.weight - 1).square().sum() + 0 * data[0].sum()

        samples = TensorDataset(torch.zeros(24, 2, dtype=torch.float64))
        return sharpness(net, loss, batch_for(comm, samples), comm).loss_rise

    assert rise(10.0) == pytest.approx(10 * rise(1.0))


def test_sharpness_restores_the_model() -> None:
    comm, net = Communicator.single_process(), make_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    sharpness(net, loss_of, batch_for(comm, make_samples()), comm)
    assert net.training and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_sharpness_of_a_linear_loss() -> None:
    comm, net = Communicator.single_process(), nn.Linear(2, 1).double()
    samples = TensorDataset(torch.ones(24, 2, dtype=torch.float64))
    measured = sharpness(net, lambda m, d: m(d[0]).mean(), batch_for(comm, samples), comm)
    assert measured.top_eigenvalue == 0.0


def test_sharpness_with_equal_negative_eigenvalues() -> None:
    comm, net = Communicator.single_process(), nn.Linear(1, 1, bias=False).double()
    samples = TensorDataset(torch.zeros(24, 2, dtype=torch.float64))
    batch = batch_for(comm, samples)
    measured = sharpness(net, lambda m, d: -m.weight.square().sum() + 0 * d[0].sum(), batch, comm)
    assert measured.top_eigenvalue == pytest.approx(-2.0)


def test_sharpness_refuses_a_loss_without_a_second_derivative() -> None:
    comm, net = Communicator.single_process(), nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    samples = TensorDataset(torch.zeros(24, 2, dtype=torch.float64))
    batch = batch_for(comm, samples)
    with pytest.raises(AllstepError, match="no finite second derivative at these weights"):
        sharpness(net, lambda m, d: m.weight.square().sum().sqrt() + d[0].sum(), batch, comm)


class SquaredMean(torch.autograd.Function):
    """As fused losses are: the backward is made of numbers that the forward has kept."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.square().mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * 2 * y / y.numel()


class Bag(nn.EmbeddingBag):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.long()).sum(1)


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (
            nn.Linear(2, 1),
            lambda m, d: SquaredMean.apply(m(d[0])),
            "second derivative of `SquaredMean`, which is once_differentiable; put plain",
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)),
            lambda m, d: 0.5 * SquaredMean.apply(m(d[0])),
            "second derivative of `SquaredMean`",
        ),
        (
            Bag(3, 2, mode="max"),
            lambda m, d: m(d[0]).square().mean(),
            r"second derivative \(the derivative for '_embedding_bag_backward'",
        ),
        (
            nn.Embedding(3, 2, sparse=True),
            lambda m, d: m(d[0].long()).square().mean(),
            "second derivative of an embedding with `sparse=True`",
        ),
    ],
    ids=["end", "deeper", "bag", "sparse"],
)
def test_sharpness_refuses_once_differentiable_functions(
    net: nn.Module, loss: Any, message: str
) -> None:
    comm, samples = (
        Communicator.single_process(),
        TensorDataset(torch.ones(24, 2, dtype=torch.float64)),
    )
    with pytest.raises(AllstepError, match=message):
        sharpness(net.double(), loss, batch_for(comm, samples), comm)


@pytest.mark.parametrize("seed", range(6))
def test_sharpness_with_both_signs_of_nearly_one_magnitude(seed: int) -> None:
    """Half of the products don't tell which is larger; the vector holds both then."""
    net = nn.Linear(20, 2, bias=False).double()
    curvatures = torch.tensor([[1.0], [-1.005]], dtype=torch.float64)
    comm, samples = (
        Communicator.single_process(),
        TensorDataset(torch.zeros(24, 2, dtype=torch.float64)),
    )
    measured = sharpness(
        net,
        lambda m, d: (curvatures * m.weight.square()).sum() / 2 + 0 * d[0].sum(),
        batch_for(comm, samples),
        comm,
        seed=seed,
    )
    assert measured.top_eigenvalue == pytest.approx(1.0, rel=1e-3)


def test_sharpness_converges_in_the_second_half_of_the_products() -> None:
    few, half = (
        measure(Communicator.single_process(), max_products=n, tolerance=1e-9) for n in (40, 20)
    )
    assert (few.num_products, half.num_products) == (40, 20)
    assert few.residual < half.residual


def test_sharpness_of_attention() -> None:
    torch.manual_seed(0)
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    samples = TensorDataset(torch.randn(24, 3, 4, dtype=torch.float64))
    comm = Communicator.single_process()
    measured = sharpness(
        net.double(),
        lambda m, d: m(d[0], d[0], d[0], need_weights=False)[0].square().mean(),
        batch_for(comm, samples),
        comm,
    )
    assert measured.top_eigenvalue > 0


def test_sharpness_noise_is_relative_to_the_root_mean_square() -> None:
    """The expected rise of |w|**2 is sigma**2 |w|**2, for weights of very different sizes."""
    net = nn.Linear(1000, 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()[0, :10] = 3.0
    comm, samples = (
        Communicator.single_process(),
        TensorDataset(torch.zeros(24, 2, dtype=torch.float64)),
    )
    measured = sharpness(
        net,
        lambda m, d: m.weight.square().sum() + 0 * d[0].sum(),
        batch_for(comm, samples),
        comm,
        sigma=0.5,
        num_draws=100,
    )
    assert measured.loss_rise == pytest.approx(0.25 * 90, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_products": 1}, r"`max_products` \(=1\) must be at least 2"),
        ({"tolerance": 0.0}, r"`tolerance` \(=0.0\) must be between 0 and 1"),
        ({"sigma": -1.0}, r"`sigma` \(=-1.0\) must be positive"),
        ({"sigma": math.nan}, r"`sigma` \(=nan\) must be positive"),
        ({"num_draws": 1}, r"`num_draws` \(=1\) must be at least 2"),
    ],
)
def test_sharpness_refuses_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(Communicator.single_process(), **arguments)


def test_sharpness_refuses_models_without_a_minimum() -> None:
    comm = Communicator.single_process()
    frozen = make_net().requires_grad_(False)
    with pytest.raises(UsageError, match="`model` has no trainable parameter"):
        sharpness(frozen, loss_of, batch_for(comm, make_samples()), comm)
    diverged = make_net()
    nn.init.constant_(diverged[4].weight, math.nan)
    with pytest.raises(AllstepError, match="The loss is nan: the weights are of a training that"):
        sharpness(diverged, loss_of, batch_for(comm, make_samples()), comm)
