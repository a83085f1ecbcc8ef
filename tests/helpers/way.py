"""Which files a gradient passes through: those with a function that is handed it."""

import inspect
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks
from allstep.exchange import ExchangePolicy

_PACKAGE = Path(allstep.__file__).parent
_SIZE = 300  # no tensor of floats but gradients, and the buckets that they lie in, is as large
_OF_PARAMETERS = "exchange/state_sweep.py"  # but these, which it compares


def gradient_files(policy: ExchangePolicy, num_ranks: int = 2) -> list[str]:
    """Files of comm and exchange with a function that gets a gradient, or its bucket, as argument.

    In the fourth backward pass of a small model, when buckets follow the order of the gradients.
    """
    found: set[str] = set()
    is_watched = threading.Event()
    barrier = threading.Barrier(num_ranks)

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and is_watched.is_set() and path.is_relative_to(_PACKAGE):
            arguments = inspect.getargvalues(frame)
            names = [*arguments.args, *filter(None, [arguments.varargs])]
            if any(_holds_gradient(arguments.locals[n]) for n in names if n != "self"):
                found.add(str(path.relative_to(_PACKAGE)))

    def rank(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(_SIZE, _SIZE), nn.Linear(_SIZE, _SIZE))
        allstep.attach(model, comm, policy)
        for step in range(4):
            loss = model(torch.ones(3, _SIZE)).sum()
            barrier.wait()
            if step == 3:
                is_watched.set()
            loss.backward()
            barrier.wait()
            is_watched.clear()
            model.zero_grad()

    threading.setprofile(watch)
    try:
        run_ranks(num_ranks, rank)
    finally:
        threading.setprofile(None)
    found.discard(_OF_PARAMETERS)
    return sorted(file for file in found if file.startswith(("comm", "exchange")))


def _holds_gradient(value: Any, depth: int = 2) -> bool:
    if isinstance(value, Tensor):
        return value.numel() >= _SIZE and value.is_floating_point()
    if not depth:
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_gradient(each, depth - 1) for each in value)
    if type(value).__module__.startswith("allstep.exchange") and not isinstance(
        value, Communicator
    ):
        slots = getattr(value, "__dict__", {})
        return any(_holds_gradient(each, depth - 1) for each in slots.values())
    return False
