"""The lines of a page of docs/migration, and which test tries each of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]

F = TypeVar("F", bound=Callable[..., object])


class Page:
    """A page's tables, by what stands in the left column; a line is named by how it begins."""

    def __init__(self, name: str) -> None:
        text = (ROOT / "docs/migration" / f"{name}.md").read_text()
        rows = re.findall(r"^\| (.+?) \| .+ \|$", text, re.M)
        heads = re.findall(r"^\| (.+?) \| .+ \|\n\|---", text, re.M)
        self._lines = [row for row in rows if row not in heads]
        self._tried: set[str] = set()

    def tries(self, *beginnings: str) -> Callable[[F], F]:
        """A decorator: the test tries the lines that begin so."""

        def decorate(test: F) -> F:
            self._note(beginnings)
            return test

        return decorate

    def tried_in(self, test: str, *beginnings: str) -> None:
        """`path::name` of another room's test tries them."""
        path, name = test.split("::")
        if f"def {name}(" not in (ROOT / "tests" / path).read_text():
            raise AssertionError(f"There is no test {test}.")
        self._note(beginnings)

    def untried(self) -> list[str]:
        """The lines that no test tries."""
        return [line for line in self._lines if line not in self._tried]

    def _note(self, beginnings: tuple[str, ...]) -> None:
        for beginning in beginnings:
            found = [line for line in self._lines if line.startswith(beginning)]
            if len(found) != 1:
                raise AssertionError(f"{len(found)} lines begin with {beginning!r}: {found}.")
            self._tried.update(found)
