"""Layers on a grid of workers against torch on the whole array: outputs and all gradients."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.nn import (
    AvgPool2d,
    Conv2d,
    Grid,
    L2Pool2d,
    LocalContrastNorm,
    MaxPool2d,
    SubtractiveNorm,
)
from allstep.nn.windows import Layout, Reach, plan_halo
from tests.helpers import generators
from tests.nn.grids import GRIDS, mirrored, on_grid, part, values, whole

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def run_layer(grid_shape, make, x: Tensor):
    """Output, input gradient and each worker's parameter gradients of a layer on a grid."""

    def work(grid):
        layer = make(grid, grid.split(x.shape[2:])).double()
        own = part(x.detach(), layer.in_layout.windows[grid.rank]).clone().requires_grad_()
        y = layer(own)
        seeds = values(*y.shape[:2], *layer.out_layout.shape, seed=5)
        (y**2 * part(seeds, layer.out_layout.windows[grid.rank])).sum().backward()
        of_parameters = {name: p.grad for name, p in layer.named_parameters()}
        return layer.in_layout, layer.out_layout, y.detach(), own.grad, of_parameters

    results = on_grid(grid_shape, work)
    in_layout, out_layout = results[0][:2]
    y = whole([result[2] for result in results], out_layout)
    grad = whole([result[3] for result in results], in_layout)
    return y, grad, [result[4] for result in results]


def check_layer(grid_shape, make, oracle, x: Tensor, weights=()):
    """The layer gives what the oracle gives for the whole array."""
    x = x.clone().requires_grad_()
    y = oracle(x, *weights)
    expected = torch.autograd.grad((y**2 * values(*y.shape, seed=5)).sum(), (x, *weights))
    got, grad, of_parameters = run_layer(grid_shape, make, x)
    torch.testing.assert_close(got, y.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected[0], **CLOSE)
    for worker in of_parameters:
        torch.testing.assert_close(list(worker.values()), list(expected[1:]), **CLOSE)


def check_conv(grid_shape, x, *arguments):
    grid = Grid(Communicator.single_process())
    alone = Conv2d(grid, grid.split(x.shape[2:]), *arguments, seed=3).double()
    weights = [p.detach().requires_grad_() for p in alone.parameters()]
    reference = nn.Conv2d(*arguments).double()

    def oracle(x, *weights):
        names = [name for name, _ in reference.named_parameters()]
        return torch.func.functional_call(reference, dict(zip(names, weights, strict=True)), x)

    def make(grid, layout):
        return Conv2d(grid, layout, *arguments, seed=3)

    check_layer(grid_shape, make, oracle, x, weights)


# in, out, kernel, stride, padding, dilation, groups, bias
CONVOLUTIONS = (
    (4, 6, 3, 1, 1),
    (4, 6, (5, 3), (2, 1), (2, 0), 1, 2, False),
    (4, 4, 3, 2, 1, 2, 4),
    (4, 2, (4, 2), 1, "same", (1, 2)),
    (4, 2, 1, 3, 0),
    (4, 2, 9, 1, "valid"),  # wider than a neighbour's whole window
    (4, 2, 2, 1, 3),  # some outputs see padding alone
)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # says torch's own layer
@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize("arguments", CONVOLUTIONS, ids=str)
def test_convolution(grid_shape, arguments):
    check_conv(grid_shape, values(2, 4, 13, 11), *arguments)


@settings(max_examples=10)
@given(
    st.sampled_from(GRIDS[1:]),
    st.tuples(st.integers(4, 15), st.integers(4, 15)),
    st.tuples(*[st.integers(1, 5)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
)
def test_convolution_of_any_shape(grid_shape, size, kernel, stride, padding, dilation):
    for d in range(2):
        span = size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1
        assume(span >= 0 and span // stride[d] + 1 >= grid_shape[d] and size[d] >= grid_shape[d])
    check_conv(grid_shape, values(1, 2, *size), 2, 3, kernel, stride, padding, dilation)


POOLS = (
    (MaxPool2d, F.max_pool2d, (3, 2, 1)),
    (MaxPool2d, F.max_pool2d, (2,)),
    (MaxPool2d, F.max_pool2d, ((3, 2), (1, 2), (1, 0), (2, 1))),
    (AvgPool2d, F.avg_pool2d, ((3, 4), 2, 1)),
    (AvgPool2d, lambda x, *a: F.avg_pool2d(x, *a, count_include_pad=False), ((3, 4), 2, (1, 2))),
    (L2Pool2d, lambda x, *a: (F.lp_pool2d(x, 2, *a) ** 2 + 1e-8).sqrt(), (3, 1)),
    (L2Pool2d, lambda x, *a: (F.lp_pool2d(x, 2, *a) ** 2 + 1e-8).sqrt(), ((5, 2), (2, 3))),
)


@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize("pool", range(len(POOLS)))
def test_pooling(grid_shape, pool):
    layer, oracle, arguments = POOLS[pool]
    options = {"count_include_pad": False} if pool == 4 else {}
    check_layer(
        grid_shape,
        lambda grid, layout: layer(grid, layout, *arguments, **options),
        lambda x: oracle(x, *arguments),
        values(2, 3, 14, 13),
    )


@given(
    size=st.tuples(st.integers(5, 10), st.integers(5, 10)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    counts_padding=st.booleans(),
)
def test_pooling_with_ceil_mode(size, kernel, stride, padding, counts_padding):
    """The last window may begin in the array alone, and averages are of what is there."""
    assume(all(2 * p <= k for p, k in zip(padding, kernel, strict=True)))
    x, means = values(1, 2, *size), (kernel, stride, padding, True, counts_padding)
    maxima = (kernel, stride, padding, 1, True)
    whole_shape = F.max_pool2d(x, *maxima).shape[2:]
    assume(all(length >= 2 for length in whole_shape))
    for layer, oracle, arguments in (
        (MaxPool2d, F.max_pool2d, maxima),
        (AvgPool2d, F.avg_pool2d, means),
    ):
        check_layer(
            (2, 2),
            lambda grid, layout, layer=layer, arguments=arguments: layer(grid, layout, *arguments),
            lambda x, oracle=oracle, arguments=arguments: oracle(x, *arguments),
            x,
        )


def contrast_oracle(x: Tensor, size: int, floor: float | None) -> Tensor:
    """As the formula has it: a Gaussian over all channels, renormalised at the edges."""
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-(offsets**2) / (2 * (size / 4) ** 2))
    weight = torch.outer(line, line).expand(1, x.shape[1], size, size)

    def mean(x):
        return F.conv2d(x, weight, padding=size // 2) / F.conv2d(
            torch.ones_like(x), weight, padding=size // 2
        )

    v = x - mean(x)
    deviation = mean(v**2).sqrt()
    if floor is None:
        return v / torch.maximum(deviation, deviation.mean((1, 2, 3), keepdim=True))
    return v / deviation.clamp_min(floor)


@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize(("size", "floor"), [(5, 0.01), (3, 0.9), (9, None)])
def test_local_contrast_normalisation(grid_shape, size, floor):
    check_layer(
        grid_shape,
        lambda grid, layout: LocalContrastNorm(grid, layout, size, floor),
        lambda x: contrast_oracle(x, size, floor),
        values(2, 3, 12, 9),
    )


def test_local_contrast_normalisation_of_a_constant():
    grid = Grid(Communicator.single_process())
    for floor in (0.01, None):
        x = torch.ones(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
        y = LocalContrastNorm(grid, grid.split((6, 6)), 3, floor)(x)
        y.sum().backward()
        assert y.abs().max() < 1e-6 and x.grad.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda g, a: Conv2d(g, a, 2, 2, 3, 2, 1, seed=0).double(),
        lambda g, a: AvgPool2d(g, a, 3, 1, 1, count_include_pad=False),
        lambda g, a: L2Pool2d(g, a, 3, 2, eps=0.1),
        lambda g, a: LocalContrastNorm(g, a, 3, 0.5),
        lambda g, a: SubtractiveNorm(g, a, 5),
    ],
)
def test_layers_pass_gradcheck_and_gradgradcheck(make):
    grid = Grid(Communicator.single_process())
    layer = make(grid, grid.split((5, 4)))
    x = values(2, 2, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


def test_layers_in_sequence_and_their_message_counts():
    """A net of them on six workers; every layer takes the layout of the one before."""

    def make(grid, layout):
        first = Conv2d(grid, layout, 3, 4, 3, padding=1, seed=1)
        pool = MaxPool2d(grid, first.out_layout, 2)
        norm = LocalContrastNorm(grid, pool.out_layout, 3)
        last = Conv2d(grid, norm.out_layout, 4, 2, 3, padding="same", seed=2)
        net = nn.Sequential(first, nn.Tanh(), pool, norm, last)
        net.in_layout, net.out_layout = layout, last.out_layout
        return net

    x = values(2, 3, 17, 13)
    y, grad, parameters = run_layer((1, 1), make, x)
    for grid_shape in GRIDS[1:]:
        got, got_grad, workers = run_layer(grid_shape, make, x)
        torch.testing.assert_close(got, y, **CLOSE)
        torch.testing.assert_close(got_grad, grad, **CLOSE)
        for worker in workers:
            torch.testing.assert_close(worker, parameters[0], **CLOSE)


def test_dropout_between_layers_is_of_channels():
    """As all workers of a grid have the same random state; of positions it is another model."""
    x = values(3, 2, 6, 5)

    def dropped(grid_shape: tuple[int, int], kind: type[nn.Module]) -> Tensor:
        def work(grid: Grid) -> tuple[Layout, Tensor]:
            layout = grid.split(x.shape[2:])
            first = Conv2d(grid, layout, 2, 4, 3, padding=1, seed=0, dtype=torch.float64)
            last = Conv2d(grid, layout, 4, 2, 3, padding=1, seed=1, dtype=torch.float64)
            generators.seed_this_thread(3)
            y = first(part(x, layout.windows[grid.rank]))
            return last.out_layout, last(kind(0.5)(y)).detach()

        results = on_grid(grid_shape, work)
        return whole([y for _, y in results], results[0][0])

    for kind, is_same in ((nn.Dropout2d, True), (nn.Dropout, False)):
        alone = dropped((1, 1), kind)
        for grid_shape in ((2, 1), (2, 2)):
            difference = (dropped(grid_shape, kind) - alone).abs().max()
            assert difference < 1e-10 if is_same else difference > 1e-3


@pytest.mark.parametrize("grid_shape", GRIDS)
def test_layer_sends_only_its_halo(grid_shape):
    def work(grid):
        conv = Conv2d(grid, grid.split((13, 11)), 2, 4, (5, 3), (2, 1), (2, 1), seed=0).double()
        x = part(values(3, 2, 13, 11), conv.in_layout.windows[grid.rank]).clone().requires_grad_()
        conv(x).sum().backward()
        reach = Reach((5, 3), (2, 1), ((2, 2), (1, 1)), (1, 1))
        wanted = tuple(reach.inputs(window) for window in conv.out_layout.windows)
        once = plan_halo(conv.in_layout, wanted, grid.rank).stats(3 * 2 * 8)
        return grid.stats == once + mirrored(once)

    assert all(on_grid(grid_shape, work))


def test_control_convolution_without_halo_differs():
    """The negative control: each worker pads its own part."""
    x = values(1, 2, 8, 8)
    conv = nn.Conv2d(2, 2, 3, padding=1).double()
    naive = torch.cat([conv(x[:, :, :4]), conv(x[:, :, 4:])], 2)
    difference = (naive - conv(x)).abs()
    assert difference[:, :, 3:5].max() > 0.01 and difference[:, :, :3].max() < 1e-12


def test_initial_weights_are_those_of_torch_on_every_worker():
    def work(grid):
        conv = Conv2d(grid, grid.split((8, 8)), 16, 32, 3)
        return conv.weight.detach(), conv.bias.detach()

    (weight, bias), *others = on_grid((2, 2), work)
    for other_weight, other_bias in others:
        assert torch.equal(weight, other_weight) and torch.equal(bias, other_bias)
    bound = 1 / (16 * 9) ** 0.5
    assert 0.99 * bound < weight.abs().max() <= bound and bias.abs().max() <= bound


def test_deepcopy_of_a_net():
    grid = Grid(Communicator.single_process())
    conv = Conv2d(grid, grid.split((4, 4)), 1, 1, 3, seed=0)
    x = torch.ones(1, 1, 4, 4)
    assert torch.equal(copy.deepcopy(conv)(x), conv(x))


LAYOUT = Layout.split((8, 8), (1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: Conv2d(g, (8, 8), 1, 1, 3), r"`in_layout` \(=\(8, 8\)\) must be a Layout"),
        (lambda g: MaxPool2d(g, (8, 8), 3), r"`in_layout` \(=\(8, 8\)\) must be a Layout"),
        (lambda g: SubtractiveNorm(g, (8, 8), 3), r"`in_layout` \(=\(8, 8\)\) must be a Layout"),
        (lambda g: SubtractiveNorm(g, LAYOUT, 1.5), r"`kernel_size` \(=1.5\) must be a whole num"),
        (lambda g: Conv2d(g, LAYOUT, 0, 1, 3), r"`in_channels` \(=0\) must be at least 1"),
        (lambda g: Conv2d(g, LAYOUT, 1, 0, 3), r"`out_channels` \(=0\) must be at least 1"),
        (lambda g: Conv2d(g, LAYOUT, 1, 1, 1.5), r"`kernel_size` \(=1.5\) must be an int of at"),
        (lambda g: Conv2d(g, LAYOUT, 1, 1, 9), r"`kernel_size` \(=\(9, 9\)\) reaches over 9"),
        (lambda g: Conv2d(g, LAYOUT, 1, 1, 3, padding="reflect"), r"`padding` \(='reflect'\)"),
        (lambda g: Conv2d(g, LAYOUT, 1, 1, 3, 2, "same"), "needs a `stride` of 1"),
        (lambda g: Conv2d(g, LAYOUT, 1, 1, 3, 0), r"`stride` \(=0\) must be an int of at least 1"),
        (lambda g: MaxPool2d(g, LAYOUT, 2, padding=2), r"`padding` \(=2\) must be at most half"),
        (lambda g: LocalContrastNorm(g, LAYOUT, 4), r"`kernel_size` \(=4\) must be odd"),
        (lambda g: LocalContrastNorm(g, LAYOUT, 3, 0.0), r"`floor` \(=0.0\) must be positive"),
        (
            lambda g: MaxPool2d(g, LAYOUT, 2)(torch.ones(1, 1, 8, 7)),
            r"`x` has shape \[1, 1, 8, 7\]; this worker's window .* needs \[8, 8\]",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(UsageError, match=message):
        make(Grid(Communicator.single_process()))


def test_grid_larger_than_the_output():
    told = []

    def work(grid):
        try:
            Conv2d(grid, grid.split((4, 4)), 1, 1, 3)
        except UsageError as error:
            told.append(str(error))
            raise

    with pytest.raises(UsageError):
        on_grid((4, 1), work)
    assert len(told) == 4
    assert all("has 4 workers in dim 0, where the array of shape (2, 2) has 2" in t for t in told)


def test_disagreeing_layers_are_an_error_on_every_rank():
    told = {}

    def work(grid):
        try:
            Conv2d(grid, grid.split((8, 8)), 1, 1, 3 if grid.rank else 9)
        except (UsageError, DisagreementError) as error:
            told[grid.rank] = str(error)
            raise

    with pytest.raises(UsageError):
        on_grid((2, 1), work)
    assert "`kernel_size` (=(9, 9)) reaches over 9" in told[0]
    assert "rank 0 cannot: `kernel_size` (=(9, 9))" in told[1]
