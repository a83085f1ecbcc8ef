"""The metrics log: valid JSON always, survives kills, TensorBoard shows the same numbers."""

import csv
import errno
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.train.metrics import MetricsLog, read_metrics
from tests.helpers.ranks import run_ranks


def write(run_dir: Path, *steps: int, loss: float = 0.5) -> None:
    log = MetricsLog(run_dir, Communicator.single_process())
    for step in steps:
        log.write(step, 0, loss=loss)
    log.close()


def test_metrics_log_round_trip(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", Communicator.single_process())
    log.write(1, 0, loss=torch.tensor(0.25), samples_per_s=10)
    log.write(2, 0, loss=0.125)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")  # flushed before it is closed
    log.close()
    assert [(r["step"], r["epoch"], r["loss"]) for r in records] == [(1, 0, 0.25), (2, 0, 0.125)]
    assert records[0]["samples_per_s"] == 10
    assert records[0]["time"] <= records[1]["time"]
    assert read_metrics(tmp_path / "run") == records


def test_metrics_log_of_nan_and_infinity(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, Communicator.single_process())
    log.write(1, 0, loss=float("nan"), largest=math.inf, smallest=-math.inf, rate=1.0)
    log.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    raw = json.loads(line, parse_constant=refuse)
    assert raw["loss"] is None
    assert raw["non_finite"] == {"loss": "nan", "largest": "inf", "smallest": "-inf"}
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["loss"])
    assert (record["largest"], record["smallest"], record["rate"]) == (math.inf, -math.inf, 1.0)
    assert "non_finite" not in record


def test_read_metrics_leaves_out_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 1, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        write(tmp_path, 3)
        steps = [record["step"] for record in read_metrics(tmp_path)]
        num_whole = (length >= first - 1) + (length >= len(whole) - 1)
        assert steps == [*[1, 2][:num_whole], 3]


def test_read_metrics_leaves_out_what_has_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "metrics.jsonl"
    damaged = ['{"step": null}', '{"step": 2, "loss": "x"}', "[]", '{"step": 3, "non_finite": 5}']
    path.write_text("\n".join([*damaged, path.read_text()]))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_read_metrics_later_lines_of_a_step_win(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, loss=1.0)
    log = MetricsLog(tmp_path, Communicator.single_process())
    log.write(2, 0, loss=2.0)
    log.write(2, 1, accuracy=0.5)
    log.close()
    found = [(r["step"], r["loss"], r.get("accuracy")) for r in read_metrics(tmp_path)]
    assert found == [(1, 1.0, None), (2, 2.0, 0.5), (3, 1.0, None)]


def test_read_metrics_of_the_end_only(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    read = [[r["step"] for r in read_metrics(tmp_path, last_bytes=n)] for n in (1, size // 2, size)]
    assert read == [[], [3], [1, 2, 3]]
    assert read_metrics(tmp_path, last_bytes=2 * size) == read_metrics(tmp_path)


def test_metrics_log_writes_on_rank_0_only(tmp_path: Path) -> None:
    def log(comm: Communicator) -> None:
        run_dir = tmp_path / str(comm.rank)
        log = MetricsLog(run_dir, comm)
        log.write(1, 0, loss=0.5)
        log.close()
        log.close()

    run_ranks(2, log)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_metrics_log_tensorboard_of_a_resumed_run(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, loss=1.0)
    write(tmp_path, 2, 3, loss=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 2.0)]


def table_of(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_table_has_each_step_once(tmp_path: Path) -> None:
    """After going back from step 4 to 1, and no further than 2 since."""
    write(tmp_path, 1, 2, 3, 4, loss=1.0)
    assert [row["step"] for row in table_of(tmp_path)] == ["1", "2", "3", "4"]
    log = MetricsLog(tmp_path, Communicator.single_process())
    log.write(2, 0, loss=math.nan)
    log.write(2, 1, **{"test/a, b": 0.1 + 0.2})
    log.close()
    first, second = table_of(tmp_path)
    assert list(first) == ["step", "epoch", "time", "loss", "test/a, b"]
    assert (first["step"], first["loss"], first["test/a, b"]) == ("1", "1.0", "")
    assert (second["step"], second["loss"]) == ("2", "nan")
    assert float(second["test/a, b"]) == 0.1 + 0.2
    assert not (tmp_path / ".metrics.csv").exists()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # the control
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 2, 2]


def test_metrics_table_of_a_log_that_was_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path, Communicator.single_process())
    log.write(1, 0, loss=1.0)
    (tmp_path / "metrics.jsonl").unlink()
    log.close()
    assert "the end of the log is lost" in caplog.text


def test_loggers_get_each_record(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    def spoil(scalars: dict[str, float], *, step: int) -> None:
        scalars.clear()

    def note(scalars: dict[str, float], *, step: int) -> None:
        seen.append((step, scalars))

    log = MetricsLog(tmp_path, Communicator.single_process(), loggers=[spoil, note])
    log.write(3, 1, loss=torch.tensor(0.25), rate=math.inf)
    log.close()
    assert seen == [(3, {"epoch": 1, "loss": 0.25, "rate": math.inf})]


def test_logger_that_raises_is_named_once_and_called_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def flaky(scalars: dict[str, float], *, step: int) -> None:
        if step < 3:
            raise ConnectionError("no route to host")
        seen.append(step)

    def stop(scalars: dict[str, float], *, step: int) -> None:
        raise KeyboardInterrupt

    log = MetricsLog(tmp_path, Communicator.single_process(), loggers=[flaky])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write(step, 0, loss=0.5)
    log.close()
    assert seen == [3]
    (message,) = (record.getMessage() for record in caplog.records)
    assert "`loggers[0]`" in message and "flaky) failed at step 1 (ConnectionError: no" in message
    assert len(read_metrics(tmp_path)) == 3
    log = MetricsLog(tmp_path, Communicator.single_process(), loggers=[stop])
    with pytest.raises(KeyboardInterrupt):
        log.write(4, 0, loss=0.5)
    log.close()


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (print, r"`loggers` .=<built-in function print>. must be a list: \[print\]"),
        (["wandb"], r"`loggers\[0\]` .='wandb'. can't be called as logger.scalars, step=step."),
        ([print, object()], r"`loggers\[1\]` .=<object object at .*`log_metrics`"),
    ],
)
def test_loggers_that_can_not_be_called_are_refused(
    loggers: Any, message: str, tmp_path: Path
) -> None:
    """On every worker, before the first step."""

    def refused(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            MetricsLog(tmp_path, comm, loggers=loggers)

    run_ranks(2, refused)


def test_metrics_table_on_a_full_disk_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    write(tmp_path, 1, loss=1.0)
    assert "No space left" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_metrics_log_refuses_wrong_arguments(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, Communicator.single_process())
    with pytest.raises(UsageError, match="`non_finite` is one of the record's own names"):
        log.write(1, 0, non_finite=1.0)
    with pytest.raises(UsageError, match=r"`path` .* does not exist"):
        read_metrics(tmp_path / "missing")


def test_a_log_that_another_worker_completes(tmp_path: Path) -> None:
    """What the first has not written any more is in each of the logs, and the table has all."""
    seen: list[tuple[int, dict[str, float]]] = []

    def logger(scalars: dict[str, float], step: int) -> None:
        seen.append((step, scalars))

    comm = Communicator.single_process()
    first = MetricsLog(tmp_path, comm, keeps_last=True)
    first.write(1, 0, loss=0.5)
    first.close()
    second = MetricsLog(tmp_path, cast(Communicator, SimpleNamespace(rank=1)), keeps_last=True)
    second.complete(first.last)
    second.write(2, 1, loss=math.inf)  # which rank 0 did not live to write
    third = MetricsLog(tmp_path, comm, loggers=[logger], keeps_last=True)
    third.complete(second.last)
    third.close()
    assert seen == [(2, {"epoch": 1, "loss": math.inf})]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")][-1] == 2
    (tmp_path / "metrics.csv").unlink()
    fourth = MetricsLog(tmp_path, comm, keeps_last=True)
    fourth.complete(third.last)  # there is nothing to write
    fourth.close()
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2"]
