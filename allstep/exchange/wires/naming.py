"""Which parameter an element of a flat tensor belongs to."""

from bisect import bisect_right

from allstep.exchange.layout import BucketLayout

__all__ = ["parameter_at"]


def parameter_at(layout: BucketLayout, element: int) -> str:
    """The name of the parameter whose gradient holds an element of the flat tensor."""
    holders = [i for i, size in enumerate(layout.sizes) if size]
    starts = [layout.offsets[i] for i in holders]
    return layout.names[holders[bisect_right(starts, element) - 1]]
