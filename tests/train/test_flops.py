"""Operations are counted as by hand, on the paths that torch's counter does not know, too."""

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allstep.train.flops import _recurrent_layers, count_flops

STEPS, BATCH, WIDTH, HIDDEN = 7, 5, 6, 8


def forward_and_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    x = x.clone().requires_grad_()
    return count_flops(lambda: function(x).sum().backward())


def recurrent_flops(gates: int, *, layers: int = 1, directions: int = 1) -> int:
    """Of the products with all weights, once forward and twice backward."""
    widths = [WIDTH] + [directions * HIDDEN] * (layers - 1)
    weights = sum(directions * gates * HIDDEN * (width + HIDDEN) for width in widths)
    return 3 * 2 * STEPS * BATCH * weights


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"num_layers": 3},
        {"num_layers": 2, "bidirectional": True},
        {"dtype": torch.float64},
    ],
)
def test_recurrent_layers(kind: type[nn.RNNBase], gates: int, form: dict[str, object]) -> None:
    net = kind(WIDTH, HIDDEN, **form)
    x = torch.randn(STEPS, BATCH, WIDTH).to(net.weight_hh_l0.dtype)
    if net.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if net.bidirectional else 1
    expected = recurrent_flops(gates, layers=net.num_layers, directions=directions)
    # Where torch goes step by step, it leaves out the gradient of the first hidden state.
    left_out = 2 * BATCH * gates * HIDDEN**2 * net.num_layers * directions
    counted = forward_and_backward(lambda x: net(x)[0], x)
    assert counted in (expected, expected - left_out)
    assert count_flops(lambda: net(x)) == expected / 3


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal: bool) -> None:
    batch, heads, queries, keys, width, value_width = 2, 4, 16, 16, 8, 8
    key = torch.randn(batch, heads, keys, width)
    value = torch.randn(batch, heads, keys, value_width)
    scores = 2 * batch * heads * queries * keys * width
    values = 2 * batch * heads * queries * keys * value_width

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    query = torch.randn(batch, heads, queries, width)
    assert count_flops(lambda: attend(query)) == scores + values
    # The scores once more, then the gradients of query, key, scores and value.
    assert forward_and_backward(attend, query) == scores + values + 3 * scores + 2 * values


def test_attention_counts_as_much_as_its_products_by_hand() -> None:
    query = torch.randn(2, 4, 16, 8)
    key, value = torch.randn(2, 2, 4, 24, 8).unbind()
    fused = count_flops(lambda: F.scaled_dot_product_attention(query, key, value))
    by_hand = count_flops(lambda: torch.softmax(query @ key.mT, -1) @ value)
    assert fused == by_hand


def test_a_bilinear_layer_and_a_matrix_times_a_vector() -> None:
    layer = nn.Bilinear(3, 4, 5)
    x, y = torch.randn(2, 3), torch.randn(2, 4)
    assert count_flops(lambda: layer(x, y)) == 2 * 2 * 3 * 4 * 5
    matrix = torch.randn(6, 7)
    assert count_flops(lambda: matrix @ torch.randn(7)) == 2 * 6 * 7
    assert count_flops(lambda: torch.addmv(torch.zeros(6), matrix, torch.randn(7))) == 2 * 6 * 7


def test_cudnn_formula_takes_its_arguments_as_they_come() -> None:
    """Without a GPU: shapes as the counter hands them over."""
    net = nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True)
    shapes = [p.shape for p in net.parameters()]
    flops = _recurrent_layers((STEPS, BATCH, WIDTH), shapes, 4, None)
    assert flops == recurrent_flops(4, layers=2, directions=2) / 3
    columns = [(prod(shape), 1) for shape in shapes]  # under autocast
    assert _recurrent_layers((STEPS, BATCH, WIDTH), columns, 4, None) == flops
    projected = nn.LSTM(WIDTH, HIDDEN, proj_size=3)
    shapes = [p.shape for p in projected.parameters()]
    matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
    flops = _recurrent_layers((STEPS, BATCH, WIDTH), shapes, 5, None)
    assert flops == 2 * STEPS * BATCH * matrices


def test_what_cannot_be_counted_is_not_known() -> None:
    assert count_flops(lambda: torch.randn(9).sin()) is None
