"""Distributed arrays: who owns what, who needs what, and what travels between them."""

from allstep.nn.windows.fetch import (
    Delivery,
    deliver,
    fetch,
    finish_deliver,
    redistribute,
    start_deliver,
    start_fetch,
)
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.plan import FetchPlan, FetchStats, Parcel, plan_fetch
from allstep.nn.windows.receptive import Reach
from allstep.nn.windows.whole import gather_whole, own_part
from allstep.nn.windows.window import Layout, Window

__all__ = [
    "Delivery",
    "FetchPlan",
    "FetchStats",
    "Grid",
    "Layout",
    "Parcel",
    "Reach",
    "Window",
    "deliver",
    "fetch",
    "finish_deliver",
    "gather_whole",
    "own_part",
    "plan_fetch",
    "redistribute",
    "start_deliver",
    "start_fetch",
]
