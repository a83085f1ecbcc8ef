"""The metrics log: valid JSON always, survives kills, TensorBoard shows the same numbers."""

import json
import math
from pathlib import Path

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


def test_read_metrics_later_lines_of_a_step_win(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, loss=1.0)
    log = MetricsLog(tmp_path, Communicator.single_process())
    log.write(2, 0, loss=2.0)
    log.write(2, 1, accuracy=0.5)
    log.close()
    found = [(r["step"], r["loss"], r.get("accuracy")) for r in read_metrics(tmp_path)]
    assert found == [(1, 1.0, None), (2, 2.0, 0.5), (3, 1.0, None)]


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


def test_metrics_log_refuses_wrong_arguments(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, Communicator.single_process())
    with pytest.raises(UsageError, match="`non_finite` is one of the record's own names"):
        log.write(1, 0, non_finite=1.0)
    with pytest.raises(UsageError, match=r"`path` .* does not exist"):
        read_metrics(tmp_path / "missing")
