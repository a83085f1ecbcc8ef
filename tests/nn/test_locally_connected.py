"""Locally connected layers against unfold and einsum on the whole array."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.nn import Grid, LocallyConnected2d, LocallyConnectedTranspose2d
from allstep.nn.filter_parts import cut_filters
from allstep.nn.local_products import Fields, correlations, responses, spread
from tests.nn.grids import GRIDS, on_grid, part, values, whole

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def unfolded(x: Tensor, kernel, stride) -> Tensor:
    """[batch, rows, columns, fan_in] with fan_in = kernel height * kernel width * channels."""
    fields = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    return fields.permute(0, 2, 3, 4, 5, 1).flatten(3)


def oracle(x: Tensor, weight: Tensor, bias: Tensor, kernel, stride, block) -> Tensor:
    """[batch, channel, height, width] by one product that has every block's field."""
    y = torch.einsum("bijk,ijfk->bijf", unfolded(x, kernel, stride), weight)
    batch, rows, columns, _ = y.shape
    depth, height, width = block
    y = y.view(batch, rows, columns, height, width, depth).permute(0, 5, 1, 3, 2, 4)
    return y.reshape(batch, depth, rows * height, columns * width) + bias.permute(2, 0, 1)


def decoder_oracle(y: Tensor, weight: Tensor, size, kernel, stride, block) -> Tensor:
    """The transpose of the encoder, as autograd finds it."""
    channels = weight.shape[3] // (kernel[0] * kernel[1])
    x = y.new_zeros(y.shape[0], channels, *size, requires_grad=True)
    zero = weight.new_zeros(1, 1, block[0])
    encoded = oracle(x, weight, zero, kernel, stride, block)
    return torch.autograd.grad(encoded, x, y, create_graph=True)[0]


def check(grid_shape, size, channels, kernel, stride, block):
    """Encoder, and decoder with a weight of its own: outputs and all gradients."""
    x = values(3, channels, *size)

    def make(grid):
        layout = grid.split(size)
        return LocallyConnected2d(
            grid, layout, channels, kernel, stride, block, seed=7, dtype=torch.float64
        )

    alone = make(Grid(Communicator.single_process()))
    x.requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (alone.weight, alone.bias))
    y = oracle(x, weight, bias, kernel, stride, block)
    again = weight.detach().clone().requires_grad_()
    z = decoder_oracle(y, again, size, kernel, stride, block)
    loss = (z**2 * values(*z.shape, seed=4)).sum() + (y**3).sum()
    expected = torch.autograd.grad(loss, (x, weight, bias, again))

    def work(grid):
        encoder = make(grid)
        decoder = LocallyConnectedTranspose2d(encoder, tied=False)
        own = part(x.detach(), encoder.in_layout.windows[grid.rank]).clone().requires_grad_()
        y = encoder(own)
        z = decoder(y)
        seeds = part(values(*x.shape, seed=4), encoder.in_layout.windows[grid.rank])
        ((z**2 * seeds).sum() + (y**3).sum()).backward()
        blocks = encoder.block_layout
        initial = encoder.weight.detach().clone()
        grads = (encoder.weight.grad, encoder.bias.grad, decoder.weight.grad)
        return (
            (encoder.in_layout, encoder.out_layout, blocks),
            (y.detach(), z.detach(), own.grad),
            (initial, *grads),
        )

    results = on_grid(grid_shape, work)
    (in_layout, out_layout, blocks) = results[0][0]
    y_got, z_got, x_grad = (
        whole([result[1][i] for result in results], layout)
        for i, layout in enumerate((out_layout, in_layout, in_layout))
    )
    initial, weight_grad, again_grad = (
        whole([result[2][i] for result in results], blocks, first_dim=0) for i in (0, 1, 3)
    )
    bias_grad = whole([result[2][2] for result in results], out_layout, first_dim=0)
    assert torch.equal(initial, weight.detach())
    got = (y_got, z_got, x_grad, weight_grad, bias_grad, again_grad)
    for mine, theirs in zip(got, (y.detach(), z.detach(), *expected), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


# size, channels, kernel, stride, block
SHAPES = (
    ((15, 13), 2, (5, 4), (2, 3), (3, 1, 1)),
    ((15, 13), 2, (4, 4), (2, 2), (2, 2, 3)),
    ((11, 9), 1, (8, 6), (1, 1), (4, 1, 1)),  # wider than a neighbour's whole window
    ((17, 9), 3, (2, 2), (3, 2), (2, 2, 1)),  # fields with gaps between them
)


@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoder_and_decoder(grid_shape, shape):
    check(grid_shape, *shape)


@settings(max_examples=10)
@given(
    st.sampled_from(GRIDS[1:]),
    st.tuples(*[st.integers(5, 14)] * 2),
    st.tuples(*[st.integers(1, 6)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(1, 2)] * 3),
)
def test_encoder_and_decoder_of_any_shape(grid_shape, size, kernel, stride, block):
    for d in range(2):
        assume(kernel[d] <= size[d] and (size[d] - kernel[d]) // stride[d] + 1 >= grid_shape[d])
    check(grid_shape, size, 2, kernel, stride, block)


def test_tied_decoder_adds_to_the_encoder_gradient():
    def work(grid):
        encoder = LocallyConnected2d(
            grid, grid.split((9, 9)), 1, 3, 2, (2, 1, 1), bias=False, seed=0, dtype=torch.float64
        )
        grads = []
        for tied in (True, False):
            encoder.weight.grad = None
            decoder = LocallyConnectedTranspose2d(encoder, tied=tied)
            own = part(values(2, 1, 9, 9), encoder.in_layout.windows[grid.rank])
            (decoder(encoder(own)) ** 2).sum().backward()
            grads.append(encoder.weight.grad + (0 if tied else decoder.weight.grad))
        return grads

    for tied, apart in on_grid((2, 2), work):
        torch.testing.assert_close(tied, apart, **CLOSE)


def test_local_products_pass_gradcheck_and_gradgradcheck():
    fields = Fields((3, 2), (2, 1))
    x = values(*fields.input_shape((2, 3)), 2, 2).requires_grad_()
    weight = values(2, 3, 2, 12, seed=1).requires_grad_()
    y = values(2, 3, 2, 2, seed=2).requires_grad_()
    for function, arguments in (
        (responses, (x, weight)),
        (spread, (y, weight)),
        (correlations, (y, x)),
    ):
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(a, b, fields), arguments)
        assert torch.autograd.gradgradcheck(lambda a, b, f=function: f(a, b, fields), arguments)


@pytest.mark.parametrize("buffer_bytes", [1, 5000])
def test_local_products_with_tiles_of_any_size(buffer_bytes):
    """[Note: tiles]: one field at a time, or a few, instead of a whole row."""
    fields = Fields((5, 4), (2, 3))
    tiled = Fields((5, 4), (2, 3), cpu_buffer_bytes=buffer_bytes)
    x, weight = values(*fields.input_shape((4, 7)), 2, 3), values(4, 7, 3, 40, seed=1)
    y = values(4, 7, 3, 3, seed=2)
    for function, arguments in (
        (responses, (x, weight)),
        (spread, (y, weight)),
        (correlations, (y, x)),
    ):
        torch.testing.assert_close(
            function(*arguments, tiled), function(*arguments, fields), **CLOSE
        )


def test_outputs_are_contiguous_batch_last():
    """[Note: batch last]: what one layer gives the next takes without a copy."""
    grid = Grid(Communicator.single_process())
    layer = LocallyConnected2d(grid, grid.split((6, 6)), 2, 3, 1, (2, 1, 1), seed=0)
    y = layer(torch.ones(5, 2, 6, 6))
    assert y.shape == (5, 2, 4, 4) and y.permute(2, 3, 1, 0).is_contiguous()


def test_each_worker_has_only_the_weight_of_its_part():
    def work(grid):
        layer = LocallyConnected2d(grid, grid.split((26, 26)), 2, 4, 2, (3, 1, 1), seed=0)
        return sum(p.numel() for p in layer.parameters())

    (alone,) = on_grid((1, 1), work)
    for grid_shape in GRIDS[1:]:
        counts = on_grid(grid_shape, work)
        assert sum(counts) == alone and max(counts) == alone / len(counts)


@pytest.mark.parametrize("is_differentiated_again", [False, True])
def test_cut_filters_write_gradients_in_place(is_differentiated_again):
    """[Note: gradient buffer]: no copy in a plain backward; one for second derivatives."""
    fields = Fields((3, 3), (1, 1))
    x = values(*fields.input_shape((2, 4)), 1, 2)
    weight = values(2, 4, 3, 9, seed=1).requires_grad_()
    full = weight.view_as(weight)
    parts = cut_filters(full, [(slice(0, 2), slice(0, 1)), (slice(0, 2), slice(1, 4))])
    storages, wholes = set(), []
    for filters in parts:
        filters.weight.register_hook(lambda g: storages.add(g.untyped_storage().data_ptr()))
    full.register_hook(lambda g: wholes.append(g.untyped_storage().data_ptr()))
    loss = sum(
        (filters.responses(x[:, columns], fields) ** 3).sum()
        for filters, columns in zip(parts, (slice(0, 3), slice(1, 6)), strict=True)
    )
    (found,) = torch.autograd.grad(loss, weight, create_graph=is_differentiated_again)
    (expected,) = torch.autograd.grad((responses(x, weight, fields) ** 3).sum(), weight)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (storages == set(wholes)) is not is_differentiated_again


def test_second_derivatives_of_a_split_layer():
    def work(grid):
        layer = LocallyConnected2d(
            grid, grid.split((9, 9)), 1, 3, 1, (2, 1, 1), bias=False, seed=0, dtype=torch.float64
        )
        x = part(values(2, 1, 9, 9), layer.in_layout.windows[grid.rank]).clone().requires_grad_()
        first = torch.autograd.grad((layer(x) ** 3).sum(), (x, layer.weight), create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, layer.weight))
        return layer.in_layout, layer.block_layout, second

    alone, split = (on_grid(shape, work) for shape in ((1, 1), (2, 2)))
    for i, layout in enumerate(split[0][:2]):
        got = whole([result[2][i] for result in split], layout, first_dim=(2, 0)[i])
        torch.testing.assert_close(got, alone[0][2][i], rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("grid_shape", [(1, 1), (2, 1)])
def test_layers_under_autocast_take_what_others_round(grid_shape):
    """Of bfloat16, as a `Conv2d` returns it, they make what they do of the same numbers."""

    def work(grid):
        encoder = LocallyConnected2d(
            grid, grid.split((6, 6)), 2, 3, 1, (2, 1, 1), seed=0, dtype=torch.float64
        )
        decoder = LocallyConnectedTranspose2d(encoder, tied=True)

        def found(x: Tensor, is_cast: bool) -> list[Tensor]:
            x.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                y = encoder(x)
                z = decoder(y.bfloat16() if is_cast else y.bfloat16().double())
            gradients = torch.autograd.grad(z.square().sum(), [encoder.weight, x])
            return [y, z, *(gradient.double() for gradient in gradients)]

        x = part(values(3, 2, 6, 6), encoder.in_layout.windows[grid.rank]).bfloat16()
        expected = found(x.double(), is_cast=False)
        expected[3] = expected[3].bfloat16().double()  # the gradient of x has the dtype of x
        torch.testing.assert_close(found(x, is_cast=True), expected, **CLOSE)

    on_grid(grid_shape, work)


def test_control_without_halo_gradients_differs():
    """The negative control: what a worker would get if nothing were sent back."""

    def work(grid):
        layer = LocallyConnected2d(
            grid, grid.split((8, 8)), 1, 3, 1, (1, 1, 1), seed=0, dtype=torch.float64
        )
        x = part(values(1, 1, 8, 8), layer.in_layout.windows[grid.rank])
        grads = []
        for keep in (True, False):
            own = x.clone().requires_grad_()
            windows = layer._windows
            y = layer(own)
            if not keep:  # only the outputs that need no neighbour
                inner = windows.inner.slices(windows.outputs)
                y = y[(slice(None), slice(None), *inner)]
            y.sum().backward()
            grads.append(own.grad)
        return (grads[0] - grads[1]).abs().max().item()

    assert min(on_grid((2, 1), work)) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 12}, r"`kernel_size` \(=\(12, 12\)\) reaches over 12"),
        ({"stride": 0}, r"`stride` \(=0\) must be an int of at least 1"),
        ({"kernel_size": 1.5}, r"`kernel_size` \(=1.5\) must be an int of at least 1, or two"),
        ({"in_channels": 0}, r"`in_channels` \(=0\) must be at least 1"),
        ({"in_layout": (8, 8)}, r"`in_layout` \(=\(8, 8\)\) must be a Layout: `grid.split\(shape"),
        ({"block": 4}, r"`block` \(=4\) must be depth, height and width"),
        ({"block": (2, 1)}, r"`block` \(=\(2, 1\)\) must be depth, height and width"),
        ({"block": (2, 0, 1)}, r"`block` \(=\(2, 0, 1\)\) must be depth, height and width"),
    ],
)
def test_bad_arguments(change, message):
    grid = Grid(Communicator.single_process())
    given = {"in_layout": grid.split((8, 8)), "in_channels": 1, "kernel_size": 3, "stride": 1}
    with pytest.raises(UsageError, match=message):
        LocallyConnected2d(grid, **{**given, "block": (2, 1, 1), **change})


def test_wrong_weight_shape_is_an_error_on_every_rank():
    told = {}

    def work(grid):
        layer = LocallyConnected2d(grid, grid.split((8, 8)), 1, 3, 1, (2, 1, 1), seed=0)
        if grid.rank == 1:
            layer.weight = torch.nn.Parameter(layer.weight[1:])
        try:
            layer(torch.ones(1, 1, *layer.in_layout.windows[grid.rank].shape))
        except (UsageError, DisagreementError) as error:
            told[grid.rank] = str(error)
            raise

    with pytest.raises(UsageError):
        on_grid((2, 1), work)
    assert "`weight` has shape [2, 6, 2, 9]; rank 1's 3 x 6 blocks need [3, 6, 2, 9]" in told[1]
    assert "rank 1 cannot: `weight` has shape [2, 6, 2, 9]" in told[0]


def test_wrong_number_of_channels():
    grid = Grid(Communicator.single_process())
    layer = LocallyConnected2d(grid, grid.split((8, 8)), 2, 3, 1, (2, 1, 1), seed=0)
    with pytest.raises(UsageError, match=r"`x` has shape \[1, 1, 8, 8\]; pass \[batch, 2, height"):
        layer(torch.ones(1, 1, 8, 8))


def test_oracle_with_shared_weights_is_convolution():
    """So that the oracle itself is not what the layer happens to do."""
    x, shared = values(2, 3, 7, 6), values(4, 3, 3, 2, seed=1)
    flat = shared.permute(0, 2, 3, 1).flatten(1)
    y = oracle(x, flat.expand(3, 3, 4, 18), x.new_zeros(1, 1, 4), (3, 2), (2, 2), (4, 1, 1))
    torch.testing.assert_close(y, F.conv2d(x, shared, stride=2))
