"""What docs/architecture.md says of the code is what the code does."""

import re
from pathlib import Path

import pytest

import allstep
from tests.helpers.scripts import load_script
from tests.helpers.way import gradient_files

ROOT = Path(__file__).parents[1]
MAX_GRADIENT_FILES = 10


def test_picture_of_the_rooms_is_up_to_date() -> None:
    script = load_script(ROOT / "scripts" / "draw_architecture.py")
    assert script.PICTURE.read_text() == script.draw(), "run scripts/draw_architecture.py"


def test_arrows_point_to_layers_below() -> None:
    script = load_script(ROOT / "scripts" / "draw_architecture.py")
    level = {room: number for number, row in enumerate(script.layers()) for room in row}
    assert all(level[importer] < level[imported] for importer, imported in script.arrows())


@pytest.mark.parametrize("algorithm", ["shared_memory", "native"])
def test_way_of_a_gradient_is_as_documented(algorithm: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"<!-- gradient: {algorithm} -->")[1].split("<!-- end -->")[0]
    documented = re.findall(r"^\d+\. `(\S+)`", section, re.MULTILINE)
    found = gradient_files(allstep.Synchronous(algorithm=algorithm))
    assert sorted(documented) == found
    assert len(found) <= MAX_GRADIENT_FILES
