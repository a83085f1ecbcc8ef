"""`allstep demo`: what it says, what it keeps, how it ends; and what its panels are made of."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from allstep.cli import output_files
from allstep.cli.demo import draw as drawing
from allstep.cli.demo import large_batch, same_model, scaling, slow_wire, slow_wire_runs
from allstep.cli.demo.large_batch import LINES, LargeBatchDigits
from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.processes import Processes, WorkerError
from allstep.cli.main import main
from allstep.cli.worker import read_result
from allstep.comm import Communicator
from allstep.comm.algorithms import make_algorithm
from allstep.doctor import (
    ShapedCommunicator,
    ShapedHosts,
    TokenBucket,
    UnavailableError,
    shaped_hosts,
)
from allstep.plan import MeasuredCollective, Workload
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

PANEL = Panel(
    letter="a",
    title="A question",
    header=("", "speed", "x"),
    rows=[("one [1]", "10", ""), ("two", "20", "2.0x")],
    chart=Chart("m/s", [Bar("one [1]", 10.0, spread=1.0), Bar("two", 20.0)]),
    notes=("How it was measured.",),
    conclusion="Two is faster.",
    numbers={"speed": [10, 20]},
)


pytestmark = pytest.mark.usefixtures("in_empty_folder")


def measured(*arguments: Any) -> Iterator[Panel]:
    """Stands in for measuring."""
    yield dataclasses.replace(PANEL, status="timing", conclusion="")
    yield PANEL


@pytest.fixture
def refuse(refused):
    return functools.partial(refused, "demo")


class TestCommand:
    def test_plain_text_shows_each_panel_once(self, capsys):
        assert main(["demo", "--panel", "c,a"], measure=measured) == 0
        text = capsys.readouterr().out
        assert text.index("a. A question") >= 0
        assert text.count("Two is faster.") == 2
        assert "timing" not in text
        assert "one [1]" in text
        assert "\x1b" not in text
        assert re.search(r"Measured in \d+ s\.", text)

    @pytest.mark.parametrize("columns", [20, 40, 59, 60, 100])
    def test_a_terminal_of_any_width_is_not_exceeded(self, capsys, monkeypatch, columns):
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["demo", "--panel", "a"], measure=measured) == 0
        text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", capsys.readouterr().out)
        assert max(map(len, re.split(r"[\r\n]", text))) <= columns
        assert "timing" in text

    def test_pictures_and_numbers_are_kept(self, capsys):
        pytest.importorskip("matplotlib")
        assert main(["demo", "--panel", "a", "--out", "new/folder"], measure=measured) == 0
        assert Path("new/folder/demo_a.png").read_bytes()[:4] == b"\x89PNG"
        numbers = json.loads(Path("new/folder/demo.json").read_text())["a"]
        assert numbers["speed"] == [10, 20]
        assert numbers["conclusion"] == "Two is faster."
        assert numbers["wall_s"] >= 0
        assert "new/folder" in capsys.readouterr().out

    def test_nothing_is_written_unasked(self):
        assert main(["demo", "--panel", "a"], measure=measured) == 0
        assert list(Path().iterdir()) == []

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_unwinds_and_is_the_exit_code(self, capsys, number, code):
        ended = []

        def measure(*arguments: Any) -> Iterator[Panel]:
            try:
                os.kill(os.getpid(), number)
                time.sleep(10)
                yield PANEL
            finally:
                ended.append(True)

        before = signal.getsignal(signal.SIGINT)
        assert main(["demo", "--panel", "a"], measure=measure) == code
        assert ended == [True]
        assert signal.getsignal(signal.SIGINT) is before
        assert capsys.readouterr().err == ""

    def test_help_has_an_example(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["demo", "--help"])
        assert stop.value.code == 0
        assert "allstep demo --panel a,d" in capsys.readouterr().out

    @pytest.mark.parametrize("panels", ["e", "", "a,,b", "ab"])
    def test_unknown_panels(self, refuse, panels):
        assert f"`panel` (={panels}) must name panels a to d" in refuse("--panel", panels)

    @pytest.mark.parametrize("seeds", ["0", "-1", "21"])
    def test_too_few_or_many_seeds(self, refuse, seeds):
        assert f"`seeds` (={seeds}) must be 1 to 20" in refuse("--seeds", seeds)

    def test_a_folder_that_is_a_file(self, refuse):
        Path("taken").touch()
        assert "`out` (=taken) can't be written (File exists)" in refuse("--out", "taken")

    def test_a_folder_that_cannot_be_made(self, refuse):
        Path("taken").touch()
        assert "`out` (=taken/in) can't be written" in refuse("--out", "taken/in")

    @pytest.mark.parametrize("name", ["demo_a.png", "demo.json"])
    def test_a_file_that_is_a_folder(self, refuse, name):
        """Before anything is measured."""
        (Path("out") / name).mkdir(parents=True)
        message = refuse("--panel", "a", "--out", "out", measure=pytest.fail)
        assert message == f"error: `out` (=out/{name}) can't be written: it is a folder.\n"

    def test_a_folder_that_becomes_unwritable(self, refuse):
        def fail(panel: Panel, path: Path) -> None:
            raise OSError(28, "No space left on device")

        stand_ins = {"measure": measured, "draw": fail}
        message = refuse("--panel", "a", "--out", "full", **stand_ins)
        assert "`out` (=full) can't be written (No space left on device)" in message

    def test_pictures_without_matplotlib(self, refuse, monkeypatch):
        monkeypatch.setattr(output_files, "find_spec", lambda name: None)
        message = refuse("--out", "pictures")
        assert "`out` needs matplotlib: install it with `pip install 'allstep[plot]'`" in message
        assert not Path("pictures").exists()

    def test_digits_without_scikit_learn(self, refuse, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        assert "needs scikit-learn" in refuse("--panel", "a")


def answer(comm: Communicator, number: int) -> list[int]:
    return [number + 1]


def sleep(comm: Communicator) -> None:
    time.sleep(120)


def add(comm: Communicator, scale: int) -> dict[str, int]:
    return {"sum": int(comm.all_reduce(torch.tensor(scale * (comm.rank + 1))))}


@pytest.mark.process
class TestProcesses:
    PRELOAD = ("torch", "tests.helpers.processes")

    @pytest.mark.slow
    def test_workers_answer_fail_and_end(self, tmp_path):
        with Processes(tmp_path, preload=self.PRELOAD) as processes:
            calls = [(answer, {"number": n}) for n in range(3)]
            assert dict(processes.each(calls, at_most=2)) == {0: [1], 1: [2], 2: [3]}
            assert processes.run(2, add, scale=5) == {"sum": 15}
            with pytest.raises(WorkerError, match="TypeError"):
                list(processes.each([(answer, {})], at_most=1))
            sleeper = processes.start(1, sleep)
            sleeper.send(signal.SIGKILL)
            with pytest.raises(WorkerError, match="ended with code -9"):
                processes.result(sleeper)
            left = processes.start(1, sleep)
        assert left.exit_codes == [-signal.SIGKILL]

    @pytest.mark.slow
    def test_workers_that_take_too_long(self, tmp_path):
        with Processes(tmp_path, timeout_s=0.1, preload=self.PRELOAD) as processes:
            with pytest.raises(WorkerError, match=r"took longer than 0.1 s"):
                processes.run(1, sleep)
            with pytest.raises(WorkerError, match=r"took longer than 0.1 s"):
                list(processes.each([(sleep, {})], at_most=1))

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [2, 4], ids=["early", "later"])
    def test_ctrl_c_leaves_no_process(self, size):
        line = [sys.executable, "-m", "allstep", "demo", "--panel", "a"]
        demo = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        deadline_s = time.monotonic() + 150
        watched = psutil.Process(demo.pid)
        while len(watched.children(recursive=True)) < size and time.monotonic() < deadline_s:
            time.sleep(0.05)
        family = watched.children(recursive=True)
        assert len(family) >= size  # two helpers of multiprocessing, then trainings
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, said = demo.communicate(timeout=200)
        assert demo.returncode == 130
        assert said == b""
        _, alive = psutil.wait_procs(family, timeout=30)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


class TestLargeBatch:
    @pytest.mark.slow
    def test_every_line_trains(self):
        for line in LINES:
            short = {**line.fields, "epochs": 1, "warmup_epochs": 0.0}
            found = large_batch.train(Communicator.single_process(), short, seed=0)
            assert 0 < found["accuracy"] < 1

    def test_a_trial_never_sees_the_test_set(self):
        task = LargeBatchDigits().task(Communicator.single_process())
        kept, held_out = large_batch.hold_out(task.train_set)
        assert sorted([*kept.indices, *held_out.indices]) == list(range(len(task.train_set)))
        assert kept.dataset is held_out.dataset is task.train_set is not task.test_set

    def test_what_was_found_is_among_what_was_tried(self):
        for line in LINES:
            for name, tried in line.trials.items():
                assert line.fields[name] in tried
        tried = [line.trials for line in LINES if line.trials]
        assert {len(t.get("lr", [1])) * len(t.get("warmup_epochs", [1])) for t in tried} == {4}

    def test_settings_are_those_that_the_search_has_found(self):
        results = Path(__file__).parents[2] / "benchmarks" / "results" / "search_demo.json"
        found = json.loads(results.read_text())["lines"]
        for line in LINES:
            for name in line.trials:
                assert line.fields[name] == found[line.name]["best"][name]

    def test_rates_follow_from_the_small_batch(self):
        recipes = {line.name: line.recipe for line in LINES}
        small = recipes["small batch"]
        assert recipes["linear scaling"].lr == recipes["with warm-up"].lr == 32 * small.lr
        assert recipes["old rate"].lr == small.lr
        assert {recipe.global_batch for recipe in recipes.values()} == {8, 256}

    def test_the_axis_shows_the_range_of_accuracies(self, tmp_path):
        pytest.importorskip("matplotlib")
        accuracies = {line.name: [95.0 + number] for number, line in enumerate(LINES)}
        chart = large_batch._panel(accuracies, "", 1).chart
        low, high = drawing.make_figure(large_batch._panel(accuracies, "", 1)).axes[0].get_xlim()
        assert not chart.starts_at_zero
        assert low > 90
        assert high < 110

    def test_the_conclusion_is_what_was_measured(self):
        accuracies = {line.name: [99.0, 98.0] for line in LINES}
        text = large_batch._panel(accuracies, "", 2).conclusion
        assert "loses little here" in text
        accuracies["linear scaling"] = [50.0, 52.0]
        accuracies["LARS"] = [97.0, 97.0]
        panel = large_batch._panel(accuracies, "", 2)
        assert "collapses (-47.5 points)" in panel.conclusion
        assert panel.conclusion.endswith("with warm-up, old rate, AdamW, LAMB.")
        assert panel.rows[1][-2:] == ("51.0 ± 1.4", "-47.5")

    def test_nothing_is_said_before_it_is_measured(self):
        accuracies = {line.name: [] for line in LINES}
        panel = large_batch._panel(accuracies, "training", 1)
        assert panel.conclusion == ""
        assert {row[-1] for row in panel.rows} == {""}


class TestSameModel:
    @pytest.mark.process
    @pytest.mark.slow
    def test_two_workers_train_what_one_does_and_as_usual_they_do_not(self, tmp_path):
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        lone = Communicator.single_process()
        same = functools.partial(same_model.train_the_same, compression="exact")
        found = [same(lone, one), run_processes(2, same, two, timeout_s=100)[0]]
        models = [same_model._load(path) for path in found]
        assert same_model._largest_difference(*models) == 0
        usual = same_model.train_as_usual
        found = [usual(lone, one), run_processes(2, usual, two, timeout_s=100)[0]]
        models = [same_model._load(path) for path in found]
        assert same_model._largest_difference(*models) > 1e-2

    def test_the_conclusion_is_what_was_measured(self):
        differences = {
            "allstep": {"2": 1e-6, "4": 3e-6, same_model._KILLED: 2e-6},
            "allstep, exact": {"2": 0.0, "4": 0.0, same_model._KILLED: 0.0},
            "DDP as usual": {"2": 0.2, "4": 0.3},
        }
        num_left = {"allstep": 0, "allstep, exact": 3, "DDP as usual": 0}
        panel = same_model._panel(differences, "", num_left)
        assert "at most 3.0e-06" in panel.conclusion
        assert "not one bit differs, and 3 go on as one is killed" in panel.conclusion
        same = "0 (same bits)"
        assert panel.rows[0][1:] == ("1.0e-06", "3.0e-06", "2.0e-06, all end, 3 resume")
        assert panel.rows[1][1:] == (same, same, f"{same}, 3 go on")
        assert panel.rows[2][1:] == ("2.0e-01", "3.0e-01", "all end")
        differences["allstep, exact"]["4"] = 1e-9
        assert "it is 1.0e-09" in same_model._panel(differences, "", num_left).conclusion

    @pytest.mark.process
    @pytest.mark.slow
    @pytest.mark.parametrize("way", same_model._WAYS)
    def test_one_of_four_is_killed(self, way, tmp_path):
        """The others go on with exact sums, and give the model of one worker; else all end."""
        with Processes(tmp_path) as processes:
            workers = same_model._train_and_kill(processes, way, tmp_path / "four")
            assert workers.exit_codes[2] == -signal.SIGKILL
            assert workers.exit_codes.count(0) == (3 if way == "allstep, exact" else 0)
            if way != "allstep, exact":
                return
            one = processes.run(1, same_model.train_the_same, **same_model._asked(way, tmp_path))
            models = [same_model._load(path) for path in (one, read_result(workers.folder))]
        assert same_model._largest_difference(*models) == 0


FOUND = {
    "step_s": {"alone": 0.2, "plain": 0.55, "DDP": 0.5, "fp16": 0.3, "fp16 + staleness 1": 0.2},
    "workload": asdict(
        Workload(num_params=slow_wire_runs.NUM_PARAMS, forward_s=0.07, backward_s=0.13)
    ),
    "collectives": [
        asdict(
            MeasuredCollective(
                compression=wire,
                algorithm=algorithm,
                num_elements=(2**16, 2**18, 2**20),
                seconds=(share * 0.0105, share * 0.042, share * 0.168),
            )
        )
        for (wire, algorithm), share in zip(slow_wire_runs.KINDS, (1.0, 0.5), strict=True)
    ],
    "copy_s_per_byte": 1e-10,
}


class TestSlowWire:
    def test_predictions_stand_beside_what_was_measured(self):
        panel = slow_wire._panel(FOUND, "a wire", "")
        predicted = panel.numbers["predicted_s"]
        wire_s = 4 * slow_wire_runs.NUM_PARAMS * 8 / 200e6
        assert predicted["plain"] == pytest.approx(0.2 + wire_s, rel=0.02)
        assert predicted["plain"] > predicted["DDP"] > predicted["fp16"]
        assert predicted["fp16 + staleness 1"] == pytest.approx(0.2, rel=0.1)
        assert "fp16 + staleness 1 is 2.5x as fast as DDP" in panel.conclusion
        assert panel.notes[0] == "a wire"
        assert panel.rows[0] == ["no exchange", "-", "200", "100%", ""]

    def test_without_root_the_token_bucket_is_labelled(self, monkeypatch):
        class Ranks:
            def run(self, size: int, function: Any, rate_bps: float) -> dict[str, Any]:
                assert function is slow_wire.run_steps_shaped
                return FOUND

        monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 1000)
        *_, panel = slow_wire.measure(Ranks(), Path())
        assert "network namespaces need root" in panel.notes[0]
        assert "token bucket" in panel.notes[0]
        assert panel.conclusion

    def test_hosts_need_iproute2(self, monkeypatch):
        monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 0)
        monkeypatch.setattr(shaped_hosts.shutil, "which", lambda name: None)
        with pytest.raises(UnavailableError, match="`ip` is missing"):
            ShapedHosts(2, 1e9)

    @pytest.mark.net
    def test_hosts_come_and_go(self):
        with ShapedHosts(2, 1e9) as hosts:
            commands = hosts.commands(["true"], {"OMP_NUM_THREADS": 1})
            assert all("OMP_NUM_THREADS=1" in line for line in commands)
            assert [subprocess.run(line).returncode for line in commands] == [0, 0]
            ping = hosts.commands(["ping", "-c1", "-W2", "10.78.0.2"], {})[0]
            if "ping" in os.listdir("/bin"):
                assert subprocess.run(ping, capture_output=True).returncode == 0
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"allstep-{os.getpid()}" not in names


class TestShapedCommunicator:
    def test_sums_are_right_and_take_their_time(self):
        taken: list[float] = []

        class Noted(TokenBucket):
            def take(self, num_bytes: float) -> float:
                taken.append(num_bytes)
                return 0.0

        def work(comm: Communicator) -> list[Any]:
            shaped = ShapedCommunicator(comm, Noted(1e9))
            flat = torch.full((300,), float(comm.rank + 1))
            make_algorithm("native", shaped).reduce_(flat)
            part = shaped.split(0, key=comm.rank)
            assert part is not None
            assert type(part.wire) is type(shaped.wire)
            ring = torch.full((300,), float(comm.rank + 1))
            make_algorithm("ring", part).reduce_(ring)
            gathered = shaped.all_gather(torch.tensor([comm.rank]))
            sent = shaped.broadcast(torch.tensor([7.0]) if comm.rank == 0 else None, root=0)
            own = shaped.reduce_scatter(tuple(torch.ones(2) * r for r in range(3)))
            turned = shaped.all_to_all(tuple(torch.tensor([r]) for r in range(3)))
            return [float(flat[0]), float(ring[-1]), len(gathered), float(sent), own, len(turned)]

        for rank, found in enumerate(run_ranks(3, work, local_size=1)):
            assert found[:4] == [6.0, 6.0, 3, 7.0]
            assert found[4].tolist() == [3.0 * rank] * 2
            assert found[5] == 3
        assert taken.count(2 / 3 * 2 * 1200) == 3  # a ring's share of 1,200 bytes
        assert taken.count(400) == 3 * 4  # its chunks

    def test_a_timeout_reaches_its_parts_and_the_wires_beneath(self):
        def work(comm: Communicator) -> list[float]:
            shaped = ShapedCommunicator(comm, TokenBucket(1e9))
            part = shaped.split(0)
            assert part is not None
            shaped.set_timeout(7.0)
            return [x.timeout_s for x in (comm.wire, shaped.wire, part, part.wire)]

        assert run_ranks(2, work, local_size=1) == [[7.0] * 4] * 2

    def test_a_message_ends_when_its_last_byte_has_left(self):
        bucket = TokenBucket(8e6)  # 1 MB/s

        def work(comm: Communicator) -> tuple[float, float]:
            shaped = ShapedCommunicator(comm, bucket)
            start_s = time.monotonic()
            make_algorithm("native", shaped).reduce_(torch.zeros(12_500))
            return start_s, time.monotonic()

        starts_s, ends_s = zip(*run_ranks(2, work, local_size=1), strict=True)
        assert max(ends_s) - min(starts_s) >= 0.099  # both send 50 kB through one bucket


class TestScaling:
    NOISE = {"noise_scale": 987.0, "useful_batch": "useful up to about B = 990"}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("pair", "said"),
        [
            (60.0, "0.60x as fast as one: stay with one."),
            (120.0, "1.20x as fast as one: stay with one."),
            (180.0, "1.80x as fast as one: it pays."),
        ],
    )
    def test_one_worker_is_advised_unless_another_brings_a_quarter(self, pair, said):
        speeds = {"1 worker, 1 thread": [100.0, 90.0, 110.0], scaling._PAIR: [pair] * 3}
        panel = scaling._panel(speeds, self.NOISE, "")
        assert panel.conclusion.endswith(said)
        assert "useful up to about B = 990" in panel.conclusion

    def test_the_better_single_worker_counts(self):
        speeds = {"1 worker, 2 threads": [80.0], "1 worker, 1 thread": [100.0]}
        speeds[scaling._PAIR] = [150.0]
        assert scaling._speed_up(speeds) == 1.5

    def test_one_core_has_one_kind_of_lone_worker(self, monkeypatch):
        monkeypatch.setattr(scaling, "num_cores", lambda: 1)
        assert list(scaling._teams()) == ["1 worker, 1 thread", scaling._PAIR]

    def test_a_training_tells_speed_and_noise(self, tmp_path):
        found = scaling.train(Communicator.single_process(), str(tmp_path), 2, 1)
        assert found["samples_per_s"] > 0
        assert found["noise_scale"] > 0
        assert "useful up to about B" in found["useful_batch"]
