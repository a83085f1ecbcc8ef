"""What is taken out of a training: random numbers."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, Dataset

import allstep
from allstep import Communicator
from allstep.doctor import WorkerRecord
from allstep.doctor.verify.ablation import Ablation
from allstep.doctor.verify.constants import ConstantRandomNumbers
from allstep.env import without_collector


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + torch.rand(3)


def test_constant_random_numbers_of_torch_python_and_numpy():
    x = torch.ones(2, 3)
    with ConstantRandomNumbers():
        assert torch.equal(dropout(x, 0.5), 2 * x)
        assert torch.equal(torch.native_dropout(x, 0.5, True)[0], x)
        for drawn in (torch.rand(3), torch.randn_like(x), torch.empty(3).uniform_()):
            assert drawn.unique().tolist() == [0.5]
        assert torch.randint(3, 9, (1,)).item() == 0
        assert torch.randint(0, 1 << 30, (9,)).unique().numel() > 1
        assert torch.randperm(100).unique().numel() == 100
        assert random.random() == random.uniform(2, 3) == np.random.rand() == 0.5
        assert np.random.normal(size=(2, 2)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert random.random() != random.random()
    assert np.random.rand() != np.random.rand()
    assert torch.rand(2).unique().numel() == 2


@pytest.mark.process
def test_ablation_of_random_numbers_in_loader_processes():
    made_before = torch.rand(2)
    ablation = Ablation(["random loader"], WorkerRecord(rank=0))
    with contextlib.closing(ablation):
        exchange = allstep.attach(nn.Linear(1, 1), Communicator.single_process())
        ablation.apply(exchange)
        assert torch.rand(2).unique().numel() == made_before.numel()  # data made after attach
        loader = DataLoader(Noisy(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        with without_collector():  # [Note: fork]
            (batch,) = loader
        assert batch.tolist() == [[i + 0.5] * 3 for i in range(4)]
    (batch,) = DataLoader(Noisy(), batch_size=4)
    assert batch.unique().numel() == 12
