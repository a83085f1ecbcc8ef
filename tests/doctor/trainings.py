"""Trainings, and records of their steps, for the tests of this room."""

import torch
from torch import nn

import allstep
from allstep import Communicator
from allstep.doctor import RunRecord, StepRecord, Training, WorkerRecord
from allstep.doctor.verify.recorder import Recorder
from allstep.doctor.verify.sketch import Sketcher


def train_once(model: nn.Module, x: torch.Tensor, optimizer=None, **forward) -> WorkerRecord:
    """The record of one step of a single worker."""
    recorder = Recorder(0, 1, lambda: None)
    exchange = recorder.attach(allstep.attach, model, Communicator.single_process())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model(x, **forward).square().mean().backward()
    optimizer.step()
    recorder.close()
    exchange.detach()
    return recorder.record


def runs_with(x: torch.Tensor, y: torch.Tensor, *, gradient: bool) -> tuple[RunRecord, RunRecord]:
    """Two runs, of one step, whose gradients (or else parameters) are x and y."""
    sketch = Sketcher()

    def run(value: torch.Tensor) -> RunRecord:
        record = WorkerRecord(rank=0)
        named = {name: sketch(part) for name, part in zip("ab", value, strict=True)}
        same = {"a": sketch(torch.ones(1)), "b": sketch(torch.ones(1))}
        step = StepRecord(
            options=[{}],
            samples=[],
            local_gradients={},
            gradients=named if gradient else same,
            parameters=same if gradient else named,
            checksum=0,
        )
        record.steps.append(step)
        return RunRecord([record])

    return run(x), run(y)


def steps_with(scales: list[float], *, samples: int = 1, rate: float = 0.1) -> RunRecord:
    """A run whose gradients and parameters are ones times a scale in each step."""
    sketch = Sketcher()
    record = WorkerRecord(rank=0)
    for scale in scales:
        named = {"a": sketch(torch.ones(3) * scale)}
        record.steps.append(
            StepRecord(
                options=[{"lr": rate}],
                samples=[*range(samples)],
                local_gradients=named,
                gradients=named,
                parameters=named,
                checksum=0,
            )
        )
    return RunRecord([record])


def options(rates: list[float], size: int) -> RunRecord:
    workers = []
    for rank in range(size):
        record = WorkerRecord(rank=rank)
        record.steps = [
            StepRecord(
                options=[{"lr": rate}],
                samples=[],
                local_gradients={},
                gradients={},
                parameters={},
                checksum=0,
            )
            for rate in rates
        ]
        workers.append(record)
    return RunRecord(workers)


def small_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, lambda net: net(torch.ones(4, 8)).mean(), optimizer)
