"""Distributed arrays: who owns what, who needs what, and what travels between them."""

from allstep.nn.windows.divided_tensor import DividedTensor
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.halo import (
    halo_gather,
    halo_scatter_add,
    redistribute,
    start_halo_gather,
    start_halo_scatter_add,
)
from allstep.nn.windows.plan import HaloPlan, HaloStats, Slice, plan_halo
from allstep.nn.windows.receptive import Reach
from allstep.nn.windows.shards import full_tensor, local_shard
from allstep.nn.windows.window import Layout, Window

__all__ = [
    "DividedTensor",
    "Grid",
    "HaloPlan",
    "HaloStats",
    "Layout",
    "Reach",
    "Slice",
    "Window",
    "full_tensor",
    "halo_gather",
    "halo_scatter_add",
    "local_shard",
    "plan_halo",
    "redistribute",
    "start_halo_gather",
    "start_halo_scatter_add",
]
