"""The page of messages: what it quotes of allstep is what allstep says."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


@cache
def sources() -> str:
    """All code, strings that go on in the next line joined, names of flags without backticks."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "allstep").rglob("*.py")))
    return re.sub(r'"\n\s*f?"', "", text).replace("`", "")


def quoted() -> list[str]:
    """Fragments of messages that are allstep's own; those of others say whose they are."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    parts = [part for row in rows for part in re.split(r", (?=`)| … (?=`)", row)]
    own = [part for part in parts if re.fullmatch(r"`[^`]+`", part)]
    return sorted({part.strip("`") for part in own})


OTHERS = ("Too many open files", "ModuleNotFoundError: No module named 'allstep'", "Bus error")
OTHERS += ("Address already in use", "Connection closed by peer")


@pytest.mark.parametrize("fragment", [text for text in quoted() if text not in OTHERS])
def test_the_page_quotes_what_is_said(fragment: str) -> None:
    assert fragment in sources()


def test_the_page_quotes_something() -> None:
    assert len(quoted()) > 20
