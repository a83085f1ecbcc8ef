"""Exact sums: the same bits on any number of workers, close to what float64 says."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, Stale, Synchronous, attach
from allstep.exchange.grid import Grid, Unit
from tests.helpers.ranks import run_ranks

EXACT = Synchronous(compression="exact")
SIZES = (2, 3, 7)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 80), nn.Tanh(),
            nn.Linear(80, 4),
        ).float()  # fmt: skip


def pictures(num: int) -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(num, 1, 6, 6, generator=random, dtype=torch.float32)
    return TensorDataset(x, torch.randint(0, 4, (num,), generator=random))


NET, PICTURES = net(), pictures(70)


def train(
    comm: Communicator,
    policy: ExchangePolicy = EXACT,
    *,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adadelta,
    num_epochs: int = 4,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    clip_norm: float | None = None,
) -> dict[str, Tensor]:
    """The parameters after global batches of 25 and 20, in micro-batches of 5 and fewer."""
    model = prepare(copy.deepcopy(NET))
    dtype = next(model.parameters()).dtype
    exchange = attach(model, comm, policy)
    loader = allstep.data.loader(PICTURES, comm, global_batch=25, micro_batch=5)
    optimizer = make_optimizer(model.parameters(), lr=0.5)
    for _ in range(num_epochs):
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(nn.functional.cross_entropy(model(x.to(dtype)), y))
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if exchange.has_gradients:
                optimizer.step()
            optimizer.zero_grad()
    for _ in exchange.flush():
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_same_on_any_number(worker: Callable[[Communicator], dict[str, Tensor]]) -> None:
    alone = worker(Communicator.single_process())
    for size in SIZES:
        for found in run_ranks(size, worker):
            assert all(torch.equal(found[name], alone[name]) for name in alone), size


@pytest.mark.parametrize("make_optimizer", [torch.optim.Adadelta, torch.optim.SGD])
def test_parameters_have_the_same_bits_on_any_number_of_workers(
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    assert_same_on_any_number(lambda comm: train(comm, make_optimizer=make_optimizer))


def test_plain_sums_would_differ() -> None:
    fp32 = Synchronous()
    alone = train(Communicator.single_process(), fp32)
    found = [run_ranks(size, lambda comm: train(comm, fp32))[0] for size in SIZES]
    assert not all(torch.equal(x["0.weight"], alone["0.weight"]) for x in found)


@pytest.mark.parametrize("algorithm", ["native", "ring", "halving_doubling", "shared_memory"])
def test_every_algorithm_gives_the_same_bits(algorithm: str) -> None:
    alone = train(Communicator.single_process(), num_epochs=2)
    policy = Synchronous(compression="exact", algorithm=algorithm)
    for found in run_ranks(4, lambda comm: train(comm, policy, num_epochs=2)):
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def test_late_gradients_have_the_same_bits() -> None:
    assert_same_on_any_number(lambda comm: train(comm, Stale(compression="exact")))


def test_clipped_gradients_have_the_same_bits() -> None:
    assert_same_on_any_number(lambda comm: train(comm, clip_norm=0.1))


def test_channels_last_gradients_have_the_same_bits() -> None:
    def prepare(model: nn.Module) -> nn.Module:
        return model.to(memory_format=torch.channels_last)

    assert_same_on_any_number(lambda comm: train(comm, prepare=prepare))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_have_the_same_bits(dtype: torch.dtype) -> None:
    assert_same_on_any_number(
        lambda comm: train(comm, prepare=lambda model: model.to(dtype), num_epochs=2)
    )


# -- one parameter, whose micro-batches' gradients are given ----------------------------------


class Given(nn.Module):
    """Its gradient is its input's mean."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(*shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(0) * self.p).sum()


def sums_of(
    comm: Communicator, steps: Tensor, before: Tensor | None = None, policy: ExchangePolicy = EXACT
) -> list[Tensor]:
    """What `p.grad` is after each global batch.

    Args:
        comm: the workers.
        steps: [num_steps, num_micro_batches, *shape], the micro-batches' gradients.
        before: what it holds before each.
        policy: how to exchange.
    """
    _, num_micro_batches, *shape = steps.shape
    model = Given(*shape, dtype=steps.dtype)
    exchange = attach(model, comm, policy)
    data = TensorDataset(steps.flatten(0, 1))
    loader = allstep.data.loader(
        data, comm, global_batch=num_micro_batches, micro_batch=1, shuffle=False
    )
    found = []
    for batch in allstep.steps(loader, exchange):
        model.p.grad = None if before is None else before.clone()
        for (x,) in batch:
            batch.backward(model(x))
        assert model.p.grad is not None
        found.append(model.p.grad.clone())
    return found


def assert_sums(steps: Tensor, tolerances: dict[int, float], usual: float) -> None:
    """Same bits on any number of workers, and errors as a share of the row's largest sum."""
    alone = sums_of(Communicator.single_process(), steps)
    for size in (2, 3):
        for found in run_ranks(size, lambda comm: sums_of(comm, steps)):
            assert all(map(torch.equal, found, alone)), size
    for number, (found, terms) in enumerate(zip(alone, steps, strict=True)):
        oracle = terms.double().mean(0)
        largest = oracle.abs().amax(-1, keepdim=True)
        error = float(((found.double() - oracle).abs() / largest.clamp(min=1e-300)).max())
        assert error <= tolerances.get(number, usual), (number, math.log2(error))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("num_micro_batches", "digits"), [(1, 16), (5, 13), (64, 11), (256, 9)])
def test_error_is_small_beside_the_largest_of_the_row(num_micro_batches: int, digits: int) -> None:
    """The more terms, the more of the 24 digits a sum needs for itself."""
    steps = 0.3 + noise(4, num_micro_batches, 3, 80)
    assert_sums(steps, {0: 2.0**-23}, 2.0**-digits)


def test_float64_keeps_its_digits() -> None:
    steps = 0.3 + noise(4, 7, 3, 80, dtype=torch.float64)
    assert_sums(steps, {}, 2.0**-43)


def test_gradients_that_jump_by_a_million() -> None:
    steps = 0.3 + noise(6, 5, 2, 80)
    steps[2:4] *= 1e6  # what does not fit is summed apart; then units are coarser, for a while
    assert_sums(steps, {4: 2.0**-3, 5: 2.0**-3}, 2.0**-13)


@pytest.mark.parametrize(("fall", "digits"), [(1e-2, 8), (1e-3, 5), (1e-4, 2), (1e-6, 13)])
def test_gradients_that_fall(fall: float, digits: int) -> None:
    """From a look at the sums on digits are lost at most; what falls far is summed apart."""
    steps = 0.3 + noise(6, 5, 2, 80)
    steps[3:] *= fall
    assert_sums(steps, {}, 2.0**-digits)


def test_units_follow_gradients_that_have_fallen() -> None:
    """As at the end of a training: after 16 exchanges all digits are there again."""
    grid, random = Grid(), torch.Generator().manual_seed(0)
    for number in range(64):
        grid.begin(4)
        terms = torch.randn(4, 2, 80, generator=random) * (1.0 if number < 20 else 1e-4)
        rounded = []
        for term in terms:
            grid.begin_micro_batch()
            rounded.append(grid.round("p", term))
        if all(x is not None for x in rounded):
            error = max(float((x - y).abs().max()) for x, y in zip(rounded, terms, strict=True))
            if number in (0, 19, 33, 63):
                assert error < 2.0**-16 * float(terms.abs().max()), number
        for name in grid.names_to_look_at(number, ["p"], []):
            grid.look_at({name: terms.sum(0)})


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_gradients_lie_in_memory_in_another_order(is_last: bool, is_large: bool) -> None:
    """As those of a convolution whose input alone is channels-last, or whose weight is."""

    def summed(comm: Communicator, policy: ExchangePolicy) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Conv2d(64, 64 if is_large else 8, 3, bias=False).float()
        if is_last:
            model = model.to(memory_format=torch.channels_last)
        exchange = attach(model, comm, policy)
        data = TensorDataset(noise(8, 64, 4, 4))
        loader = allstep.data.loader(data, comm, global_batch=8, micro_batch=2)
        for _ in range(2):
            for batch in allstep.steps(loader, exchange):
                model.zero_grad()
                for (x,) in batch:
                    order = torch.contiguous_format if is_last else torch.channels_last
                    batch.backward(model(x.to(memory_format=order)).square().mean())
        return model.weight.grad.clone()

    lone = Communicator.single_process()
    expected, alone = summed(lone, Synchronous()), summed(lone, EXACT)
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-6)
    for found in run_ranks(2, lambda comm: summed(comm, EXACT)):
        assert torch.equal(found, alone)


def test_rounding_keeps_every_element_in_its_place() -> None:
    shapes = [torch.randn(8)[:, None].expand(8, 300), torch.randn(64, 4, 50).permute(1, 0, 2)]
    shapes += [torch.randn(300, 8).t(), torch.randn(9, 80)[:, ::2], torch.randn(4, 9, 3, 3)]
    for gradient in shapes:
        grid = Grid()
        grid.begin(4)
        grid.look_at({"p": gradient})
        orders = [None, torch.zeros(gradient.shape), torch.zeros_like(gradient)]
        orders += [torch.zeros(gradient.shape[::-1]).permute(*reversed(range(gradient.dim())))]
        for out in orders:
            grid.begin_micro_batch()
            rounded = grid.round("p", gradient, out)
            torch.testing.assert_close(rounded, gradient, rtol=0, atol=1e-5)
            if out is not None:
                grid.begin_micro_batch()
                twice = grid.round("p", gradient, out, adds=True)
                assert twice is out
                torch.testing.assert_close(out, 2 * gradient, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_terms", [2, 64, 1024])
def test_largest_magnitudes_stay_finite(num_terms: int) -> None:
    for top in (1e34, 1e36, 1e38, 3e38):
        grid, total = Grid(), torch.full((1, 80), top)
        grid.begin(num_terms)
        grid.look_at({"p": total})
        rounded = grid.round("p", total / num_terms)
        assert rounded is None or bool((num_terms * rounded).isfinite().all())


def test_gradients_of_zeros() -> None:
    steps = 0.3 + noise(5, 3, 2, 80)
    steps[1:3] = 0
    steps[3, 1:] = 0
    assert_sums(steps, {}, 2.0**-14)


def test_sums_of_zeros_tell_nothing_of_later_ones() -> None:
    grid, gradient = Grid(), 0.3 + noise(3, 80)
    for total, off_grid in ((gradient, ["p"]), (torch.zeros(3, 80), []), (torch.zeros(3, 80), [])):
        grid.begin(2)
        grid.look_at({"p": total}, off_grid)
    assert grid.round("p", gradient) is not None


def test_one_element_is_a_hundred_million_times_the_rest() -> None:
    """The rest of its row is below what float32 itself keeps of the largest; other rows aren't."""
    steps = 0.3 + noise(5, 5, 2, 80)
    steps[:, :, 0, 7] *= 1e8
    assert_sums(steps, {}, 2.0**-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_gradients_arrive(bad: float) -> None:
    steps = 0.3 + noise(4, 5, 2, 80)
    steps[2, 3, 1, 4] = bad
    alone = sums_of(Communicator.single_process(), steps)
    assert str(float(alone[2][1, 4])) == str(bad)
    assert int(alone[2].isfinite().sum()) == 2 * 80 - 1
    assert alone[3].isfinite().all()
    for found in run_ranks(3, lambda comm: sums_of(comm, steps)):
        assert all(
            torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, alone, strict=True)
        )


def test_overflow_of_a_sum_is_infinite() -> None:
    steps = torch.full((2, 2, 1, 80), 3e38, dtype=torch.float32)
    steps[1, 1] = -3e38
    alone = sums_of(Communicator.single_process(), steps)
    assert torch.equal(alone[0], torch.full((1, 80), 3e38, dtype=torch.float32))
    assert not alone[1].any()


def test_what_p_grad_held_before_counts_once() -> None:
    steps, before = 0.3 + noise(3, 6, 2, 80), noise(2, 80, seed=1)
    without = sums_of(Communicator.single_process(), steps)
    for size in (1, 2, 3):
        for found in run_ranks(size, lambda comm: sums_of(comm, steps, before)):
            assert all(torch.equal(x, y + before) for x, y in zip(found, without, strict=True))


def test_workers_that_hold_other_gradients_before_are_named() -> None:
    def worker(comm: Communicator) -> None:
        before = torch.full((2, 80), float(comm.rank), dtype=torch.float32)
        with pytest.raises(DisagreementError, match="added to a gradient of `p`"):
            sums_of(comm, noise(1, 6, 2, 80), before)

    run_ranks(2, worker)


def test_float32_sums_would_differ() -> None:
    steps = 0.3 + noise(1, 6, 2, 80)
    alone = sums_of(Communicator.single_process(), steps, policy=Synchronous())
    found = run_ranks(3, lambda comm: sums_of(comm, steps, policy=Synchronous()))
    assert not torch.equal(found[0][0], alone[0])


# -- loops ------------------------------------------------------------------------------------


def test_several_models_and_backward_passes() -> None:
    """The fifth gradient of a micro-batch leaves the grid, and the bits are the same still."""

    def worker(comm: Communicator) -> dict[str, Tensor]:
        models = [copy.deepcopy(NET), copy.deepcopy(NET)]
        exchanges = [attach(model, comm, EXACT) for model in models]
        loader = allstep.data.loader(PICTURES, comm, global_batch=25, micro_batch=5)
        for batch in allstep.steps(loader, *exchanges):
            for x, y in batch:
                for scale in (1, 2, 3, 4, 5):
                    loss = nn.functional.cross_entropy(models[0](scale * x) + models[1](x), y)
                    batch.backward(loss)
            for model in models:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                model.zero_grad()
        return {f"{i}.{n}": p for i, m in enumerate(models) for n, p in m.state_dict().items()}

    assert_same_on_any_number(worker)


def test_resumed_on_another_number_of_workers() -> None:
    """The units are part of a checkpoint; without them the next sums would be other ones."""

    def worker(comm: Communicator, state: dict[str, object] | None) -> dict[str, object]:
        model = copy.deepcopy(NET)
        exchange = attach(model, comm, EXACT)
        loader = allstep.data.loader(PICTURES, comm, global_batch=25, micro_batch=5)
        if state is not None:
            model.load_state_dict(state["model"])
            loader.load_state_dict(state["loader"])
            exchange.load_state_dict(copy.deepcopy(state["exchange"]))
        for _ in range(3):
            for batch in allstep.steps(loader, exchange):
                for x, y in batch:
                    batch.backward(nn.functional.cross_entropy(model(x), y))
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.3 * p.grad
                model.zero_grad()
        return {
            "model": copy.deepcopy(model.state_dict()),
            "loader": loader.state_dict(),
            "exchange": exchange.state_dict(),
        }

    lone = Communicator.single_process()
    expected = worker(lone, worker(lone, None))
    half = run_ranks(3, lambda comm: worker(comm, None))[0]
    for size in (1, 2, 4):
        found = run_ranks(size, lambda comm: worker(comm, half))[0]
        for name, tensor in expected["model"].items():
            assert torch.equal(found["model"][name], tensor), (size, name)
    no_units = {**half, "exchange": {**half["exchange"], "grid": None}}
    found = worker(lone, no_units)
    assert not torch.equal(found["model"]["3.weight"], expected["model"]["3.weight"])


def test_local_gradients_hold_what_left_the_grid() -> None:
    def worker(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = Given(2, 80)
        exchange = attach(model, comm, EXACT)
        data = TensorDataset(noise(4, 2, 80))
        loader = allstep.data.loader(data, comm, global_batch=4, micro_batch=1, shuffle=False)
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                batch.backward(model(x), exchange=False)
                local = exchange.local_gradients()["p"].clone()
        return local, model.p.grad

    found = run_ranks(2, worker)
    torch.testing.assert_close(found[0][0] + found[1][0], noise(4, 2, 80).mean(0))
    assert torch.equal(found[0][1], found[1][1])


def test_changed_local_gradients_are_refused() -> None:
    def worker(comm: Communicator) -> None:
        model = Given(2, 80)
        exchange = attach(model, comm, EXACT)
        data = TensorDataset(noise(4, 2, 80))
        loader = allstep.data.loader(data, comm, global_batch=4, micro_batch=1)
        with pytest.raises(UsageError, match="gradient of `p` was changed"):
            for batch in allstep.steps(loader, exchange):
                for (x,) in batch:
                    batch.backward(model(x), exchange=False)
                    model.p.grad.mul_(2)

    run_ranks(2, worker)


def test_second_derivatives_keep_their_graph() -> None:
    def worker(comm: Communicator) -> list[Tensor]:
        model = nn.Linear(3, 1).float()
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, 0.3)
        exchange = attach(model, comm, EXACT)
        x = noise(6, 3)
        loader = allstep.data.loader(TensorDataset(x), comm, global_batch=6, micro_batch=1)
        for _ in range(2):
            for batch in allstep.steps(loader, exchange):
                model.zero_grad()
                for (part,) in batch:
                    part.requires_grad_()
                    (slope,) = torch.autograd.grad(
                        model(part).square().sum(), part, create_graph=True
                    )
                    batch.backward(slope.square().sum())
        return [p.grad for p in model.parameters()]

    alone = worker(Communicator.single_process())
    for found in run_ranks(3, worker):
        assert all(map(torch.equal, found, alone))


def test_an_aborted_batch_leaves_nothing_behind() -> None:
    steps = 0.3 + noise(1, 2, 2, 80)

    def worker(comm: Communicator) -> Tensor:
        model = Given(2, 80)
        exchange = attach(model, comm, EXACT)
        model.p.grad = torch.ones(2, 80, dtype=torch.float32)
        with pytest.raises(ZeroDivisionError), exchange.global_batch(0, num_micro_batches=2):
            with exchange.no_sync():
                model(steps[0]).backward()
            raise ZeroDivisionError
        model.p.grad = None
        with exchange.global_batch(0, num_micro_batches=2):
            model(steps[0]).backward()
        return model.p.grad

    expected = sums_of(Communicator.single_process(), steps)[0]
    for found in run_ranks(1, worker):
        torch.testing.assert_close(found, expected)


def test_what_left_the_grid_stays_when_a_parameter_joins_in_the_middle_of_a_batch() -> None:
    def worker(comm: Communicator, policy: ExchangePolicy) -> Tensor:
        model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float32))
        exchange = attach(model, comm, policy)
        x = torch.ones(1, 3, dtype=torch.float32)
        with exchange.global_batch(0, num_micro_batches=2 * comm.size):
            with exchange.no_sync():
                model(x).sum().backward()  # whose units nobody knows
            model.append(nn.Linear(3, 3, dtype=torch.float32))
            nn.init.constant_(model[1].weight, 0.5)
            model(x).sum().backward()
        return model[0].bias.grad.clone()

    for policy in (Synchronous(), EXACT):
        for found in run_ranks(2, lambda comm, policy=policy: worker(comm, policy)):
            assert found.tolist() == [5.0] * 3


def test_complex_parameters_are_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(UsageError, match="sums can't be made exact"):
        attach(model, Communicator.single_process(), EXACT)


def test_steps_off_the_grid_are_few() -> None:
    """With gradients as noisy as these; the first step, whose units nobody knows, is one."""
    grid, random = Grid(), torch.Generator().manual_seed(0)
    num_off = 0
    for number in range(200):
        grid.begin(16)
        terms = 0.02 + torch.randn(16, 4, 100, generator=random)
        has_left = False
        for term in terms:
            grid.begin_micro_batch()
            has_left |= grid.round("p", term / 16) is None
        num_off += has_left
        for name in grid.names_to_look_at(number, ["p"], ["p"] if has_left else []):
            grid.look_at({name: terms.mean(0)}, ["p"] if has_left else [])
    assert num_off == 1


def test_steps_off_the_grid_are_few_with_rows_that_are_quiet_for_long() -> None:
    """As those of an embedding whose rare words come again after hundreds of steps."""
    grid, random = Grid(), torch.Generator().manual_seed(0)
    num_off = 0
    for number in range(600):
        grid.begin(2)
        terms = 2.0**-10 * torch.randn(2, 500, 64, generator=random)
        words = torch.randint(0, 500, (2, 3), generator=random)
        for term, of_term in zip(terms, words, strict=True):
            term[of_term] += 1
        rounded = []
        for term in terms:
            grid.begin_micro_batch()
            rounded.append(grid.round("p", term))
        off = ["p"] if any(x is None for x in rounded) else []
        num_off += number >= 10 and bool(off)
        for name in grid.names_to_look_at(number, ["p"], off):
            grid.look_at({name: terms.sum(0)}, off)
        if not off:
            errors = [float((x - y).abs().max()) for x, y in zip(rounded, terms, strict=True)]
            assert max(errors) < 2.0**-18
    assert num_off <= 6  # all 590 if rows were taken for as quiet as they have been


@pytest.mark.parametrize("spread", [1.0, 3.0, 15.0, 100.0])  # of the rows' limits
def test_one_look_at_all_rows_decides_as_one_at_each(spread: float) -> None:
    generator = torch.Generator().manual_seed(int(spread))
    limit = 1 + (spread - 1) * torch.rand(8, generator=generator)
    unit = Unit(torch.ones(8, 1), limit, smallest=2.0**-20)
    decisions = []
    for exponent in torch.linspace(-24, 6, 200).tolist():
        rows = 2**exponent * torch.randn(8, 30, generator=generator)
        rows *= torch.rand(8, 1, generator=generator) < 0.7
        shares = rows.double().abs().amax(1) / limit.double()
        fits = bool((shares <= 1).all()) and bool((shares >= 2.0**-20).any() or (rows == 0).all())
        assert unit.is_good(unit.share_of(rows)) == fits
        decisions.append(fits)
        rows[3, 4] = torch.nan
        assert not unit.is_good(unit.share_of(rows))
    assert 20 < sum(decisions) < 180
    assert unit.share_of(torch.zeros(8, 30)) == 0
