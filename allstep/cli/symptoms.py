"""Causes and cures of messages: the tables of the guide «Troubleshooting», as data."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_SHORTEST = 6  # characters of a part of a message; fewer are in many
_PAGES = (_PACKAGE / "troubleshooting.md", _PACKAGE.parent / "docs/guides/troubleshooting.md")


@dataclass(frozen=True)
class Symptom:
    """A message, or several with the same meaning.

    Attributes:
        messages: of each the fragments that it has, in this order.
        cause: what it comes from.
        cure: what to do.
    """

    messages: tuple[tuple[str, ...], ...]
    cause: str
    cure: str

    def is_in(self, text: str) -> bool:
        """Whether the text holds one of the messages, or is a part of one.

        >>> full = Symptom((("is full", "bytes left"),), "", "")
        >>> full.is_in("/tmp is full: 0 bytes left"), full.is_in("bytes"), full.is_in("is full")
        (True, False, True)
        """
        plain = text.replace("`", "").strip()
        return any(
            re.search(".*".join(map(re.escape, fragments)), plain, re.DOTALL)
            or (len(plain) >= _SHORTEST and any(plain in fragment for fragment in fragments))
            for fragments in self.messages
        )


def symptoms_of(text: str) -> list[Symptom]:
    """The symptoms in a message, in the order of the page."""
    return [symptom for symptom in read_symptoms() if symptom.is_in(text)]


def read_symptoms() -> Iterator[Symptom]:
    """All symptoms of the guide: in a checkout from the guide itself, in a wheel from its copy."""
    page = next(path for path in _PAGES if path.exists())
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 3:
            first, cause, cure = cells
            messages = tuple(
                tuple(re.findall(r"`([^`]+)`", part)) for part in re.split(r", (?=`)", first)
            )
            yield Symptom(messages, _without_links(cause), _without_links(cure))


def _without_links(text: str) -> str:
    return re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text)
