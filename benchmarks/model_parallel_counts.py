"""On paper: what each of many workers computes and sends for one step of a 200 x 200 x 3 net.

Windows and their intersections are those that `allstep.nn` would use; nothing is computed.
"""

from dataclasses import dataclass
from math import isqrt

from allstep.nn.windows import Layout, Reach, Window, plan_halo

__all__ = ["Counts", "count", "depth_for"]

PIXELS, CHANNELS, BATCH, FLOAT_BYTES = 200, 3, 96, 4
# kernel, step, pool size, pool stride, norm size
STAGES = ((18, 2, 5, 2, 5), (18, 1, 5, 1, 5), (12, 1, 5, 1, 5))


@dataclass
class Counts:
    """Of the busiest worker, for forward and full backward."""

    parameters: int = 0
    flops: int = 0
    messages: int = 0
    sent_bytes: int = 0


def depth_for(num_parameters: float) -> int:
    """Maps of each stage with which the net comes nearest to a size."""
    return min(range(1, 400), key=lambda depth: abs(count(depth, 1).parameters - num_parameters))


def count(depth: int, num_workers: int) -> Counts:
    """The largest numbers over the workers of a square grid; `parameters` of all together.

    Args:
        depth: maps of each stage.
        num_workers: a square number.
    """
    side = isqrt(num_workers)
    assert side * side == num_workers
    workers = [Counts() for _ in range(num_workers)]
    layout, channels = Layout.split((PIXELS, PIXELS), (side, side)), CHANNELS
    for index, (kernel, step, pool, stride, norm) in enumerate(STAGES):
        is_first = index == 0  # nothing needs the gradient of a picture
        layout = _filtering(workers, layout, channels, depth, kernel, step, is_first=is_first)
        layout = _fetched(workers, layout, _reach(pool, stride), depth, num_passes=2)
        margin = norm // 2
        for _ in range(2):  # subtractive and divisive: one map of means each
            _fetched(workers, layout, _reach(norm, 1, margin), 1, num_passes=2)
        channels = depth
    return Counts(
        sum(worker.parameters for worker in workers),
        max(worker.flops for worker in workers),
        max(worker.messages for worker in workers),
        max(worker.sent_bytes for worker in workers),
    )


def _filtering(
    workers: list[Counts],
    layout: Layout,
    channels: int,
    depth: int,
    kernel: int,
    step: int,
    *,
    is_first: bool,
) -> Layout:
    num_passes = 1 if is_first else 2
    out_layout = _fetched(workers, layout, _reach(kernel, step), channels, num_passes=num_passes)
    for worker, window in zip(workers, out_layout.windows, strict=True):
        weights = window.num_positions * depth * kernel * kernel * channels
        worker.parameters += weights
        worker.flops += 2 * BATCH * weights * (2 if is_first else 3)
    return out_layout


def _fetched(
    workers: list[Counts], layout: Layout, reach: Reach, channels: int, *, num_passes: int
) -> Layout:
    """Counts what a layer's input windows fetch, there and, with two passes, back."""
    side = isqrt(len(workers))
    out_layout = Layout.split(reach.out_shape(layout.shape), (side, side))
    whole = Window.whole(layout.shape)
    wanted = tuple(reach.inputs(window).intersect(whole) for window in out_layout.windows)
    for rank, worker in enumerate(workers):
        stats = plan_halo(layout, wanted, rank).stats(channels * BATCH * FLOAT_BYTES)
        worker.messages += stats.messages_sent
        worker.sent_bytes += stats.bytes_sent
        if num_passes == 2:
            worker.messages += stats.messages_received
            worker.sent_bytes += stats.bytes_received
    return out_layout


def _reach(kernel: int, step: int, margin: int = 0) -> Reach:
    return Reach((kernel,) * 2, (step,) * 2, ((margin, margin),) * 2, (1, 1))
