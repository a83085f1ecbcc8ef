"""`allstep demo`: what allstep is for, in four panels measured while one watches."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.live import Live

from allstep.cli.demo.draw import draw
from allstep.cli.demo.panel import Panel
from allstep.cli.demo.show import render
from allstep.cli.interruptible import interruptible
from allstep.cli.output_files import check_can_draw, check_writable, writing_errors
from allstep.cli.rows import make_console
from allstep.errors import UsageError
from allstep.files import json_text, write_whole

Measure = Callable[[str, Any, Path, int], Iterator[Panel]]

_PANELS = {"a": "large_batch", "b": "same_model", "c": "slow_wire", "d": "scaling"}
_DIGITS = {"a", "b", "d"}
_MOST_SEEDS = 20
_NUMBERS = "demo.json"


def run(
    arguments: list[str],
    *,
    measure: Measure | None = None,
    draw: Callable[[Panel, Path], None] = draw,
) -> int:
    """Measures and shows the panels that are asked for.

    Args:
        arguments: what follows `allstep demo`.
        measure: measures a panel; None means `measure_panel`.
        draw: draws a panel.
    """
    known = _make_parser().parse_args(arguments)
    letters = _read_panels(known.panel)
    if not 1 <= known.seeds <= _MOST_SEEDS:
        raise UsageError(f"`seeds` (={known.seeds}) must be 1 to {_MOST_SEEDS}; 3 is usual.")
    if known.out is not None:
        check_can_draw("out")
        _make_folder(known.out)
        for file in (_NUMBERS, *map(_picture, letters)):
            check_writable("out", known.out / file)
    with interruptible():
        return _run_panels(letters, known.seeds, known.out, measure or measure_panel, draw)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allstep demo",
        description="What allstep is for, in four panels measured while you watch:"
        " a large batch, b the same model on other numbers of workers, c a slow wire, d"
        " whether scaling pays on this machine. Under 3 minutes on two cores; nothing is"
        " downloaded.",
        epilog="For a start: allstep demo --panel a,d",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--panel", default=",".join(_PANELS), metavar="a,b,c,d", help="which panels; all of them"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="trainings of each line of panel a; 3"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep a PNG of each panel and demo.json there"
    )
    return parser


def _read_panels(text: str) -> list[str]:
    letters = [part.strip().lower() for part in text.split(",")]
    for letter in letters:
        if letter not in _PANELS:
            raise UsageError(f"`panel` (={text}) must name panels a to d, such as `--panel a,c`.")
    return sorted(set(letters))


def _picture(letter: str) -> str:
    return f"demo_{letter}.png"


def _make_folder(folder: Path) -> None:
    with writing_errors(f"`out` (={folder})"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _run_panels(
    letters: list[str],
    num_seeds: int,
    out: Path | None,
    measure: Measure,
    draw: Callable[[Panel, Path], None],
) -> int:
    from allstep.cli.demo.processes import Processes

    if _DIGITS.intersection(letters):
        from allstep.recipes.digits import Digits

        Digits().check()
    console = make_console()
    numbers: dict[str, Any] = {}
    start_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="allstep-") as folder,
        Processes(Path(folder)) as processes,
    ):
        for letter in letters:
            panel_start_s = time.monotonic()
            with Live(console=console, auto_refresh=False) as live:  # elsewhere it shows the last
                for panel in measure(letter, processes, Path(folder), num_seeds):
                    live.update(render(panel, console.width), refresh=True)
            wall_s = time.monotonic() - panel_start_s
            numbers[letter] = {**panel.numbers, "conclusion": panel.conclusion, "wall_s": wall_s}
            if out is not None:
                _keep(panel, numbers, out, draw)
    console.print(f"Measured in {time.monotonic() - start_s:.0f} s.")
    if out is not None:
        console.print(f"Pictures and numbers are in {out}.", markup=False)
    return 0


def measure_panel(letter: str, processes: Any, folder: Path, num_seeds: int) -> Iterator[Panel]:
    """A panel as it grows; its file is imported when it is its turn."""
    module = import_module(f"allstep.cli.demo.{_PANELS[letter]}")
    seeds = {"num_seeds": num_seeds} if letter == "a" else {}
    panels: Iterator[Panel] = module.measure(processes, folder, **seeds)
    return panels


def _keep(
    panel: Panel, numbers: dict[str, Any], out: Path, draw: Callable[[Panel, Path], None]
) -> None:
    with writing_errors(f"`out` (={out})"):
        draw(panel, out / _picture(panel.letter))
        write_whole(out / _NUMBERS, json_text(numbers))
