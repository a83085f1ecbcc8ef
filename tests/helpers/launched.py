"""A command whose whole family of processes is watched."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.ports import free_port

START_S = 280.0
END_S = 10.0


class Launched:
    """`python *arguments` in a process of its own, with what it prints.

    Args:
        arguments: of Python.
        cwd: where.
        on: makes of the command line one that runs it on another host.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        on: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.process = subprocess.Popen(
            on([sys.executable, *map(str, arguments)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self.output = self.errors = ""

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        try:
            while not happened():
                assert time.monotonic() < deadline_s, "it never happened"
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.02)
        except BaseException:
            self._end(self._family())
            raise

    def workers(self) -> list[psutil.Process]:
        """The launcher's direct children, in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: child.pid)

    def finish(self, within_s: float) -> None:
        """Waits for the end; all processes of the family must be gone by then."""
        family = self._family()
        deadline_s = time.monotonic() + within_s
        try:
            self.output, self.errors = self.process.communicate(timeout=within_s)
            _, alive = psutil.wait_procs(family, timeout=max(0.5, deadline_s - time.monotonic()))
            assert not alive
        finally:
            self._end(family)

    def _family(self) -> list[psutil.Process]:
        if self.process.returncode is not None:
            return []
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def _end(self, family: list[psutil.Process]) -> None:
        """Kills what is left of it; a test that has failed leaves nothing to the next ones."""
        for process in family:
            if process.is_running():
                process.kill()
        if self.process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=END_S)


def run_as_two_ranks(
    script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> list[Launched]:
    """A script in a process for each of two ranks; they must end well, and in time."""
    (folder / "script.py").write_text(script)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    runs = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        runs.append(Launched("script.py", cwd=folder))
    for run in runs:
        run.finish(within_s=within_s)
        assert run.code == 0, run.errors
    return runs
