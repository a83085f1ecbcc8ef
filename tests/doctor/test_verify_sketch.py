"""Sketches: norms and products of tensors."""

import numpy as np
import pytest
import torch

from allstep.doctor.verify.sketch import Sketcher


@pytest.mark.parametrize("num", [1, 100, 1 << 14, 50_000, (1 << 15) + 1])
def test_sketch_is_linear_and_holds_the_norm(num):
    sketch = Sketcher()
    x, y = torch.randn(2, num, dtype=torch.float64)
    assert sketch(x).norm == pytest.approx(float(x.norm()))
    mixed = 0.3 * np.array(sketch(x).products) + 0.7 * np.array(sketch(y).products)
    assert sketch(0.3 * x + 0.7 * y).products == pytest.approx(mixed.tolist(), rel=1e-6)


def test_sketch_products_estimate_a_norm():
    sketch = Sketcher()
    ratios = []
    for seed in range(40):
        x = torch.randn(40_000, generator=torch.Generator().manual_seed(seed))
        ratios.append(np.mean(np.square(sketch(x).products)) / float(x.square().sum()))
    assert np.mean(ratios) == pytest.approx(1, abs=0.15)


def test_sketch_of_sparse_and_complex_tensors():
    sketch = Sketcher()
    sparse = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    assert sketch(sparse).norm == 2
    assert sketch(torch.tensor([3 + 4j])).norm == pytest.approx(5)
