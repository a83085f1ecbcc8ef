"""Rounds gradients by a function in C, where there is a compiler."""

import ctypes
import hashlib
import logging
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from allstep.env import read_cache_folder, read_compiler
from allstep.files import replacing

_logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("rounding.c")
_FLAGS = ("-O3", "-fno-fast-math", "-ffp-contract=off", "-shared", "-fPIC")
_TIMEOUT_S = 60.0
_FEW = 1 << 16  # elements, up to which threads bring torch's kernels little
_FEW_THREADS = 2  # of torch's, whose kernels take three passes
_TRIAL = (99, 0.3), (1, 1.5 * 2**23)  # elements that a shift rounds to 0


class CompiledRounding:
    """Rounds rows of float32 numbers in one pass over memory, with the bits of torch's kernels.

    Args:
        library: made of `rounding.c`.

    Raises:
        OSError: if its compiler has taken (x + shift) - shift for x, as with `-ffast-math`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._round_rows = library.round_rows
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._round_rows.argtypes = [pointer, pointer, size, size, pointer, pointer]
        self._round_rows.argtypes += [ctypes.c_double, ctypes.c_int]
        self._round_rows.restype = ctypes.c_double
        x, shift = (torch.full((n,), value, dtype=torch.float32) for n, value in _TRIAL)
        rounded, limit = torch.empty_like(x), torch.ones_like(shift)
        self.round(x, rounded, (1, shift.data_ptr(), limit.data_ptr(), 0.0), adds=False)
        if rounded.any():
            raise OSError(f"{library._name} reorders sums")

    def takes(self, rows: Tensor, out: Tensor) -> bool:
        """Whether it can round these, and is the faster way."""
        return (
            rows.dtype is out.dtype is torch.float32
            and type(rows) is type(out) is Tensor
            and rows.is_cpu
            and rows.is_contiguous()
            and out.is_contiguous()
            and not rows.is_neg()
            and (rows.numel() <= _FEW or torch.get_num_threads() <= _FEW_THREADS)
        )

    def round(
        self, rows: Tensor, out: Tensor, unit: tuple[int, int, int, float], adds: bool
    ) -> float:
        """The largest share of its limit that a row takes; beyond 1 perhaps of another row.

        Args:
            rows: [n, width], or any other shape whose rows these are in memory.
            out: what they are rounded into; it is spoilt where they don't fit.
            unit: for this dtype, as `allstep.exchange.grid.Unit.in_memory` has it.
            adds: whether to add them to what `out` holds, which stays as it is if they don't fit.
        """
        num_rows, shift, limit, smallest = unit
        share: float = self._round_rows(
            rows.data_ptr(), out.data_ptr(), rows.numel(), num_rows, shift, limit, smallest, adds
        )
        return share


@cache
def compiled_rounding() -> CompiledRounding | None:
    """Rounding in C, by the compiler `cc` or that of the variable CC; None where there is none.

    What was compiled stays in the user's folder for caches.
    """
    try:
        return load_rounding(read_cache_folder(), read_compiler())
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as error:
        _logger.info("exact sums round by torch's kernels, which takes longer: %s", error)
        return None


def load_rounding(folder: Path, compiler: Sequence[str]) -> CompiledRounding:
    """The compiled rounding; compiles it at the first call.

    Args:
        folder: where it is kept, if that can be written to.
        compiler: the command.

    Raises:
        OSError: if there is no such compiler, or if what it makes can't be loaded.
        SubprocessError: if it fails.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()
    path = folder / f"rounding-{platform.machine()}-{digest[:16]}.so"
    with suppress(OSError):
        return _load(path)
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as draft:
            _compile(compiler, draft)
        return _load(path)
    with TemporaryDirectory() as elsewhere:
        path = Path(elsewhere) / path.name
        _compile(compiler, path)
        return _load(path)


def _compile(compiler: Sequence[str], path: Path) -> None:
    command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)


def _load(path: Path) -> CompiledRounding:
    return CompiledRounding(ctypes.CDLL(str(path)))
