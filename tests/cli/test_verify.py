"""`allstep verify`: its table and exit code, and one message for every wrong turn."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allstep.cli.main import main
from allstep.cli.script_worker import VERIFY
from allstep.doctor import (
    Failure,
    RecordRequest,
    StepRecord,
    WorkerRecord,
    record_path,
    record_script,
)
from allstep.doctor.verify.record import write_worker
from allstep.doctor.verify.sketch import NUM_PRODUCTS, Sketch

SCRIPT = Path(__file__).parents[1] / "verify_scripts" / "train.py"
ALLSTEP = sys.executable, "-m", "allstep"
DIVIDED = SCRIPT.with_name("divided.py")


pytestmark = pytest.mark.usefixtures("in_empty_folder")


def verify_apart(*arguments):
    """Runs a command line with `--json` in a process of its own: its exit code and answer."""
    done = subprocess.run(
        [*ALLSTEP, "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def stand_ins():
    """What `verify` uses in place of its own."""
    return {}


@pytest.fixture
def verify(stand_ins):
    """Runs a command line; returns its exit code."""
    return lambda *arguments: main(["verify", *arguments], **stand_ins)


@pytest.fixture
def refuse(verify, capsys):
    """Runs a command line that must fail with exit code 2; returns what it says."""

    def run(*arguments: str) -> str:
        assert verify(*arguments) == 2
        found = capsys.readouterr()
        assert found.out == ""
        assert found.err.startswith("error: ")
        return found.err

    return run


@pytest.fixture
def launched(stand_ins):
    """Stands in for workers: `do(folder, size)` writes their records and returns a code."""

    def use(do) -> None:
        stand_ins["launch"] = lambda workers: do(workers.folder, workers.num_workers)

    return use


@pytest.fixture
def run_here(stand_ins):
    """Workers are this process, one after the other, each the only one."""

    def launch(workers) -> int:
        assert (workers.function, workers.has_logs) == (VERIFY, True)
        asked = {**workers.arguments, "script": Path(workers.arguments["script"])}
        task = RecordRequest(**asked, folder=workers.folder)
        went_well = [record_script(task, rank, 1) for rank in range(workers.num_workers)]
        return 0 if all(went_well) else 1

    stand_ins["launch"] = launch


def write_script(text: str) -> str:
    Path("train.py").write_text(text)
    return "train.py"


TRAIN = """
import sys, torch, allstep
comm = allstep.init(device="cpu")
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
allstep.attach(model, comm)
x = torch.arange(12.0).view(4, 3)
for step in range(int(sys.argv[1])):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


NO_GRADIENT = TRAIN.replace(".mean()", ".mean().mul(0)").replace("int(sys.argv[1])", "4")


def worker(
    rank: int, size: int, *, lr: float = 0.1, scale: float = 1.0, num_steps: int = 20
) -> WorkerRecord:
    def sketch() -> dict[str, Sketch]:
        return {"weight": Sketch(scale, [scale] * NUM_PRODUCTS)}

    step = StepRecord(
        options=[{"lr": lr}],
        samples=[*range(rank, 12, size)],
        local_gradients=sketch(),
        gradients=sketch(),
        parameters=sketch(),
        checksum=7,
    )
    record = WorkerRecord(rank=rank, num_attached=1, initial_parameters=sketch())
    record.steps = [step] * num_steps
    return record


# -- what it says --------------------------------------------------------------------------------


@pytest.mark.process
def test_real_workers_of_the_right_script(tmp_path):
    """Batch norm, dropout and a short micro-batch, by way of `steps`."""
    flags = ["-n", "1,2", "--steps", "3", "--json", "--", "--loop", "steps"]
    done = subprocess.run(
        [sys.executable, "-m", "allstep", "verify", SCRIPT, *flags],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["is_same"]
    assert [run["workers"] for run in found["runs"]] == [1, 2]
    assert found["runs"][0]["steps"][0]["samples"] == [12]
    assert found["runs"][1]["steps"][0]["samples"] == [4, 8]
    (result,) = found["results"]
    assert (result["divergence"], result["causes"]) == (None, [])
    assert max(result["differences"]) < 1e-5
    assert list(tmp_path.glob("allstep*")) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("sizes", "flags", "is_same"),
    [
        ("1,2", [], True),
        # Two copies against two copies in halves.
        pytest.param("2,4", ["--copies", "2"], True, marks=pytest.mark.slow),
        pytest.param("1,2", ["--inner-dropout", "0.5"], False, marks=pytest.mark.slow),
    ],
    ids=["halves", "two copies in halves", "dropout of divided features"],
)
def test_workers_that_share_a_copy(sizes, flags, is_same):
    """They have the same samples; what is cut is compared as a whole."""
    code, found = verify_apart(DIVIDED, "-n", sizes, "--steps", "3", "--json", "--", *flags)
    assert code == (0 if is_same else 1)
    (result,) = found["results"]
    assert [run["workers"] for run in found["runs"]] == list(map(int, sizes.split(",")))
    assert len({sum(run["steps"][0]["samples"]) for run in found["runs"]}) == 1
    if is_same:
        assert found["is_same"] and max(result["differences"]) < 1e-5
    else:
        assert result["divergence"]["step"] == 0
        assert [cause["name"] for cause in result["causes"]] == ["random state"]


def test_a_table_and_a_result(verify, run_here, capsys):
    script = write_script(TRAIN)
    # Each worker alone runs the whole batch: the same model, for nothing.
    assert verify(script, "--steps", "3", "--", "9") == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split() == [
        *["gradient", "norm,"] * 2,
        *["parameter", "norm,"] * 2,
        "difference,",
    ]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert "0, same bits" in lines[2]
    said = " ".join(text.split())
    assert "2 workers: the same model as on 1 worker for 3 steps" in said
    assert "but not as it should. likely cause: data not sharded: both workers ran" in said
    assert "cure: give each worker its own part" in said


def test_what_parts_is_named(verify, launched, capsys):
    use_records(launched, lambda size: [worker(rank, size, lr=0.1 * size) for rank in range(size)])
    assert verify(write_script(""), "-n", "1,4", "--steps", "2") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "4 workers: not the same model. It diverges at step 0, in `lr of parameter group 0`" in said
    )
    assert "likely cause: learning rate scaled:" in said
    assert "it is 4 times that on 1" in said


def test_a_model_that_is_another_one_and_a_script_that_ends(verify, launched, capsys):
    def of_size(size: int) -> list[WorkerRecord]:
        scale, num_steps = 1 + 0.2 * size, 6 // size
        return [worker(rank, size, scale=scale, num_steps=num_steps) for rank in range(size)]

    use_records(launched, of_size)
    assert verify(write_script(""), "--steps", "5") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "in the initial parameters of `weight`" in said
    assert "likely cause: initial parameters: `weight` is another one before the first" in said
    assert "note: the script ended after 3 steps on 2 workers, after 5 on 1 worker." in said


@pytest.mark.parametrize(
    ("factor", "lengths", "hint"),
    [
        (1.001, [10, 10], "So little may come of one unit that is zero up to rounding (ReLU)"),
        (1.5, [10, 10], "unequal amounts (tokens, class weights)?"),
        (1.5, [9, 10], "each worker pads its own. Is the loss a mean over tokens?"),
    ],
)
def test_what_an_unknown_cause_might_be(verify, launched, capsys, factor, lengths, hint):
    """Also where the same number of samples looks like others, as it is padded otherwise."""

    def of_rank(rank: int, size: int) -> WorkerRecord:
        record = worker(rank, size)
        length = lengths[rank] if size > 1 else 10
        gradients = worker(rank, size, scale=1.0 if size == 1 else factor).steps[0].gradients
        shift = 100 * (size > 1 and length != lengths[1])
        record.steps = [
            replace(
                step,
                gradients=gradients,
                local_gradients=gradients,
                samples=[sample + shift for sample in step.samples],
                input_shapes=[[len(step.samples), length]],
            )
            for step in record.steps
        ]
        return record

    use_records(launched, lambda size: [of_rank(rank, size) for rank in range(size)])
    assert verify(write_script(""), "--steps", "2") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "likely cause: unknown." in said
    assert hint in said


def test_several_numbers_of_workers_and_a_narrow_terminal(verify, launched, capsys, monkeypatch):
    def do(folder: Path, size: int) -> int:
        for rank in range(size):
            write_worker(record_path(folder, rank), worker(rank, size))
        return 0

    launched(do)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    verify(write_script(""), "-n", "3,1,2", "--steps", "2")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 60
    assert [line.split()[1] for line in text.splitlines()[1:7]] == ["1", "2", "3"] * 2


def diverging(size: int, first_bad: int) -> list[WorkerRecord]:
    """Workers' records of 20 steps, not finite from one on."""
    records = [worker(rank, size) for rank in range(size)]
    for record in records:
        good = record.steps[:1] * first_bad
        bad = worker(record.rank, size, scale=float("nan")).steps[first_bad:]
        record.steps = [*good, *bad]
    return records


def use_records(launched, of_size) -> None:
    def do(folder: Path, size: int) -> int:
        for record in of_size(size):
            write_worker(record_path(folder, record.rank), record)
        return 0

    launched(do)


def test_a_training_that_is_not_finite_on_one_worker_either(verify, launched, capsys):
    use_records(launched, lambda size: diverging(size, 2))
    assert verify(write_script(""), "--steps", "4") == 0
    found = capsys.readouterr()
    assert found.err == ""
    lines = found.out.splitlines()
    assert [line.split()[-1] for line in lines[2:6]] == ["bits", "bits", "-", "-"]
    assert lines[4].split()[1:3] == ["nan", "nan"]
    said = " ".join(found.out.split())
    assert "2 workers: the same model as on 1 worker for 2 steps, up to rounding" in said
    assert "Its parameters are not finite after step 2, on 1 worker too: nothing was" in said


def test_a_training_that_is_not_finite_only_on_more_workers(verify, launched, capsys):
    use_records(launched, lambda size: diverging(size, 2 if size > 1 else 20))
    assert verify(write_script(""), "--steps", "4") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "not the same model. It diverges at step 2, in the gradient of `weight`" in said
    assert "on 1 worker too" not in said


@pytest.mark.parametrize("first_bad", [2, 20])
def test_json_has_null_for_what_is_not_finite(verify, launched, capsys, first_bad):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    use_records(launched, lambda size: diverging(size, 2 if size > 1 else first_bad))
    verify(write_script(""), "--steps", "4", "--json")
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    steps = found["runs"][1]["steps"]
    assert [step["gradient_norm"] for step in steps] == [1.0, 1.0, None, None]
    (result,) = found["results"]
    if first_bad == 2:
        assert (result["nonfinite_at"], result["num_steps"]) == (2, 2)
        assert result["divergence"] is None
    else:
        assert result["nonfinite_at"] is None
        assert result["divergence"]["step"] == 2
        assert result["divergence"]["difference"] is None


def test_a_learning_rate_beyond_all_reason(verify, run_here, capsys):
    """The right script, whose loss is not finite after its first step."""
    script = write_script(TRAIN.replace("lr=0.1", "lr=1e30"))
    verify(script, "--steps", "3", "--", "9")
    found = capsys.readouterr()
    assert found.err == ""
    said = " ".join(found.out.split())
    assert "2 workers: the same model as on 1 worker for 1 step, up to rounding" in said
    assert "Its parameters are not finite after step 1, on 1 worker too" in said
    assert "not the same model" not in said


def test_a_gradient_that_parts_is_not_told_to_have_the_same_bits(verify, launched, capsys):
    """Also where a rate of 0 keeps the parameters."""

    def of_size(size: int) -> list[WorkerRecord]:
        records = [worker(rank, size, lr=0.0) for rank in range(size)]
        other = worker(0, size, scale=float(size)).steps[0].gradients
        for record in records:
            record.steps = [replace(step, gradients=other) for step in record.steps]
        return records

    use_records(launched, of_size)
    assert verify(write_script(""), "--steps", "2") == 1
    assert "same bits" not in capsys.readouterr().out


# -- wrong turns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "2"], "`n` (=2) must be two or more numbers of workers to compare"),
        (["-n", "1,1"], "`n` (=1,1) must be two or more numbers"),
        (["-n", "0,1"], "`n` (=0) must be at least 1."),
        (["-n", "1,two"], "`n` (=1,two) must be numbers between commas"),
        (["--steps", "0"], "`steps` (=0) must be at least 1."),
        (["--timeout-s", "0"], "`timeout_s` (=0.0) must be above 0."),
    ],
)
def test_bad_flags(refuse, flags, message):
    assert message in refuse(write_script(""), *flags)


def test_a_training_that_is_not_finite_after_its_first_step(refuse, launched):
    use_records(launched, lambda size: diverging(size, 0))
    said = refuse(write_script(""))
    assert (
        "`script` (=train.py) is not finite after its first step on 1 worker and on 2 workers:"
        in said
    )


@pytest.mark.parametrize("name", ["nowhere.py", "."])
def test_no_such_script(refuse, name):
    assert f"`script` (={name}) is no file; give the path of a Python script" in refuse(name)


def test_help_has_an_example(verify, capsys):
    with pytest.raises(SystemExit) as stop:
        verify("--help")
    assert stop.value.code == 0
    assert "example: allstep verify train.py -n 1,2,4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("hello = 0", "never called `allstep.attach`"),
        ("import sys; sys.exit(0)", "never called `allstep.attach`"),
        (TRAIN, "made no step on 1 worker"),
        (NO_GRADIENT, "has no gradient but zero in 4 steps on 1 worker"),
        ("import sys; sys.exit(3)", "exited with 3 on 1 worker. It printed nothing."),
        ("x = (", "SyntaxError: '(' was never closed"),
    ],
)
def test_scripts_that_cannot_be_compared(refuse, run_here, script, message):
    said = refuse(write_script(script), "--", "0")
    assert "`script` (=train.py)" in said
    assert message in said


def test_a_crash_shows_the_scripts_part_of_the_traceback_once(refuse, run_here):
    said = refuse(write_script("def go():\n    raise ZeroDivisionError('on purpose')\ngo()\n"))
    assert said.startswith("error: `script` (=train.py) failed on 1 worker:\nTraceback")
    assert said.count("Traceback") == said.count("ZeroDivisionError: on purpose") == 1
    assert "runpy" not in said
    assert 'train.py", line 3, in <module>\n' in said


def fail(kind: str, text: str, *, is_own: bool = True) -> Failure:
    return Failure(kind, text, is_own, time.time())


def test_a_script_that_fails_without_a_factor_is_run_without_another(verify, launched, capsys):
    folders = []

    def do(folder: Path, size: int) -> int:
        folders.append(folder)
        for rank in range(size):
            record = replace(worker(rank, size), num_batch_norms=1)
            other = {"weight": Sketch(1.3, [(-1.0) ** i for i in range(NUM_PRODUCTS)])}
            if size > 1:
                gradients = {"gradients": other, "local_gradients": other}
                record.steps = [replace(step, **gradients) for step in record.steps]
            if len(folders) > 2:
                record = WorkerRecord(rank=rank, failure=fail("error", "no"))
            write_worker(record_path(folder, rank), record)
        return 0

    launched(do)
    assert verify(write_script("")) == 1
    assert "not the same model" in capsys.readouterr().out
    assert len(set(folders)) == len(folders) > 3


def test_of_several_workers_the_first_cause_is_shown(refuse, launched):
    def do(folder: Path, size: int) -> int:
        for rank, failure in enumerate([fail("error", "lost", is_own=False), fail("error", "!")]):
            record = WorkerRecord(rank=rank, failure=failure)
            write_worker(record_path(folder, rank), record)
        return 1

    launched(do)
    said = refuse(write_script(""), "-n", "2,3")
    assert said == "error: `script` (=train.py) failed on 2 workers (rank 1):\n!\n"


def test_stuck_workers_say_where(refuse, launched):
    def do(folder: Path, size: int) -> int:
        for rank in range(size):
            record = WorkerRecord(rank=rank, failure=fail("timeout", f"  line {rank}\n"))
            write_worker(record_path(folder, rank), record)
        return 1

    launched(do)
    said = refuse(write_script(""), "-n", "2,3", "--timeout-s", "5")
    assert "made no forward and no step for 5 s on 2 workers. It was at\nrank 0:\n  line 0" in said
    assert "rank 1:\n  line 1\nGive it more time with `--timeout-s`" in said


def test_a_worker_that_is_killed_leaves_its_last_lines(refuse, launched):
    def do(folder: Path, size: int) -> int:
        (folder / "rank-0.log").write_text("loading\nout of memory\n")
        return 1

    launched(do)
    said = refuse(write_script(""))
    assert "ended on 1 worker before it was recorded (rank 0). Its last lines:\nloading\n" in said


def test_an_interrupt_ends_it(verify, launched):
    launched(lambda folder, size: 128 + signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        verify(write_script(""))
    assert stop.value.code == 130


def test_machines_that_compute_alike(verify, capsys):
    assert verify("--machines") == 0
    out = capsys.readouterr().out
    assert "convolutions: the same on all" in out
    assert "1 worker computes alike" in out


# -- meshes ---------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("flags", "causes"), [([], []), (["--factor"], ["loss summed"])])
def test_a_model_that_fsdp2_shards(flags, causes):
    """Whole tensors; a worker with fewer micro-batches has passes without a loss."""
    script = SCRIPT.with_name("sharded.py")
    code, found = verify_apart(script, "--steps", "2", "--json", "--", *flags)
    assert code == (1 if causes else 0)
    assert [cause["name"] for cause in found["results"][0]["causes"]] == causes
    assert sum(found["runs"][1]["steps"][0]["samples"]) == 12


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "causes"),
    [pytest.param([], [], marks=pytest.mark.slow), (["--factor"], ["sum repeated"])],
)
def test_stages_of_a_pipeline_are_compared(flags, causes):
    """Each worker has others; samples are those of the first one's calls."""
    script = SCRIPT.with_name("stages.py")
    code, found = verify_apart(script, "-n", "1,2", "--steps", "2", "--json", "--", *flags)
    (result,) = found["results"]
    assert code == (1 if causes else 0)
    assert [cause["name"] for cause in result["causes"]] == causes
    assert not causes or result["divergence"]["name"] == "stages.3.0.weight"
    assert [sum(run["steps"][0]["samples"]) for run in found["runs"]] == [20, 20]


@pytest.mark.process
@pytest.mark.slow
def test_meshes_are_compared(tmp_path):
    """Halves by `tensor_parallel` against two copies, whose norm's gradient is right."""
    script = SCRIPT.with_name("meshes.py")
    meshes = ["--mesh", "data=2", "--mesh", "tensor=2"]
    flags = ["--steps", "2", "--json", "--", "--tensor", "{tensor}", "--bug"]
    for bug, code, causes in (("none", 0, []), ("norm_summed_twice", 1, ["sum repeated"])):
        returned, found = verify_apart(script, *meshes, *flags, bug)
        assert returned == code
        (result,) = found["results"]
        assert [run["mesh"] for run in found["runs"]] == [
            {"data": 2, "tensor": 1},
            {"data": 1, "tensor": 2},
        ]
        assert [cause["name"] for cause in result["causes"]] == causes
        assert not causes or result["divergence"]["name"] == "0.0.weight"  # the norm's


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "data=2"], "`mesh` (=data=2) must be given twice or more"),
        (["--mesh", "2", "--mesh", "4"], "`mesh` (=2) must be lengths of axes by name, such as"),
        (["--mesh", "data=0", "--mesh", "data=1"], "`mesh: data` (=0) must be at least 1."),
        (["--mesh", "data=2,data=2", "--mesh", "data=1"], "has `data` twice"),
        (["-n", "2", "--mesh", "data=2", "--mesh", "data=1"], "`n` (=2) goes without `mesh`"),
        (
            ["--mesh", "data=2", "--mesh", "tensor=2"],
            "`mesh` (=tensor=2) would be the same command as data=2: 2 workers with the same",
        ),
        (
            ["--mesh", "data=2", "--mesh", "data=1", "--", "{tensor}"],
            "`{tensor}` in the script's arguments is no axis of `--mesh`; they are data.",
        ),
    ],
)
def test_meshes_that_cannot_be_compared(refuse, launched, flags, message):
    launched(lambda folder, size: pytest.fail("it has started workers"))
    assert message in refuse(write_script(""), *flags)


MESH = "import allstep\ncomm = allstep.init(device='cpu')\n"


@pytest.mark.parametrize(
    ("meshes", "body", "message"),
    [
        (
            ["data=1", "data=2"],
            f"{MESH}comm.mesh(model=1)",
            "makes a mesh of model=1 where `mesh` is data=1: its axes are model, without `data`.",
        ),
        (["data=1", "data=2"], TRAIN, "makes no mesh before it attaches a model, and `mesh` is da"),
    ],
)
def test_scripts_that_make_another_mesh(refuse, run_here, meshes, body, message):
    """Before any step; and without a traceback."""
    flags = [flag for mesh in meshes for flag in ("--mesh", mesh)]
    said = refuse(write_script(body), *flags, "--", "3")
    assert message in said
    assert "Traceback" not in said


@pytest.mark.process
def test_a_script_that_makes_a_mesh_of_other_lengths(refuse):
    """Those that it was not told."""
    flags = ["--mesh", "data=2,tensor=1", "--mesh", "data=1"]
    said = refuse(write_script(f"{MESH}comm.mesh(data=1, tensor=comm.size)"), *flags)
    assert "makes a mesh of tensor=2 where `mesh` is data=2: give it the lengths by flags" in said
