"""The code in the documentation runs: each page's Python blocks, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A block with a title is an excerpt and isn't run.
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if blocks(page)]


def test_pages_are_found() -> None:
    assert ROOT / "docs" / "guides" / "own-loop.md" in PAGES


@pytest.mark.process
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_lone_worker_runs_the_page(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
