"""Marks of tests that not every supported version of torch can pass."""

import pytest
import torch

needs_torch_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="needs torch 2.13: older ones can't, or do it otherwise"
)
