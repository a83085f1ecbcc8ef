"""Comparisons of tensors, in lists, in state dicts and nested in plain data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = [
    "assert_identical",
    "differing_names",
    "equal",
    "largest_difference",
    "newest_tensors",
    "state_difference",
]


def newest_tensors(run_dir: Path) -> dict[str, Tensor]:
    """A run's parameters and its optimizer's state, of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return load_file(newest / "tensors.safetensors")


def newest_step(run_dir: Path) -> int:
    """Of a run's newest checkpoint; 0 before the first."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Relative to the larger of 1 and the second's values."""
    return max(
        float(((x - y).abs() / y.abs().clamp(min=1)).detach().max())
        for x, y in zip(first, second, strict=True)
    )


def state_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to the largest entry of that tensor."""
    assert a.keys() == b.keys()
    return max(
        (
            (a[k].double() - b[k].double()).abs().max() / a[k].double().abs().max().clamp(min=1e-3)
        ).item()
        for k in a
    )


def differing_names(state: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names whose tensors are not equal bit for bit."""
    assert state.keys() == other.keys()
    return [name for name in state if not torch.equal(state[name], other[name])]


def assert_identical(a: Any, b: Any) -> None:
    """Equal values and types all the way down; tensors bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(_bits(a), _bits(b))
    elif isinstance(a, dict):
        assert [(k, type(k)) for k in a] == [(k, type(k)) for k in b]
        for key in a:
            assert_identical(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_identical(x, y)
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    else:
        assert a == b


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
