"""What every wire format keeps: a bound, the same bits everywhere, the tail, the count."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from allstep.errors import UsageError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import (
    WIRES,
    BFloat16,
    Float16,
    FullPrecision,
    Int8,
    PowerSGD,
    TopK,
    WireFormat,
    make_wire,
)
from tests.exchange.wiring import bucket, gradients, mean, vector

FORMATS: dict[str, WireFormat] = {
    **{name: kind() for name, kind in WIRES.items()},
    "int8-blocks": Int8(block=7),
    "powersgd-1": PowerSGD(rank=1),
    "topk-30%": TopK(fraction=0.3),
}


def bound(wire: WireFormat, layout: BucketLayout, flats: Tensor) -> Tensor | float:
    """Of |result - mean|, as the formats' docstrings state it."""
    size, largest = len(flats), float(flats.double().abs().max()) if flats.numel() else 0.0
    rounding = 4 * size * torch.finfo(layout.flat_dtype).eps * largest
    if isinstance(wire, Float16):
        return size * (2**-11 * largest + 2**-25) + rounding
    if isinstance(wire, BFloat16):
        return size * 2**-8 * largest + rounding
    if isinstance(wire, Int8):
        return largest / 127 + rounding
    if isinstance(wire, TopK) and layout.num_elements:
        kept = -int(-wire.fraction * layout.num_elements // 1)
        values = flats.double().abs()
        least = values.topk(kept).values.amin(1, keepdim=True)
        return (values * (values <= least)).mean(0) + rounding  # what may have been left
    if isinstance(wire, PowerSGD) and size > 1:
        return left_by_low_rank(wire, layout, flats.double().mean(0)) + 30 * rounding
    return rounding


def left_by_low_rank(wire: PowerSGD, layout: BucketLayout, mean: Tensor) -> Tensor:
    """|M - P P^T M| of each matrix M, with P from one step of power iteration; else 0."""
    left = torch.zeros_like(mean)
    q_flat = wire.new_state(layout).tensors["q"].double()
    wide = replace(layout, dtype=torch.promote_types(layout.dtype, torch.float64))
    for matrix, error in zip(wide.views(mean), wide.views(left), strict=True):
        if matrix.dim() < 2 or not matrix.numel():
            continue
        m = torch.view_as_real(matrix) if matrix.is_complex() else matrix
        m = m.reshape(len(m), -1)
        rank = min(wire.rank, *m.shape)
        if rank * sum(m.shape) < m.numel():
            q, q_flat = q_flat[: rank * m.shape[1]], q_flat[rank * m.shape[1] :]
            p = torch.linalg.qr(m @ q.view(-1, rank)).Q
            difference = (m - p @ (p.T @ m)).abs()
            if matrix.is_complex():
                difference = torch.view_as_complex(difference.view(*matrix.shape, 2))
            error.copy_(difference.view(matrix.shape))
    return left


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_mean_within_the_stated_bound(name: str, size: int, dtype: torch.dtype) -> None:
    wire, layout = FORMATS[name], bucket(dtype)
    flats = gradients(layout, size)
    results = mean(wire, layout, flats)
    assert all(result.equal(results[0]) for result in results)  # the same bits everywhere
    error = (results[0].double() - flats.double().mean(0)).abs()
    assert (error <= bound(wire, layout, flats)).all()
    assert (flats.double().mean(0).abs() > bound(wire, layout, flats)).any()  # no zeros would do
    if size > 1:
        assert (flats[0].double() - flats.double().mean(0)).abs().max() > 0.1


@pytest.mark.parametrize("num_elements", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_bucket_sizes_that_the_workers_do_not_divide(name: str, num_elements: int) -> None:
    wire, layout = FORMATS[name], vector(num_elements, num_tail=3)
    flats = gradients(layout, 3)
    results = mean(wire, layout, flats)
    error = (results[0].double() - flats.double().mean(0)).abs()
    assert (error <= bound(wire, layout, flats)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"powersgd", "powersgd-1"}))
def test_gradients_in_16_bits(name: str, dtype: torch.dtype) -> None:
    wire, layout = FORMATS[name], bucket(dtype)
    flats = gradients(layout, 3)
    results = mean(wire, layout, flats)
    assert results.dtype == dtype
    assert all(result.equal(results[0]) for result in results)
    error = (results[0].double() - flats.double().mean(0)).abs()
    assert (error <= bound(wire, layout, flats)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_complex_gradients(name: str) -> None:
    wire, layout = FORMATS[name], bucket(torch.complex64)
    flats = gradients(layout, 2)
    results = mean(wire, layout, flats)
    error = (results[0].double() - flats.double().mean(0)).abs()
    assert (error <= bound(wire, layout, flats)).all()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_tail_sum_is_zero_where_digits_cancel(name: str, size: int) -> None:
    """Two workers' digits with opposite signs, and flags."""
    wire, layout = FORMATS[name], bucket(num_tail=3 * 128 + 2)
    flats = gradients(layout, size)
    tails = flats[:, layout.num_elements :]
    digits = torch.arange(128.0)
    tails[0, :128], tails[1, :128] = digits, -digits
    tails[0, 128:256], tails[1, 128:256] = digits, -digits.roll(1)
    tails[0, 256:384], tails[-1, 256:384] = digits, -(127 - digits)
    tails[:, 384] = 1
    for result in mean(wire, layout, flats)[:, layout.num_elements :]:
        assert torch.equal(result == 0, tails.sum(0) == 0)
        assert torch.equal(result > 0, tails.sum(0) > 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_nonfinite_gradients_arrive_everywhere_and_stay_out_of_residuals(
    name: str, bad: float
) -> None:
    """A GradScaler must see it on every worker; the next step must be as if it hadn't been."""
    wire, layout = FORMATS[name], bucket()
    flats = gradients(layout, 3)
    bad_flats = flats.clone()
    bad_flats[1, layout.offsets[layout.names.index("weight")] + 5] = bad
    for results in mean_of_steps(wire, layout, [bad_flats, flats, flats]):
        assert not results[0].isfinite().all()
        error = (results[2].double() - flats.double().mean(0)).norm()
        assert error <= 2 * flats.double().norm()  # with what the residuals add


def mean_of_steps(
    wire: WireFormat, layout: BucketLayout, steps: list[Tensor]
) -> list[list[Tensor]]:
    from tests.exchange.wiring import exchange

    return [results for results, _ in exchange(wire, layout, steps)]


def test_names_and_parameters() -> None:
    assert isinstance(make_wire("fp32"), FullPrecision)
    assert make_wire(Int8(block=64)) == Int8(block=64)
    assert [make_wire(name).name for name in WIRES] == list(WIRES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_wire("bf61"),
            r"`compression` \(='bf61'\): did you mean `bf16`",
        ),
        (lambda: make_wire(3), r"`compression` \(=3\): valid: `fp32`"),
        (lambda: Int8(block=0), r"`block` \(=0\) must be at least 1"),
        (lambda: PowerSGD(rank=0), r"`rank` \(=0\) must be at least 1; 1 to 4 is usual"),
        (lambda: TopK(fraction=0), r"`fraction` \(=0\) must be above 0 and at most 1"),
        (lambda: Float16(on_overflow="no"), r"`on_overflow` \(='no'\): valid: `raise`, `inf`"),
    ],
)
def test_wrong_parameters(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
