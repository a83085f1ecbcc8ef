"""The page of messages: what it quotes of allstep is what allstep says."""

import re
from functools import cache
from pathlib import Path

import pytest

from allstep.cli.symptoms import Symptom, read_symptoms, symptoms_of

ROOT = Path(__file__).parents[1]
SYMPTOMS = list(read_symptoms())
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
OTHERS += ("Address already in use", "Connection closed by peer", "No space left on device")
OTHERS += ("out of memory", "MemoryError", "but _scale is None")


@pytest.mark.parametrize("fragment", [text for text in quoted() if text not in OTHERS])
def test_the_page_quotes_what_is_said(fragment: str) -> None:
    assert fragment in sources()


def test_the_page_quotes_something() -> None:
    assert len(quoted()) > 20


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.messages[0][0])
def test_each_message_is_found_whole_and_by_its_fragments(symptom: Symptom) -> None:
    assert symptom.cause
    assert symptom.cure
    for fragments in symptom.messages:
        whole = "error: `it` " + " says so, ".join(fragments) + " (=3)."
        assert symptom in symptoms_of(whole)
        assert symptom in symptoms_of(max(fragments, key=len))


def test_all_messages_of_the_page_are_read() -> None:
    tables = PAGE.read_text().partition("## At the start")[2]
    assert len(SYMPTOMS) == len(re.findall(r"^\| `", tables, re.MULTILINE)) > 30


def test_other_messages_are_not_found() -> None:
    assert symptoms_of("ValueError: expected 3 channels") == []
    assert symptoms_of("is") == []
