"""Progress: one clean bar on a terminal of any width, few plain lines elsewhere."""

import io
import logging
import re
import sys

import pytest

from allstep.comm import Communicator
from allstep.train.progress import Progress
from tests.helpers.ranks import run_ranks
from tests.helpers.terminal import Terminal


def test_plain_lines_each_epoch_and_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    with Progress(300, Communicator.single_process(), epochs=3, clock=lambda: clock[0]) as progress:
        for step in range(1, 301):
            progress.advance(step)
            clock[0] += 0.3
            progress.update(step, (step - 1) // 100, 1 / step, 1234.5)
            if step % 100 == 0:
                progress.note(f"epoch {step // 100}: accuracy [0.5]")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "epoch 1/3  step 1/300  loss 1.0000  1,234 samples/s  1 worker"
    assert [line for line in lines if "accuracy" in line] == [
        f"epoch {i}: accuracy [0.5]" for i in (1, 2, 3)
    ]
    shown = [int(match[1]) for match in re.finditer(r"step (\d+)/", captured.err)]
    assert shown == [1, 35, 69, 101, 135, 169, 201, 235, 269, 300]


def test_plain_lines_between_two_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """Slow steps, or passes of something else, are not silent."""
    clock = [0.0]
    with Progress(
        9, Communicator.single_process(), unit="pass", clock=lambda: clock[0]
    ) as progress:
        for step in range(1, 10):
            clock[0] += 4.0
            progress.advance(step)
    assert capsys.readouterr().err.splitlines() == [
        f"pass {step}/9  1 worker" for step in (3, 6, 9)
    ]


def test_progress_shows_the_noise_scale(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(9, Communicator.single_process(), epochs=1) as progress:
        progress.update(1, 0, 0.5, 1.0, 1234.0)
    assert "samples/s  noise scale 1,234  1 worker" in capsys.readouterr().err


def test_progress_shows_unequal_shares(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(9, Communicator.single_process(), epochs=1) as progress:
        progress.update(1, 0, 0.5, 1.0, micro_batches=[3, 1])
    assert "samples/s  micro-batches 3+1  1 worker" in capsys.readouterr().err


def test_progress_shows_the_last_numbers_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(None, Communicator.single_process()) as progress:
        progress.update(10, 0, 0.5, 1.0)
    assert capsys.readouterr().err == "epoch 1  step 10  loss 0.5000  1 samples/s  1 worker\n"


class Pieces(io.StringIO):
    """Keeps what was written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_progress_writes_each_line_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that ends the process between a line and its end."""
    stream = Pieces()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(2, Communicator.single_process()) as progress:
        progress.update(1, 0, 0.5, 1.0)
        progress.note("epoch 1")
    assert stream.getvalue().count("\n") == 2
    assert all(piece.endswith("\n") for piece in stream.pieces if piece)


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, num_total_steps: int | None = 100
) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with Progress(num_total_steps, Communicator.single_process(), epochs=2) as progress:
        progress.update(40, 0, 0.125, 5000)
        progress.note("epoch 1: [accuracy] 0.9")
        progress.advance(50)
        progress.update(100, 1, 0.0625, 6000)
    return terminal.getvalue()


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_terminal(monkeypatch, 120)
    for part in ("epoch 2/2", "step 100/100", "loss 0.0625", "6,000 samples/s", "1 worker", "━"):
        assert part in text
    assert "epoch 1: [accuracy] 0.9" in text


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("num_total_steps", [100, None])
def test_progress_bar_is_one_line_at_any_width(
    width: int, num_total_steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = on_terminal(monkeypatch, width, num_total_steps)
    last_frame = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\r")[-1].rstrip("\n")
    assert "\n" not in last_frame
    assert len(last_frame) <= width


def test_progress_bar_remaining_time_after_a_resumption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with Progress(1000, Communicator.single_process()) as progress:
        for step in range(901, 911):
            progress.advance(step)
            clock[0] += 1.0
    assert "step 910/1,000" in terminal.getvalue()
    assert "01:30" in terminal.getvalue().split("\r")[-1]  # 90 steps of a second


def test_progress_bar_with_log_lines_above(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("allstep")
    logger.addHandler(handler)
    try:
        with Progress(10, Communicator.single_process()) as progress:
            progress.update(1, 0, 0.5, 1.0)
            logger.warning("step-00000120: damaged")
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).split("\n")
    assert [line.split("\r")[-1] for line in lines if "damaged" in line] == [
        "step-00000120: damaged"
    ]


def test_progress_on_rank_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    def show(comm: Communicator) -> None:
        with Progress(5, comm, epochs=1) as progress:
            progress.advance(4)
            progress.update(5, 0, 1.0, 2.0)
            progress.note("done")

    run_ranks(3, show)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/1  step 5/5  loss 1.0000  2 samples/s  3 workers",
        "done",
    ]
