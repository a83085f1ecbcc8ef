from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allstep.cli.main import main


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed then depends on neither the caller's folder nor the terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail; returns its one message."""

    def run(*arguments: str, **stand_ins: Any) -> str:
        assert main(arguments, **stand_ins) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message

    return run


@pytest.fixture
def refuse_advice(refused: Callable[..., str]) -> Callable[..., str]:
    return partial(refused, "advise")
