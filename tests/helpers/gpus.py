"""Accelerators that are not there."""

import os

import torch

from allstep.device import Driver

ON_CPU = "ALLSTEP_GPU_TESTS_ON_CPU"  # set by pytest's --gpu-tests-on-cpu


def on_cpu() -> bool:
    """Whether tests of GPUs run without one."""
    return ON_CPU in os.environ


class Gpus(Driver):
    """A machine whose accelerators need not be there."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num
        self.chosen: list[torch.device] = []

    def default(self) -> torch.device:
        return torch.device("cuda" if self.num else "cpu")

    def count(self) -> int:
        return self.num

    def set_current(self, device: torch.device) -> None:
        self.chosen.append(device)
