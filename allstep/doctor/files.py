"""Files that several processes share."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file; readers see the whole of it or nothing."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
