"""Calls in the package that order streams, keep memory or let the host wait."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import allstep

PACKAGE = Path(allstep.__file__).parent


@dataclass(frozen=True, order=True)
class Site:
    """A call of the package: `verb` in the function `function` of `file`."""

    file: str
    function: str
    verb: str

    def __str__(self) -> str:
        return f"{self.file} {self.function} {self.verb}"

    @classmethod
    def here(cls, verb: str) -> "Site":
        """The innermost function of the package, but for the device module, that is running."""
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and path.name != "device.py":
                name = frame.f_code.co_qualname.replace("<locals>.", "")
                return cls(str(path.relative_to(PACKAGE)), name, verb)
            frame = frame.f_back  # type: ignore[assignment]
        return cls("", "", verb)


_CALLED = {
    "synchronize": "synchronize",
    "wait_until": "wait_until",
    "lend_to_current_stream": "record_stream",
}
_METHODS = ("wait_stream", "wait_event", "synchronize")


def waits_of_package() -> set[Site]:
    """Every call in the package, but for the device module's own, that orders anything."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.name == "device.py" or not any(word in text for word in (*_CALLED, *_METHODS)):
            continue
        tree = ast.parse(text)
        names = {
            alias.asname or alias.name: _CALLED[alias.name]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "allstep.device"
            for alias in node.names
            if alias.name in _CALLED
        }
        file = str(path.relative_to(PACKAGE))
        found |= {Site(file, function, verb) for function, verb in _waits_in(tree, names)}
    return found


def _waits_in(node: ast.AST, names: dict[str, str], function: str = "") -> set[tuple[str, str]]:
    found = set()
    for child in ast.iter_child_nodes(node):
        within = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            within = f"{function}.{child.name}".removeprefix(".")
        if isinstance(child, ast.Call):
            called = child.func
            if isinstance(called, ast.Name) and called.id in names:
                found.add((within, names[called.id]))
            elif isinstance(called, ast.Attribute) and (
                called.attr in ("wait_stream", "wait_event")
                or (called.attr == "synchronize" and "stream" in ast.unparse(called.value))
            ):
                found.add((within, called.attr))
        found |= _waits_in(child, names, within)
    return found
