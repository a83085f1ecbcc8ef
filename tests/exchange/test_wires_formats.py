"""What is particular to one wire format: rules, closed forms, traffic, overflow."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import (
    BFloat16,
    Exact,
    Float16,
    FullPrecision,
    Int8,
    PowerSGD,
    TopK,
    WireFormat,
)
from tests.exchange.wiring import bucket, exchange, gradients, mean, transport, vector
from tests.helpers.ranks import run_ranks


@pytest.fixture(autouse=True)
def float32(float64: None) -> None:
    """What gradients usually are."""
    torch.set_default_dtype(torch.float32)


# -- 16 bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [7e4, -7e4])
def test_overflow_names_the_parameter_on_every_worker(bad: float) -> None:
    layout = bucket()
    flats = gradients(layout, 3)
    flats[1, layout.offsets[layout.names.index("bias")] + 1] = 3 * bad

    def worker(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            Float16().sum_(flats[comm.rank], layout, Float16().new_state(layout), transport(comm))
        return str(caught.value)

    for message in run_ranks(3, worker):
        assert message.startswith(
            "Parameter `bias` has a gradient beyond 65504, the largest number of `compression`"
            " (='fp16');"
            ' use "bf16", or lower the scale of the GradScaler'
        )
    assert mean(BFloat16(), layout, flats).isfinite().all()


def test_overflow_may_arrive_as_infinite_for_a_scaler() -> None:
    layout = vector(3)
    flats = torch.tensor([[1.0, 2e5, -2e5], [1.0, 0.0, 2e5]])
    result = mean(Float16(on_overflow="inf"), layout, flats)
    assert torch.equal(result.isfinite(), torch.tensor([[True, False, False]] * 2))


def test_sum_of_large_gradients_does_not_overflow() -> None:
    flats = torch.full((5, 4), 6e4)
    assert torch.allclose(mean(Float16(), vector(4), flats), flats, rtol=2**-10)
    assert not flats.half().sum(0).isfinite().any()  # what dividing afterwards would do


# -- 8 bits ----------------------------------------------------------------------------------


def test_int8_is_exact_where_whole_numbers_suffice() -> None:
    flats = torch.tensor([[127.0, -3.0, 50.0], [127.0, 3.0, 51.0], [127.0, 9.0, 52.0]])
    assert torch.equal(mean(Int8(), vector(3), flats)[0], torch.tensor([127.0, 3.0, 51.0]))


def test_int8_sends_later_what_it_rounded_off() -> None:
    """At the scale 1 of the block, 1.2 is sent as 1, the third time as 2."""
    flats = torch.tensor([[127.0, 1.2, 127.0, 1.2]] * 2)
    (results, _), _ = exchange(Int8(), vector(4), [flats] * 5)
    assert [float(x[1]) for x in results] == [1, 1, 2, 1, 1]


def test_int8_owner_repays_what_it_owes() -> None:
    """The mean 1.5 is sent as 2; the owner then asks for one less, which is half of it."""
    flats = torch.tensor([[127.0, 1.0, 127.0, 1.0], [127.0, 2.0, 127.0, 2.0]])
    (results, _), _ = exchange(Int8(), vector(4), [flats] * 4)
    assert [float(x[1]) for x in results] == [2, 1, 2, 1]
    assert [float(x[3]) for x in results] == [2, 1, 2, 1]


# -- traffic ---------------------------------------------------------------------------------


def sent_bytes(wire: WireFormat, layout: BucketLayout, size: int) -> list[int]:
    workers = exchange(wire, layout, [gradients(layout, size)], lambda _, t: t.sent_bytes)
    return [count for _, count in workers]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("wire", "share"), [(Float16(), 1 / 2), (Int8(), 1 / 4 * (1 + 4 / 256)), (Exact(), 1)]
)
def test_share_of_full_precision_bytes(wire: WireFormat, share: float, size: int) -> None:
    layout = vector(256 * 300)
    full = sent_bytes(FullPrecision(), layout, size)
    assert full == [2 * (size - 1) * layout.num_elements * 4 // size] * size
    for mine, whole in zip(sent_bytes(wire, layout, size), full, strict=True):
        assert mine == pytest.approx(share * whole, rel=1e-3)


def test_bytes_of_the_largest_elements() -> None:
    assert sent_bytes(TopK(fraction=0.01), vector(10_000, num_tail=7), 3) == [2 * (100 * 8 + 7)] * 3


def test_bytes_of_low_rank() -> None:
    """Two sums: P, whole tensors and tail; Q."""
    layout = bucket()
    p, q = 4 * (33 + 6), 4 * (17 + 27)
    whole = layout.num_elements - 33 * 17 - 6 * 27
    assert sent_bytes(PowerSGD(rank=4), layout, 2) == [(p + whole) * 4 + q * 4] * 2


# -- low rank --------------------------------------------------------------------------------


def test_low_rank_follows_the_published_rule() -> None:
    """One step of power iteration on the mean matrix, orthogonalised as torch's hook does."""
    wire, layout = PowerSGD(rank=3), bucket(torch.float64)
    flats = gradients(layout, 4)
    q_flat = wire.new_state(layout).tensors["q"]
    result = layout.views(mean(wire, layout, flats)[0])
    views = layout.views(flats.mean(0))
    start = 0
    for name, shape, value, whole in zip(layout.names, layout.shapes, result, views, strict=True):
        if name not in ("conv", "weight"):
            torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-14)
            continue
        m = whole.reshape(shape[0], -1)
        q = q_flat[start : start + 3 * m.shape[1]].view(-1, 3)
        start += q.numel()
        p = (m @ q).unsqueeze(0).contiguous()
        _orthogonalize(p)
        expected = p[0] @ (m.T @ p[0]).T
        torch.testing.assert_close(value.reshape(m.shape), expected, rtol=1e-10, atol=1e-12)
        assert (expected - m).norm() > 0.1 * m.norm()


def test_low_rank_finds_a_matrix_of_low_rank_at_once_and_follows_it() -> None:
    """Warm start: a constant matrix is approached step by step."""
    layout = bucket(torch.float64)
    flats = gradients(layout, 2)
    errors = []
    wire = PowerSGD(rank=4, error_feedback=False)
    (results, _), _ = exchange(wire, layout, [flats] * 30)
    errors = [float((result - flats.mean(0)).norm()) for result in results]
    singular = [
        torch.linalg.svdvals(view.reshape(view.shape[0], -1))
        for name, view in zip(layout.names, layout.views(flats.mean(0)), strict=True)
        if name in ("conv", "weight")
    ]
    best = torch.cat([s[4:] for s in singular]).norm()  # Eckart and Young
    assert best <= errors[-1] < 1.02 * best
    assert errors[0] > 1.1 * best


def test_low_rank_survives_a_step_without_gradients() -> None:
    layout = bucket(torch.float64)
    flats = gradients(layout, 2)
    wire = PowerSGD(error_feedback=False)
    (with_pause, _), _ = exchange(wire, layout, [flats, torch.zeros_like(flats), flats])
    (without, _), _ = exchange(wire, layout, [flats, flats])
    assert not with_pause[1].any()
    assert torch.equal(with_pause[2], without[1])


# -- largest elements --------------------------------------------------------------------------


def test_topk_in_closed_form() -> None:
    flats = torch.tensor([[1.0, 9.0, 2.0, 0.0], [8.0, 1.0, -3.0, 0.0]])
    steps = [flats, torch.zeros_like(flats)]
    (results, _), _ = exchange(TopK(fraction=0.25), vector(4), steps)
    assert torch.equal(results[0], torch.tensor([4.0, 4.5, 0.0, 0.0]))
    assert torch.equal(results[1], torch.tensor([0.0, 0.0, -0.5, 0.0]))  # what had waited
