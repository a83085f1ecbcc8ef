"""Draws docs/images/architecture.svg: the rooms of the package, in layers, and who imports whom.

    python scripts/draw_architecture.py

The layers are those of import-linter's contract in pyproject.toml, the arrows the imports that the
code has today; an import that a way along other arrows implies is left out. A test draws it again
and compares.
"""

import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

WHAT = {
    "cli": "the command line",
    "recipes": "trainings ready to run",
    "train": "steps, loop, checkpoints",
    "doctor": "what a machine can do",
    "data": "global batches",
    "exchange": "mean gradients",
    "nn": "batch norm, windows",
    "optim": "LARS, LAMB, schedules",
    "plan": "costs, advice",
    "comm": "a group of workers",
    "env": "what the launcher says",
    "device": "streams, events",
    "errors": "what can go wrong",
    "files": "whole or not there",
    "torch_classes": "late imports",
}
BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 150, 46, 22, 46, 16


def layers() -> list[list[str]]:
    """The rooms from top to bottom; those in one layer don't import each other."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["id"] == "layers"]
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def arrows() -> set[tuple[str, str]]:
    """(importer, imported), without what only type checkers import.

    Recipes import the door, `allstep` itself, which stands for `train` here.
    """
    graph = grimp.build_graph("allstep", exclude_type_checking_imports=True, cache_dir=None)
    rooms = {room for layer in layers() for room in layer}
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = tuple([*name.split("."), ""][1] for name in (importer, imported))
            if pair == ("recipes", ""):
                pair = "recipes", "train"
            if pair[0] != pair[1] and set(pair) <= rooms:
                found.add((pair[0], pair[1]))
    return found


def without_implied(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no longer way replaces; a room imports only from layers below.

    >>> sorted(without_implied({("a", "b"), ("b", "c"), ("a", "c")}))
    [('a', 'b'), ('b', 'c')]
    """

    def reaches(start: str, end: str) -> bool:
        return (start, end) in pairs or any(
            reaches(middle, end) for first, middle in pairs if first == start
        )

    return {
        (start, end)
        for start, end in pairs
        if not any(reaches(middle, end) for first, middle in pairs if first == start)
    }


def draw() -> str:
    """The picture as SVG; the same for the same code."""
    rows = layers()
    width = max(len(row) for row in rows) * (BOX_W + GAP_X) - GAP_X + 2 * MARGIN
    height = len(rows) * (BOX_H + GAP_Y) - GAP_Y + 2 * MARGIN
    corner: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (BOX_W + GAP_X) + GAP_X) / 2
        for index, room in enumerate(row):
            corner[room] = left + index * (BOX_W + GAP_X), MARGIN + level * (BOX_H + GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" text-anchor="middle">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#888"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for importer, imported in sorted(without_implied(arrows())):
        (x1, y1), (x2, y2) = corner[importer], corner[imported]
        shift = (x2 - x1) / width * BOX_W * 0.6  # leave the box towards the other
        lines.append(
            f'<line x1="{x1 + BOX_W / 2 + shift:.0f}" y1="{y1 + BOX_H:.0f}"'
            f' x2="{x2 + BOX_W / 2 - shift:.0f}" y2="{y2 - 2:.0f}"'
            ' stroke="#888" stroke-width="1.1" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in corner.items():
        lines += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_W}" height="{BOX_H}" rx="6"'
            ' fill="#eef3fb" stroke="#3b6fb6"/>',
            f'<text x="{x + BOX_W / 2:.0f}" y="{y + 19:.0f}" font-size="14" font-weight="bold"'
            f' fill="#1c3d6e">{room}</text>',
            f'<text x="{x + BOX_W / 2:.0f}" y="{y + 36:.0f}" font-size="11"'
            f' fill="#333">{WHAT[room]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
