"""Counts the floating-point operations of a model, including some that torch does not count."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_Shape = Sequence[int]


def count_flops(function: Callable[[], object]) -> float | None:
    """Counts the floating-point operations of a function's matrix products and convolutions.

    Returns:
        Their number; None if no operation could be counted, which does not mean that it is zero.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48.0
    >>> count_flops(lambda: torch.ones(2) + 1)
    """
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        function()
    return float(counter.get_total_flops()) or None


def _formulas() -> dict[Any, Callable[..., int]]:
    """Operation -> formula, if this torch has it; formulas take shapes in place of tensors.

    [Note: backward] A backward pass does twice the forward pass's products; that of attention also
    computes the scores again, which torch's formulas for GPUs count, too.
    """
    formulas: dict[str, Callable[..., int]] = {
        "mkldnn_rnn_layer": _one_recurrent_layer,
        "mkldnn_rnn_layer_backward": _twice(_one_recurrent_layer),
        "_cudnn_rnn": _recurrent_layers,
        "_cudnn_rnn_backward": _twice(_recurrent_layers),
        "miopen_rnn": _recurrent_layers,
        "miopen_rnn_backward": _twice(_recurrent_layers),
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "mv": _matrix_vector,
        "addmv": lambda x, matrix, vector, **_: _matrix_vector(matrix, vector),
        "_trilinear": _bilinear,
    }
    return {
        getattr(torch.ops.aten, name): formula
        for name, formula in formulas.items()
        if hasattr(torch.ops.aten, name)
    }


def _one_recurrent_layer(x: _Shape, w_input: _Shape, w_hidden: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x[:-1]) * (prod(w_input) + prod(w_hidden))


def _recurrent_layers(
    x: _Shape, weights: Sequence[_Shape], num_each: int, *_: Any, **__: Any
) -> int:
    """Operations of recurrent layers.

    Each layer has two matrices, optionally two biases, and a projection matrix if the number of its
    weights is odd; under autocast all of them come as columns.
    """
    is_odd = num_each % 2
    matrices = (
        n
        for n in range(len(weights))
        if n % num_each < 2 or (is_odd and n % num_each == num_each - 1)
    )
    return 2 * prod(x[:-1]) * sum(prod(weights[n]) for n in matrices)


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    gradient: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any
) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _matrix_vector(matrix: _Shape, vector: _Shape, **_: Any) -> int:
    return 2 * prod(matrix)


def _bilinear(*shapes_and_axes: Any, **_: Any) -> int:
    """A sum over one index of a product of three tensors, after axes of size 1 are inserted."""
    sizes: list[list[int]] = []
    for shape, axes in zip(shapes_and_axes[:3], shapes_and_axes[3:6], strict=True):
        size = list(shape)
        for axis in sorted(axes):
            size.insert(axis, 1)
        sizes.append(size)
    largest: list[int] = [max(along) for along in zip(*sizes, strict=True)]
    return 2 * prod(largest)


def _twice(formula: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)
