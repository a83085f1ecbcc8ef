"""Lets the docs show a docstring's `>>>` lines as code; Markdown would take them for quotes."""

import re
from typing import Any

from griffe import Extension, Object

# An example begins with a prompt and ends before a blank line.
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class DoctestFences(Extension):
    """Puts each example of a docstring in a fenced block."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(example: re.Match[str]) -> str:
    indent = example["indent"]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"
