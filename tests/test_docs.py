"""The code in the documentation runs: each page's Python blocks, one after the other."""

import re
from pathlib import Path

import pytest

import allstep
from tests.helpers.processes import run_script

ROOT = Path(__file__).parents[1]
# A block with a title is an excerpt and isn't run.
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if blocks(page)]


@pytest.mark.parametrize(
    "room", ["comm", "data", "exchange", "nn", "optim", "plan", "recipes", "train"]
)
def test_the_api_has_all_of_a_room(room: str) -> None:
    """By the shortest name: that of the door, if it has one."""
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    if f"allstep.{room}" in shown:
        return
    wanted = {
        f"allstep.{name}" if name in allstep.__all__ else f"allstep.{room}.{name}"
        for name in getattr(allstep, room).__all__
    }
    assert wanted <= set(shown)


# An excerpt that shows what is different in an example; the lines that go are not in it.
EXCERPT = re.compile(r'^```diff title="(.*?)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def test_excerpts_are_in_their_examples() -> None:
    excerpts = EXCERPT.findall((ROOT / "docs" / "guides" / "frameworks.md").read_text())
    assert len(excerpts) == 3
    for path, excerpt in excerpts:
        example = (ROOT / path).read_text()
        for line in excerpt.splitlines():
            assert (line[1:] in example) is not line.startswith("-"), line


def test_pages_are_found() -> None:
    assert ROOT / "docs" / "guides" / "own-loop.md" in PAGES


@pytest.mark.process
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_lone_worker_runs_the_page(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    run_script(1, script, tmp_path)


# Writes down what each data set holds; the page that follows takes it for torch's.
RECORDING = """
import os
import torch.utils.data

class TensorDataset(torch.utils.data.TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        with open(f"data-of-{os.environ['RANK']}", "a") as file:
            print([float(t.double().sum()) for t in tensors], file=file)

torch.utils.data.TensorDataset = TensorDataset
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "TensorDataset(" in "".join(blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_two_workers_run_the_page_on_the_same_data(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join([RECORDING, *blocks(page)]))
    run_script(2, script, tmp_path)
    first, second = ((tmp_path / f"data-of-{rank}").read_text() for rank in range(2))
    assert first == second
