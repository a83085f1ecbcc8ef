"""Environment variables, read with checks."""

import os
import re
from collections.abc import Mapping

from allstep.errors import UsageError

MIN_WORKERS = "ALLSTEP_MIN_WORKERS"  # set by a launcher that lets workers go on without lost ones
JOINS = "ALLSTEP_JOINS"  # set for a worker that joins a run that others have begun


class Variables:
    """Environment variables, read with checks; the process's own unless others are given."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))  # an empty variable counts as not set

    def text(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def first_set(self, *names: str) -> str:
        """The first of some names that is set; the last name if none is."""
        return next((name for name in names if name in self), names[-1])

    def number(self, name: str, default: int | None = None) -> int:
        """The value of a variable: a whole number, at least 0."""
        text = self.text(name)
        if text is None:
            if default is None:
                raise UsageError(f"{name} is not set, but its launcher's other variables are.")
            return default
        if not re.fullmatch(r"\d+", text.strip()):
            raise UsageError(f"{name} (={text!r}) must be a whole number; set it or unset it.")
        return int(text)

    def positive(self, name: str, default: int | None = None) -> int:
        """The value of a variable: a whole number, at least 1."""
        value = self.number(name, default)
        if value < 1:
            raise UsageError(f"{name} (={value}) must be at least 1.")
        return value

    def place(self, rank_name: str, size_name: str, rank: int, size: int) -> tuple[int, int]:
        """A rank and a size that match; the defaults where neither is set."""
        if rank_name not in self and size_name not in self:
            return rank, size
        rank, size = self.number(rank_name, rank), self.positive(size_name, size)
        if rank >= size:
            raise UsageError(
                f"{rank_name} (={rank}) must be below {size_name} (={size}); set both as the "
                "launcher would, or unset them."
            )
        return rank, size

    def local_place(
        self, rank_name: str, size_name: str, of: str, rank: int, size: int
    ) -> tuple[int, int]:
        """Rank and size on this node, as by `place`; errors call `size` by its variable `of`."""
        local_rank, local_size = self.place(rank_name, size_name, rank, size)
        if local_size > size:
            raise UsageError(
                f"{size_name} (={local_size}) must not be above {of} (={size}); set both as the "
                f"launcher would, or unset {size_name}."
            )
        return local_rank, local_size

    def master(self) -> tuple[str | None, int | None]:
        port = self.number("MASTER_PORT") if "MASTER_PORT" in self else None
        if port is not None and not 0 < port < 65_536:
            raise UsageError(f"MASTER_PORT (={port}) must be a port: 1 to 65535.")
        return self.text("MASTER_ADDR"), port
