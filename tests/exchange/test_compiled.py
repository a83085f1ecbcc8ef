"""Rounding in C: the bits and the decisions of torch's kernels."""

import hashlib
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.exchange.compiled import CompiledRounding, compiled_rounding, load_rounding
from allstep.exchange.grid import Grid

HAS_COMPILER = shutil.which("cc") is not None and Path("/usr/include/string.h").exists()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs gcc and libc6-dev")
SHAPES = [(5,), (3, 7), (6, 100), (4, 3, 5, 5), (9, 70, 3), (300, 2000), (2, 300_000), (700_000,)]


class Counting(CompiledRounding):
    """Knows how often it was taken."""

    def __init__(self, inner: CompiledRounding) -> None:
        self._inner = inner
        self.num_rounded = 0

    def round(self, *args: Any, **kwargs: Any) -> float:
        self.num_rounded += 1
        return self._inner.round(*args, **kwargs)


@pytest.fixture
def compiled(tmp_path: Path) -> CompiledRounding:
    return load_rounding(tmp_path, ["cc"])


@pytest.fixture
def counting(compiled: CompiledRounding) -> Counting:
    return Counting(compiled)


def grids(total: Tensor, compiled: CompiledRounding) -> tuple[Grid, Grid]:
    """Two that know the same, of which one rounds by torch's kernels."""
    found = Grid(), Grid(compiled)
    for grid in found:
        grid.begin(4)
        grid.look_at({"p": total})
    return found


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def assert_same(gradient: Tensor, total: Tensor, compiled: CompiledRounding) -> bool:
    """In each of the ways to round; whether the gradient fits."""
    held = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)).float()
    held = held.as_strided(gradient.shape, gradient.stride()) if gradient.is_contiguous() else held
    rounded = []
    for grid in grids(total, compiled):
        target, sums = torch.full_like(held, 7.0), held.clone()
        new = grid.round("p", gradient)
        grid.begin_micro_batch()
        into = grid.round("p", gradient, target)
        grid.begin_micro_batch()
        added = grid.round("p", gradient, sums, adds=True)
        assert (new is None) == (into is None) == (added is None)
        assert into is None or into is target
        rounded.append((new, into, sums))
    (new, into, sums), (new_c, into_c, sums_c) = rounded
    assert torch.equal(bits(sums), bits(sums_c))
    assert (new is None) == (new_c is None)
    if new is None or new_c is None:
        assert torch.equal(sums_c, held)
        return False
    assert torch.equal(bits(new), bits(new_c)) and torch.equal(bits(into), bits(into_c))
    assert torch.equal(bits(held + new), bits(sums_c))
    return True


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 5.0, 1e9])
def test_same_bits(shape: tuple[int, ...], scale: float, counting: Counting) -> None:
    random = torch.Generator().manual_seed(len(shape))
    total = torch.randn(shape, generator=random, dtype=torch.float32)
    gradient = scale * torch.randn(shape, generator=random, dtype=torch.float32)
    assert assert_same(gradient, total, counting) == (1e-20 < scale < 1e3)
    assert counting.num_rounded == 3


@needs_compiler
def test_same_bits_of_rows_of_any_size(counting: Counting) -> None:
    """Of which some leave the grid, or are far below the others."""
    random = torch.Generator().manual_seed(0)
    num_fitting = 0
    for _ in range(100):
        rows = torch.exp(4 * torch.randn(7, 1, generator=random, dtype=torch.float32))
        total = rows * torch.randn(7, 90, generator=random, dtype=torch.float32)
        others = torch.exp(2 * torch.randn(7, 1, generator=random, dtype=torch.float32))
        gradient = rows * others * torch.randn(7, 90, generator=random, dtype=torch.float32)
        num_fitting += assert_same(gradient, total, counting)
    assert 10 < num_fitting < 90
    assert counting.num_rounded == 300


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 99, 250, 639])
def test_nonfinite_gradients_do_not_fit(bad: float, at: int, compiled: CompiledRounding) -> None:
    total = torch.randn(8, 80, generator=torch.Generator().manual_seed(0)).float()
    gradient = total.clone()
    gradient.view(-1)[at] = bad
    assert not assert_same(gradient, total, compiled)


@needs_compiler
def test_edges_of_what_fits(compiled: CompiledRounding) -> None:
    total = torch.randn(8, 80, generator=torch.Generator().manual_seed(0)).float()
    total[3] *= 1e-3
    grid = Grid()
    grid.begin(4)
    grid.look_at({"p": total})
    found = grid.round_unread("p", total)
    assert found is not None
    *_, unit = found
    for row in (0, 3):
        gradient = torch.zeros(8, 80, dtype=torch.float32)
        limit = unit.limit[row]
        smallest = limit * unit.smallest
        edges = [limit, limit.nextafter(2 * limit), smallest, smallest.nextafter(0 * limit)]
        fits = []
        for edge in edges:
            for sign in (1, -1):
                gradient[row, 41] = sign * edge
                fits.append(assert_same(gradient, total, compiled))
        assert fits == [True, True, False, False, True, True, False, False]
    assert assert_same(torch.zeros(8, 80, dtype=torch.float32), total, compiled)
    assert not assert_same(torch.full((8, 80), 1e-45, dtype=torch.float32), 1e9 * total, compiled)


@needs_compiler
def test_gradients_in_another_order(counting: Counting) -> None:
    total = torch.randn(6, 20, 3, 3, generator=torch.Generator().manual_seed(0)).float()
    assert assert_same(total.to(memory_format=torch.channels_last), total, counting)
    assert assert_same(total.flip(3).flip(3)[..., ::2], total[..., ::2], counting)
    assert counting.num_rounded > 0


@needs_compiler
def test_what_it_does_not_take(compiled: CompiledRounding) -> None:
    x = torch.zeros(4, 80, dtype=torch.float32)
    assert compiled.takes(x, x)
    assert not compiled.takes(x.double(), x.double())
    assert not compiled.takes(x.double(), x)
    assert not compiled.takes(x.t(), x)
    assert not compiled.takes(torch._neg_view(x), x)
    assert not compiled.takes(torch.nn.Parameter(x), x)
    assert not compiled.takes(x.to("meta"), x)


@needs_compiler
def test_parameter_that_changes_its_type(compiled: CompiledRounding) -> None:
    total = torch.randn(3, 80, generator=torch.Generator().manual_seed(0)).double()
    for grid in grids(total, compiled):
        for dtype in (torch.float64, torch.float32, torch.float64):
            grid.begin_micro_batch()
            rounded = grid.round("p", total.to(dtype))
            assert rounded is not None and rounded.dtype is dtype
            torch.testing.assert_close(rounded, total.to(dtype), rtol=0, atol=1e-4)


# -- where it comes from ------------------------------------------------------------------------


def works(compiled: CompiledRounding) -> bool:
    total = torch.ones(3, 80, dtype=torch.float32)
    return assert_same(total, total, compiled)


@needs_compiler
def test_is_compiled_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert works(load_rounding(folder, ["cc"]))
    assert len(list(folder.iterdir())) == 1
    assert works(load_rounding(folder, ["no-such-compiler"]))


@needs_compiler
def test_several_compile_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_rounding(tmp_path, ["cc"]), range(4)))
    assert all(map(works, found))
    assert len(list(tmp_path.iterdir())) == 1


@needs_compiler
def test_is_compiled_again_where_the_file_is_damaged(tmp_path: Path) -> None:
    load_rounding(tmp_path / "whole", ["cc"])
    (whole,) = (tmp_path / "whole").iterdir()
    damaged = tmp_path / "damaged" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"")
    assert works(load_rounding(damaged.parent, ["cc"]))
    assert damaged.read_bytes()


@needs_compiler
def test_folder_that_nobody_may_write_to(tmp_path: Path) -> None:
    """As root may write anywhere, a file is in its place."""
    (tmp_path / "file").write_text("")
    assert works(load_rounding(tmp_path / "file" / "folder", ["cc"]))


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-compiler"):
        load_rounding(tmp_path, ["no-such-compiler"])
    with pytest.raises(subprocess.CalledProcessError):
        load_rounding(tmp_path, ["false"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["no-such-compiler", "false", "gcc 'unbalanced", " "])
def test_command_that_is_no_compiler(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled_rounding.__wrapped__() is None  # past its cache


@needs_compiler
def test_compiler_that_reorders_sums_is_not_taken(tmp_path: Path) -> None:
    compiler = tmp_path / "fast"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -ffast-math\n')
    compiler.chmod(0o755)
    with pytest.raises(OSError, match="reorders sums"):
        load_rounding(tmp_path / "cache", [str(compiler)])


def trained_bits() -> str:
    """Digest of the parameters after a training with exact sums."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        single = {"dtype": torch.float32}
        model = nn.Sequential(nn.Linear(20, 30, **single), nn.Tanh(), nn.Linear(30, 1, **single))
        x, y = torch.randn(40, 20, **single), torch.randn(40, 1, **single)
    comm = Communicator.single_process()
    exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
    loader = allstep.data.loader(TensorDataset(x, y), comm, global_batch=8, micro_batch=2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        for batch in allstep.steps(loader, exchange):
            for features, target in batch:
                batch.backward((model(features) - target).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest()


_WITHOUT_COMPILER = """
import logging, torch
from allstep.exchange.compiled import compiled_rounding
from tests.exchange.test_compiled import trained_bits

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
print(compiled_rounding(), trained_bits())
"""


@needs_compiler
@pytest.mark.process
def test_training_where_there_is_no_compiler(tmp_path: Path) -> None:
    """It has the same bits, and says once why its sums take longer."""
    environment = {**os.environ, "CC": "false", "XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COMPILER],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert compiled_rounding() is not None
    assert found.stdout.split() == ["None", trained_bits()]
    assert found.stderr.count("exact sums round by torch's kernels") == 1
