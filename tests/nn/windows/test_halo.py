"""What each worker gets, gives back and sends, against slices of the whole array."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.comm import Communicator
from allstep.comm.group_wire import GroupWire
from allstep.errors import CollectiveTimeoutError, DisagreementError, PeerLostError, UsageError
from allstep.nn.windows import (
    Grid,
    HaloStats,
    Layout,
    Window,
    halo_gather,
    halo_scatter_add,
    plan_halo,
    redistribute,
    start_halo_gather,
    start_halo_scatter_add,
)
from tests.helpers.ranks import run_ranks
from tests.nn.grids import GRIDS, mirrored, on_grid, part, values, whole

SHAPE = (11, 7)


def wider(layout: Layout, margin: int) -> tuple[Window, ...]:
    """Output windows and so many positions around, some of them outside of the array."""
    return tuple(
        Window(tuple(a - margin for a in w.start), tuple(b + margin + 1 for b in w.stop))
        for w in layout.windows
    )


def check_fetch(grid_shape, layout, wanted, first_dim=-2):
    """Values, first and second derivatives, and messages of both directions."""
    shape = (2, 3, *layout.shape) if first_dim == -2 else (*layout.shape, 3, 2)
    x = values(*shape).requires_grad_()
    weights = [values(*part(x, w, first_dim).shape, seed=9 + i) for i, w in enumerate(wanted)]

    def loss(window, rank):
        return (window**3 * weights[rank]).sum()

    fetched = [part(x, w, first_dim) for w in wanted]
    total = sum(loss(window, rank) for rank, window in enumerate(fetched))
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    (delivered,) = torch.autograd.grad(
        sum((window * weight).sum() for window, weight in zip(fetched, weights, strict=True)), x
    )

    def work(grid):
        own = part(x.detach(), layout.windows[grid.rank], first_dim).clone().requires_grad_()
        window = halo_gather(grid, own, layout, wanted, first_dim=first_dim)
        (grad,) = torch.autograd.grad(loss(window, grid.rank), own, create_graph=True)
        (again,) = torch.autograd.grad((grad**2).sum(), own)
        home = halo_scatter_add(grid, weights[grid.rank], layout, wanted, first_dim=first_dim)
        return window.detach(), grad.detach(), again, home, grid.stats

    results = on_grid(grid_shape, work)
    for rank, (window, *_, stats) in enumerate(results):
        torch.testing.assert_close(window, fetched[rank].detach(), rtol=0, atol=0)
        once = plan_halo(layout, wanted, rank).stats(6 * 8)
        # there, back, and twice more for the second derivative; then one delivery
        assert stats == sum([once, mirrored(once)] * 2 + [mirrored(once)], HaloStats())
    for i, expected in enumerate((first.detach(), second, delivered), start=1):
        got = whole([result[i] for result in results], layout, first_dim)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid_shape", GRIDS)
@pytest.mark.parametrize("margin", [0, 1, 5])
def test_halo_gather_and_scatter_add_for_any_margin(grid_shape, margin):
    layout = Layout.split(SHAPE, grid_shape)
    check_fetch(grid_shape, layout, wider(layout, margin))


def test_halo_gather_with_array_dims_first():
    layout = Layout.split(SHAPE, (3, 2))
    check_fetch((3, 2), layout, wider(layout, 2), first_dim=0)


edges = st.tuples(st.integers(-3, 12), st.integers(-3, 12)).map(sorted)
some_window = st.tuples(edges, edges).map(lambda e: Window((e[0][0], e[1][0]), (e[0][1], e[1][1])))


@settings(max_examples=12)
@given(st.sampled_from(GRIDS[1:5]), st.data())
def test_halo_gather_of_any_windows(grid_shape, data):
    layout = Layout.split(SHAPE, grid_shape)
    wanted = tuple(data.draw(some_window) for _ in layout.windows)
    check_fetch(grid_shape, layout, wanted)


@st.composite
def layouts(draw) -> Layout:
    """Three windows: cut anywhere in one dim and a part of it in the other; some are empty."""
    cut, second = draw(st.integers(0, 11)), draw(st.integers(0, 7))
    windows = [
        Window((0, 0), (cut, 7)),
        Window((cut, 0), (11, second)),
        Window((cut, second), (11, 7)),
    ]
    return Layout(SHAPE, tuple(draw(st.permutations(windows))))


@settings(max_examples=10)
@given(layouts(), layouts())
def test_redistribute_between_any_layouts(source, target):
    x, weight = values(2, *SHAPE), values(2, *SHAPE, seed=1)

    def work(grid):
        own = part(x, source.windows[grid.rank]).clone().requires_grad_()
        moved = redistribute(grid, own, source, target)
        (moved * part(weight, target.windows[grid.rank])).sum().backward()
        return moved.detach(), own.grad

    moved, grads = zip(*on_grid((3, 1), work), strict=True)
    assert torch.equal(whole(list(moved), target), x)
    assert torch.equal(whole(list(grads), source), weight)


def test_start_halo_gather_of_pieces():
    """What autograd gives for four overlapping strips is what it gives for the whole window."""
    layout = Layout.split(SHAPE, (2, 2))
    wanted = wider(layout, 2)
    x = values(2, *SHAPE)

    def strips(window):
        (a, b), (c, d) = window.start, window.stop
        return Window((a, b), (a + 3, d)), Window((c - 4, b), (c, d)), Window((a, b), (c, b + 4))

    def work(grid):
        grads = []
        for in_pieces in (True, False):
            own = part(x, layout.windows[grid.rank]).clone().requires_grad_()
            cut = strips(wanted[grid.rank])
            if in_pieces:
                local, work = start_halo_gather(grid, own, layout, wanted, pieces=cut)
                pieces = work.wait()
            else:
                window = halo_gather(grid, own, layout, wanted)
                local = own
                pieces = [part(window, Window(
                    tuple(a - b for a, b in zip(p.start, wanted[grid.rank].start, strict=True)),
                    tuple(a - b for a, b in zip(p.stop, wanted[grid.rank].start, strict=True)),
                )) for p in cut]  # fmt: skip
            loss = (local**2).sum() + sum((i + 2) * (p**3).sum() for i, p in enumerate(pieces))
            loss.backward()
            home, finish = start_halo_scatter_add(grid, pieces, layout, wanted, pieces=cut)
            grads.append((own.grad, finish(home + local).detach()))
        return grads

    for (grad, home), (expected_grad, expected_home) in on_grid((2, 2), work):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
        assert home.shape == expected_home.shape


def test_halo_gather_overlaps_forward_and_backward():
    """[Note: overlap]: the order in which a worker posts, computes and waits."""
    layout = Layout.split((8, 4), (2, 1))
    wanted = wider(layout, 1)
    order: list[str] = []

    class Computed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            order.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            order.append("backward")
            return grad * 2

    def watched(comm):
        plain = type(comm.wire)
        if comm.rank == 0:

            class Watched(plain):
                def send(self, *arguments):
                    order.append("send")
                    return super().send(*arguments)

            comm.wire.__class__ = Watched
        grid = Grid(comm, (2, 1))
        x = values(4, 4).requires_grad_()
        del order[:]
        local, work = start_halo_gather(grid, x, layout, wanted)
        y = Computed.apply(local) if comm.rank == 0 else local * 2
        (window,) = work.wait()
        (y.sum() + (window**2).sum()).backward()

    run_ranks(2, watched)
    assert order == ["send", "forward", "send", "backward"]


def test_halo_gather_sends_only_the_slices(monkeypatch):
    """Counted where bytes leave, after the first call, in which the workers agree."""
    layout = Layout.split(SHAPE, (2, 2))
    wanted = wider(layout, 2)
    sent: list[tuple[int, int]] = []
    plain_send, others = GroupWire.send, []

    def send(self, buffer, dest, tag, verb):
        sent.append((self.rank, buffer.numel()))
        return plain_send(self, buffer, dest, tag, verb)

    monkeypatch.setattr(GroupWire, "send", send)
    for verb in ("all_gather", "all_to_all", "broadcast", "all_reduce"):
        monkeypatch.setattr(
            GroupWire, verb, _noting(getattr(GroupWire, verb), others, verb), raising=True
        )

    def work(grid):
        x = part(values(3, *SHAPE), layout.windows[grid.rank])
        halo_gather(grid, x, layout, wanted)
        grid.comm.barrier()
        if grid.rank == 0:
            sent.clear()
            others.clear()
        grid.comm.barrier()
        others.clear()
        before = grid.stats
        halo_gather(grid, x, layout, wanted)
        return grid.stats.bytes_sent - before.bytes_sent

    counted = on_grid((2, 2), work)
    for rank in range(4):
        plan = plan_halo(layout, wanted, rank)
        own = sorted(num_bytes for sender, num_bytes in sent if sender == rank)
        assert own == sorted(3 * 8 * parcel.window.num_positions for parcel in plan.sends)
        assert counted[rank] == sum(own) == plan.stats(3 * 8).bytes_sent
    assert not others


def _noting(plain, calls, verb):
    def noted(self, *arguments):
        calls.append(verb)
        return plain(self, *arguments)

    return noted


def test_control_without_halo_gradients_differs():
    """The negative control."""
    layout = Layout.split((8, 4), (2, 1))
    wanted = wider(layout, 1)

    def work(grid):
        x = part(values(8, 4), layout.windows[grid.rank]).clone().requires_grad_()
        right = torch.autograd.grad((halo_gather(grid, x, layout, wanted) ** 2).sum(), x)[0]
        cut = torch.autograd.grad((x**2).sum(), x)[0]
        return (right - cut).abs().max().item()

    assert min(on_grid((2, 1), work)) > 0.1


def test_redistribute_with_empty_windows():
    layout = Layout((4, 4), (Window((0, 0), (4, 4)), Window((0, 0), (0, 0))))

    def work(grid):
        x = torch.ones(layout.windows[grid.rank].shape)
        return redistribute(grid, x, layout, layout).shape

    assert on_grid((2, 1), work) == [(4, 4), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.complex64])
def test_halo_gather_of_any_dtype(dtype):
    layout = Layout.split((4, 4), (2, 1))
    x = (values(4, 4) > 0).to(dtype)

    def work(grid):
        own = part(x, layout.windows[grid.rank])
        return halo_gather(grid, own, layout, wider(layout, 1))

    for window, wanted in zip(on_grid((2, 1), work), wider(layout, 1), strict=True):
        assert window.dtype == dtype and torch.equal(window, part(x, wanted))


def refused(grid_shape, work, kinds):
    """Every worker's error; nobody waits."""
    told = {}

    def guarded(grid):
        try:
            work(grid)
        except kinds as error:
            told[grid.rank] = str(error)
            raise

    with pytest.raises(kinds):
        on_grid(grid_shape, guarded, timeout_s=20)
    return told


def test_wrong_size_is_an_error_on_every_rank():
    layout = Layout.split((8, 4), (3, 1))

    def work(grid):
        rows = layout.windows[grid.rank].shape[0] + (grid.rank == 1)
        halo_gather(grid, torch.ones(2, rows, 4), layout, wider(layout, 1))

    told = refused((3, 1), work, (UsageError, DisagreementError))
    assert "`x` has shape [2, 4, 4]; rank 1's window of the array of shape [8, 4]" in told[1]
    for rank in (0, 2):
        assert "rank 1 cannot: `x` has shape [2, 4, 4]" in told[rank]


@pytest.mark.parametrize(
    "differs",
    [
        lambda r: {"batch": 2 + r},
        lambda r: {"dtype": (torch.float32, torch.float64)[r]},
        lambda r: {"margin": r},
        lambda r: {"requires_grad": bool(r)},
    ],
)
def test_disagreeing_ranks_are_an_error_on_every_rank(differs):
    layout = Layout.split((8, 4), (2, 1))

    def work(grid):
        asked = {"batch": 2, "dtype": torch.float32, "margin": 1, "requires_grad": False}
        asked.update(differs(grid.rank))
        x = torch.ones(asked["batch"], 4, 4, dtype=asked["dtype"])
        x.requires_grad_(asked["requires_grad"])
        halo_gather(grid, x, layout, wider(layout, asked["margin"]))

    told = refused((2, 1), work, DisagreementError)
    assert sorted(told) == [0, 1]
    for rank in range(2):
        assert f"rank {rank} wants: `halo_gather` of torch.float" in told[rank]
        assert f"rank {1 - rank} wants: `halo_gather` of" in told[rank]


def test_backward_timeout_names_the_missing_rank():
    layout = Layout.split((8, 4), (2, 1))

    def work(grid):
        x = torch.ones(4, 4, requires_grad=True)
        window = halo_gather(grid, x, layout, wider(layout, 1))
        if grid.rank == 0:
            window.sum().backward()

    told = {}

    def guarded(comm):
        try:
            work(Grid(comm, (2, 1)))
        except (CollectiveTimeoutError, PeerLostError) as error:
            told[comm.rank] = str(error)
            raise

    with pytest.raises((CollectiveTimeoutError, PeerLostError)):
        run_ranks(2, guarded, timeout_s=2)
    assert "`backward of halo_gather` on rank 0 of 2" in told[0]


def test_grid_of_a_wrong_size():
    comm = Communicator.single_process()
    with pytest.raises(
        UsageError, match=r"`shape` \(=\(2, 2\)\) has 4 workers, the communicator 1"
    ):
        Grid(comm, (2, 2))
    with pytest.raises(UsageError, match=r"`shape` \(=1\) must be rows and columns, such as"):
        Grid(comm, 1)
    with pytest.raises(UsageError, match=r"`comm` \(a Mesh\) must be a Communicator: that"):
        Grid(comm.mesh(data=1, model=1))
    with pytest.raises(UsageError, match=r"`target` has shape \(3,\), `source` \(4,\)"):
        grid = Grid(comm, (1,))
        redistribute(grid, torch.ones(4), grid.split((4,)), grid.split((3,)), first_dim=0)


def test_disagreeing_grids_are_an_error_on_every_rank():
    told = {}

    def work(comm):
        try:
            Grid(comm, ((2, 1), (1, 2))[comm.rank])
        except DisagreementError as error:
            told[comm.rank] = str(error)
            raise

    with pytest.raises(DisagreementError):
        run_ranks(2, work)
    assert "rank 0 wants: Grid of shape (2, 1); rank 1 wants: Grid of shape (1, 2)" in told[0]
    assert sorted(told) == [0, 1]
