"""Files that are whole or not there."""

import csv
from concurrent.futures import ThreadPoolExecutor

import pytest

from allstep.files import replacing, write_table, write_whole


def test_an_error_while_writing_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "table.csv"
    write_table(path, ["step", "loss"], [{"step": 1, "loss": 0.5}, {"step": 2}])
    before = path.read_text()

    def rows():
        yield {"step": 3}
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        write_table(path, ["step"], rows())
    assert path.read_text() == before
    assert list(csv.DictReader(before.splitlines())) == [
        {"step": "1", "loss": "0.5"},
        {"step": "2", "loss": ""},
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_nothing_of_a_draft(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, "old")
    with replacing(path) as draft:
        draft.write_text("ne")
        assert path.read_text() == "old"
        draft.write_text("new")
    assert path.read_text() == "new"


def test_two_writers_of_one_file_disturb_nobody(tmp_path):
    path = tmp_path / "report.json"
    texts = ["a" * 50_000, "b" * 50_000]

    def write(text: str) -> None:
        for _ in range(50):
            write_whole(path, text)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert not path.exists() or path.read_text() in texts
        for writer in writers:
            writer.result()
    assert list(tmp_path.iterdir()) == [path]
