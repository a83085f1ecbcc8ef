"""What tests of several recipes are given."""

from pathlib import Path

import pytest

from tests.helpers.texts import write_topics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder of texts on four topics; a recipe that wants others has its own."""
    return write_topics(tmp_path / "texts", 4)
