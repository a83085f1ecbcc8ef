"""Sums whose bits don't depend on order, grouping or the number of workers."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from allstep import Communicator
from allstep.comm.reproducible import (
    ReproducibleSum,
    carried,
    digits_of_squares,
    reproducible_all_reduce,
    sum_of_digits,
    sums_over_workers,
)
from tests.helpers.ranks import run_ranks


def terms_of(num: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of 60 orders of magnitude, both signs."""
    random = torch.Generator().manual_seed(num)
    exponents = torch.randint(-100, 100, (num, 1), generator=random)
    digits = torch.randn(num, size, generator=random, dtype=torch.float64)
    return list((digits * torch.exp2(exponents)).to(dtype))


def total(terms: list[Tensor]) -> Tensor:
    result = ReproducibleSum(terms[0])
    for term in terms:
        result.add(term)
    return result.total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_total_does_not_depend_on_the_order(dtype: torch.dtype) -> None:
    terms = terms_of(200, 50, dtype)
    expected = total(terms)
    orders = [torch.randperm(200, generator=torch.Generator().manual_seed(s)) for s in range(5)]
    assert all(torch.equal(total([terms[i] for i in order]), expected) for order in orders)
    plain = [torch.stack([terms[i] for i in order]).double().cumsum(0)[-1] for order in orders]
    assert not all(torch.equal(x, plain[0]) for x in plain)  # or the above would show nothing


@pytest.mark.parametrize("scales", [(1, 0.3, 2), (1, 1e20, 1e-20), (1, 0, 2), (1, math.nan, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_together_are_the_same_as_one_by_one(
    scales: tuple[float, ...], dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(1)
    terms = torch.randn(3, 20, generator=random, dtype=dtype)
    terms *= torch.tensor(scales, dtype=dtype)[:, None]
    together = ReproducibleSum(terms[0])
    together.add_each(terms)
    torch.testing.assert_close(together.total(), total([*terms]), rtol=0, atol=0, equal_nan=True)
    together.add_each(terms[:0])
    torch.testing.assert_close(together.total(), total([*terms]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 33), (torch.float64, 65)])
def test_error_is_that_of_the_docs(dtype: torch.dtype, digits: int) -> None:
    terms = [x / 2.0**80 for x in terms_of(30, 20, dtype)]
    found = total(terms)
    bound = sum(Fraction(float(x.abs().amax())) for x in terms) / 2**digits
    for column in range(20):
        exact = sum(Fraction(float(x[column])) for x in terms)
        assert abs(Fraction(float(found[column])) - exact) <= bound + abs(exact) / 2**52


@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_workers_get_the_total_of_one(num_workers: int, size: int) -> None:
    """Few numbers travel in one message; of many, the windows that are used."""
    first, second = terms_of(40, size, torch.float32), terms_of(21, 5, torch.float64)
    expected = [total(first), total(second)]

    def worker(comm: Communicator) -> list[Tensor]:
        sums = [ReproducibleSum(first[0]), ReproducibleSum(second[0])]
        for each, terms in zip(sums, (first, second), strict=True):
            for term in terms[comm.rank :: comm.size]:
                each.add(term)
        return reproducible_all_reduce(comm, sums)

    for found in run_ranks(num_workers, worker):
        assert all(map(torch.equal, found, expected))


def test_nonfinite_terms_arrive_and_leave_the_others_alone() -> None:
    values = [[math.inf, 1.0, math.nan, 2.0, math.inf], [1.0, 1.0, 1.0, 2.0, -math.inf]]
    found = total([torch.tensor(x) for x in values]).tolist()
    assert found[0] == math.inf
    assert found[1] == 2.0
    assert math.isnan(found[2])
    assert found[3] == 4.0
    assert math.isnan(found[4])


def test_numbers_beyond_all_windows_are_infinite() -> None:
    assert total([torch.tensor([2.0**161, -(2.0**161)], dtype=torch.float64)]).tolist() == [
        math.inf,
        -math.inf,
    ]


def test_sum_of_nothing_is_zero() -> None:
    assert ReproducibleSum(torch.ones(2, 3)).total().tolist() == [[0.0] * 3] * 2
    assert total([torch.zeros(0)]).shape == (0,)


def test_smallest_numbers_of_float32_are_kept() -> None:
    smallest = torch.tensor([2.0**-149, -(2.0**-140)])
    assert torch.equal(total([smallest, smallest]), 2 * smallest.double())


# -- parts of terms ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
def test_parts_of_sums_add_up_to_those_of_all_terms(num_workers: int) -> None:
    """As of gradients that workers know whole, and keep a shard of each."""
    terms = [x.view(6, 5) for x in terms_of(40, 30, torch.float32)]
    expected = total(terms)

    def worker(comm: Communicator) -> Tensor:
        halves = []
        for some in (terms[:17], terms[17:]):
            own = ReproducibleSum(terms[0])
            for term in some[comm.rank :: comm.size]:
                own.add(term)
            (whole,) = sums_over_workers(comm, [own])
            halves.append(whole.part((slice(2, 5), slice(0, 5))))
        halves[0].add_sum(halves[1])
        assert halves[0].shape == (3, 5)
        return halves[0].total()

    for found in run_ranks(num_workers, worker):
        assert torch.equal(found, expected[2:5])


def sum_of_squares(parts: Sequence[Tensor]) -> float:
    return float(sum_of_digits(carried(sum(map(digits_of_squares, parts)))))


@pytest.mark.parametrize("spread", [0, 4, 8])
def test_sums_of_squares_do_not_depend_on_the_cuts(spread: int) -> None:
    """Of numbers within one order of magnitude, and of sixteen and some thirty."""
    random = torch.Generator().manual_seed(spread)
    x = 1e-6 * torch.randn(400_000, generator=random)
    x *= torch.exp(spread * torch.randn(len(x), generator=random))
    expected = sum_of_squares([x])
    assert expected == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    plain = set()
    for num in (2, 3, 7, 50):
        ends = torch.randint(0, len(x), (num - 1,), generator=random).sort().values.tolist()
        parts = [x[a:b] for a, b in itertools.pairwise([0, *ends, len(x)])]
        assert sum_of_squares(parts[::-1]) == expected
        plain.add(sum(float(part.double().square().sum()) for part in parts))
    assert len(plain) > 1  # or the above would show nothing


def test_squares_of_which_half_a_unit_is_left() -> None:
    """A float64's square is rounded, so that its last bit may be half of a window's unit."""
    x = 2.0 ** torch.arange(-40, 40, dtype=torch.float64) * math.sqrt(2)
    expected = sum_of_squares([x])
    assert expected == math.fsum((x * x).tolist())
    assert all(sum_of_squares([x[:cut], x[cut:]]) == expected for cut in range(80))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e25])
def test_sum_of_squares_of_what_is_not_finite(bad: float) -> None:
    """A square of 2^160 or more counts as infinite."""
    x = torch.tensor([1.0, bad, 2.0])
    found = sum_of_squares([x[:2], x[2:]])
    assert math.isnan(found) if math.isnan(bad) else found == math.inf


def test_sum_of_squares_of_nothing() -> None:
    assert sum_of_squares([torch.zeros(0), torch.zeros(3, 2)]) == 0
