"""Geometry on paper."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from allstep.errors import UsageError
from allstep.nn.windows import HaloStats, Layout, Reach, Slice, Window, plan_halo
from allstep.nn.windows.grid import nearest_square
from allstep.nn.windows.receptive import around, pair


def positions(window: Window) -> set[tuple[int, ...]]:
    (top, left), (bottom, right) = window.start, window.stop
    return {(i, j) for i in range(top, bottom) for j in range(left, right)}


def windows(low: int = -4, high: int = 9) -> st.SearchStrategy[Window]:
    edges = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return st.tuples(edges, edges).map(lambda e: Window((e[0][0], e[1][0]), (e[0][1], e[1][1])))


@given(windows(), windows())
def test_window_intersect_is_set_intersection(one, other):
    both = positions(one) & positions(other)
    assert positions(one.intersect(other)) == both
    assert one.intersect(other).num_positions == len(both)
    assert one.contains(other) == (positions(other) <= positions(one))


@given(st.tuples(*[st.integers(1, 20)] * 2), st.tuples(*[st.integers(1, 5)] * 2))
def test_layout_split_covers_the_array_evenly(shape, grid):
    if any(length < parts for length, parts in zip(shape, grid, strict=True)):
        with pytest.raises(UsageError, match="use a smaller grid"):
            Layout.split(shape, grid)
        return
    layout = Layout.split(shape, grid)  # which raises if it did not cover
    for dim in range(2):
        lengths = [window.shape[dim] for window in layout.windows]
        assert max(lengths) - min(lengths) <= 1


def test_layout_split_with_fewer_grid_dims():
    assert Layout.split((4, 6), (2,)) == Layout.split((4, 6), (2, 1))


@given(st.tuples(windows(), windows(), windows()), st.integers(0, 2))
def test_plan_halo_has_the_intersections_only(wanted, rank):
    layout = Layout.split((6, 5), (3, 1))
    plan = plan_halo(layout, wanted, rank)
    own = layout.windows[rank]
    for peer in set(range(3)) - {rank}:
        sent = positions(own) & positions(wanted[peer])
        received = positions(layout.windows[peer]) & positions(wanted[rank])
        for slices, expected in ((plan.sends, sent), (plan.receives, received)):
            found = [s for s in slices if s.peer == peer]
            assert len(found) == bool(expected)
            assert not expected or positions(found[0].window) == expected


@given(st.tuples(windows(), windows()))
def test_plan_halo_sends_are_the_receives_of_the_peer(wanted):
    layout = Layout.split((6, 5), (1, 2))
    plans = [plan_halo(layout, wanted, rank) for rank in range(2)]
    for one, other in (plans, plans[::-1]):
        assert [p.window for p in one.sends] == [p.window for p in other.receives]
        sent, received = one.stats(8), other.stats(8)
        assert (sent.messages_sent, sent.bytes_sent) == (
            received.messages_received,
            received.bytes_received,
        )


def test_plan_halo_of_a_convolution():
    layout = Layout.split((8, 6), (2, 2))
    reach = Reach((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    wanted = tuple(reach.inputs(window) for window in layout.windows)
    plan = plan_halo(layout, wanted, 0)
    assert wanted[0] == Window((-1, -1), (5, 4))
    assert plan.receives == (
        Slice(1, Window((0, 3), (4, 4))),
        Slice(2, Window((4, 0), (5, 3))),
        Slice(3, Window((4, 3), (5, 4))),
    )
    assert plan.stats(10) == HaloStats(3, 80, 3, 80)


reaches = st.builds(
    lambda k, s, p, d: Reach(k, s, ((p[0], p[1]), (p[2], p[3])), d),
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.tuples(*[st.integers(1, 2)] * 2),
)


def inputs_of(reach: Reach, output: tuple[int, int]) -> set[tuple[int, int]]:
    along = [
        [
            output[dim] * reach.stride[dim] - reach.padding[dim][0] + reach.dilation[dim] * i
            for i in range(reach.kernel[dim])
        ]
        for dim in range(2)
    ]
    return {(i, j) for i in along[0] for j in along[1]}


@given(reaches, st.tuples(st.integers(7, 12), st.integers(7, 12)), st.integers(0, 3))
def test_reach_inputs_and_inner(reach, shape, rank):
    out = reach.out_shape(shape)
    assume(min(out) >= 2)
    assume(all(max(reach.padding[dim]) < reach.extent(dim) for dim in range(2)))
    outputs = Layout.split(out, (2, 2)).windows[rank]
    own = Layout.split(shape, (2, 2)).windows[rank]
    array = positions(Window.whole(shape))
    needed = set().union(*(inputs_of(reach, o) for o in positions(outputs)))
    wanted = reach.inputs(outputs)
    assert needed <= positions(wanted)
    for dim in range(2):
        assert {p[dim] for p in needed} >= {wanted.start[dim], wanted.stop[dim] - 1}
    inner = reach.inner(outputs, own, shape)
    within = {o for o in positions(outputs) if inputs_of(reach, o) & array <= positions(own)}
    assert positions(inner) <= within
    if inner.num_positions:
        assert positions(inner) == within
    strips = around(outputs, inner)
    assert sum(strip.num_positions for strip in strips) == len(
        positions(outputs) - positions(inner)
    )
    assert set().union(*map(positions, strips)) == positions(outputs) - positions(inner)


def test_nearest_square():
    assert [nearest_square(n) for n in (1, 2, 3, 4, 6, 8, 12)] == [
        (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2), (4, 3),
    ]  # fmt: skip


WHOLE = Window((0, 0), (4, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window((0,), (1, 2)), r"`stop` \(=\(1, 2\)\) must have as many dims"),
        (lambda: Window((3,), (1,)), r"`stop` \(=\(1,\)\) must not be below `start`"),
        (lambda: Layout((4, 4), (WHOLE, WHOLE)), r"`windows\[0\]` and `windows\[1\]` both have"),
        (lambda: Layout((4, 5), (WHOLE,)), r"leave 4 of the 20 positions"),
        (lambda: Layout((4, 3), (WHOLE,)), r"`windows\[0\]` .* is not in the array"),
        (lambda: Layout((4,), (WHOLE,)), r"`windows\[0\]` .* is not in the array"),
        (lambda: Layout.split((4, 4), (5, 1)), r"`grid` \(=\(5, 1\)\) has 5 workers in dim 0"),
        (lambda: Layout.split((4,), (2, 2)), r"`grid` \(=\(2, 2\)\) does not fit"),
        (lambda: Layout.split((4,), (0,)), r"`grid` \(=\(0,\)\) does not fit"),
        (lambda: plan_halo(Layout((4, 4), (WHOLE,)), (), 0), "`input_windows` has 0 windows"),
        (
            lambda: plan_halo(Layout((4, 4), (WHOLE,)), (Window((0,), (1,)),), 0),
            r"`input_windows\[0\]` .* has 1 dims, the array 2",
        ),
        (lambda: pair("stride", 0, 1), r"`stride` \(=0\) must be an int of at least 1"),
        (lambda: pair("stride", (1, 2, 3), 1), r"`stride` \(=\(1, 2, 3\)\) must be"),
        (
            lambda: Reach((5, 3), (1, 1), ((0, 0), (0, 0)), (2, 1)).out_shape((8, 8)),
            r"`kernel_size` \(=\(5, 3\)\) reaches over 9 positions in dim 0",
        ),
    ],
)
def test_bad_windows_and_layouts(make, message):
    with pytest.raises(UsageError, match=message):
        make()
