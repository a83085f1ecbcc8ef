"""`allstep advise` on bare numbers: what it says, what it writes and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from allstep.cli.main import main
from allstep.comm import Communicator
from allstep.doctor import measure
from allstep.plan import AccuracyCost, AccuracyTable, measured_accuracy

BARE = ("--params", "25M", "--step-ms", "110", "--link", "10gbit", "--workers", "1,2,4,8,32")


pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture
def say(capsys):
    """Runs `allstep advise` and returns what it prints."""

    def run(*arguments: str, **stand_ins) -> str:
        assert main(["advise", *arguments], **stand_ins) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return found.out

    return run


def advice_of(text: str) -> str:
    advice = text.split("advice: ")[1].split("lossy: ")[0]
    return " ".join(advice.split("in code: ")[0].split())


def lossy_of(text: str) -> str:
    return " ".join(text.split("lossy: ")[1].split("in code: ")[0].split())


def test_bare_numbers_become_a_table_a_chart_and_advice(say):
    text = say(*BARE)
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("workers"))
    assert header.split() == ["workers", "1", "2", "4", "8", "32", "accuracy", "cost"]
    for policy in ("DDP", "fp32", "fp16", "int8", "fp16 + staleness 1", "local SGD, H = 16"):
        assert any(line.startswith(policy) for line in lines)
    assert "efficiency" in lines
    assert "*" in text
    assert advice_of(text).startswith("32 workers with fp32: ")
    assert lossy_of(text).startswith("32 workers with fp16 + staleness 1 would be ")
    shipped = measured_accuracy()
    for name, cost in shipped.points_lost.items():
        assert any(line.startswith(name) and line.endswith(str(cost)) for line in lines)
    assert shipped.task in lossy_of(text)
    assert text.count("in code: ") == 2
    assert "\x1b" not in text
    assert text.endswith(
        'in code: allstep.Stale(steps=1, compression="fp16", algorithm="auto",'
        ' bucket_bytes="auto")\n'
    )


def test_a_cost_that_nobody_has_measured_is_said_to_be_so(say):
    unknown = AccuracyTable("a task", 2, {"fp16": AccuracyCost(0.1, 0.2)})
    lines = say(*BARE, accuracy=unknown).splitlines()
    assert next(line for line in lines if line.startswith("fp16 ")).endswith("0.10 +- 0.20")
    assert next(line for line in lines if line.startswith("int8 ")).endswith("not measured")


def test_scaling_that_does_not_pay_is_refused(say):
    advice = advice_of(say("--params", "25M", "--step-ms", "110", "--link", "100mbit"))
    assert advice.startswith("stay on one worker: ")
    assert "x the speed of one" in advice


def test_one_worker_has_nobody_to_talk_to(say):
    assert "nobody" in advice_of(say(*BARE[:-1], "1"))


def test_a_fast_link_needs_nothing_but_ddp(say):
    advice = advice_of(
        say("--params", "1M", "--step-ms", "500", "--link", "100gbit", "--workers", "1,2,4")
    )
    assert advice.startswith("4 workers with DDP: ")
    assert "keep it simple" in advice


def test_the_parameters_dtype_is_what_travels(say):
    """To a bfloat16 model 16 bits on the wire are no gain; a float64 model sends twice as much."""

    def sent(dtype: str) -> dict[str, int]:
        say(*BARE, "--dtype", dtype, "--json", "out.json")
        cells = json.loads(Path("out.json").read_text())["predictions"]
        return {p["policy"]: p["sent_bytes"] for p in cells if p["workers"] == 8}

    single, half, double = sent("float32"), sent("bfloat16"), sent("float64")
    for name in ("DDP", "fp32"):
        assert 2 * half[name] == single[name] == double[name] // 2
    assert half["fp32"] == pytest.approx(half["fp16"], rel=1e-6)
    assert single["fp16"] == pytest.approx(half["fp16"], rel=1e-6)


def test_a_noise_scale_ends_it_earlier(say):
    text = say(*BARE[:5], "100gbit", *BARE[6:], "--noise-scale", "200")
    assert "samples to target" in text
    advice = advice_of(text)
    assert advice.startswith("8 workers with ")
    assert "as a batch of 1,024 takes 5.3x the samples of one of 32 at a noise scale of 200" in (
        advice
    )
    assert advice_of(say(*BARE[:5], "100gbit", *BARE[6:])).startswith("32 workers with ")


def to_target(text):
    """The table of what is left to the target: (speed-up, policy) by number of workers."""
    rows = re.findall(r"^ +([\d,]+) +[\d,]+ +[\d.]+x +([\d.]+)x (\S.*?) *$", text, re.MULTILINE)
    return {int(count.replace(",", "")): (float(gain), policy) for count, gain, policy in rows}


@pytest.mark.parametrize("link", ["1gbit", "10gbit", "100gbit"])
@pytest.mark.parametrize("noise_scale", ["5", "300", "5000"])
@pytest.mark.parametrize("points", ["0", "0.5"])
def test_the_advice_says_what_the_table_says(say, link, noise_scale, points):
    """The same policies, the same numbers, and the reason that the numbers give."""
    flags = ["--noise-scale", noise_scale, "--max-points-lost", points, "--workers", "1,2,4,8"]
    text = say(*BARE[:5], link, *flags)
    advice, table = advice_of(text), to_target(text)
    assert list(table) == [1, 2, 4, 8]
    assert table.pop(1) == (1.0, "one worker")
    assert {policy for _, policy in table.values()} <= {"DDP", "fp32"}
    found = re.match(r"(\d+) workers with (.*?): ([\d.]+)x one worker on the way to the", advice)
    if found:
        assert table[int(found[1])] == (float(found[3]), found[2])
    else:
        found = re.match(
            r"stay on one worker: (\d+) workers with (.*), the best .* come to ([\d.]+)x", advice
        )
        assert table[int(found[1])] == (pytest.approx(float(found[3]), abs=0.051), found[2])
        assert table[int(found[1])][0] == max(gain for gain, _ in table.values())
    following = re.search(r"don't pay: (\d+) would be ([\d.]+)x one worker with (.*?), as", advice)
    if following:
        assert table[int(following[1])] == (float(following[2]), following[3])
    if advice.startswith("stay"):
        is_wire = "What would help: a faster link" in advice
        is_batch = "What would help: a faster machine; a larger batch would not." in advice
        assert is_wire or is_batch
        assert is_wire or noise_scale != "5000"
        assert is_batch or link != "100gbit"


def test_workers_without_micro_batches_are_not_blamed_on_the_wire(say):
    advice = advice_of(say(*BARE[:7], "1,2,4", "--global-batch", "32"))
    assert "a step has 1 micro-batch for 2 workers, which idle 50% of it." in advice
    assert "the exchange" not in advice


def test_a_fixed_batch_is_cut(say):
    text = say(*BARE, "--global-batch", "256", "--json", "out.json")
    assert "Batch: 256." in text
    found = json.loads(Path("out.json").read_text())
    assert {p["global_batch"] for p in found["predictions"]} == {256}


def test_more_points_may_be_spared_or_none(say):
    table = AccuracyTable(
        "fashion",
        2,
        {
            "fp16": AccuracyCost(0.05, 0.1),
            "int8": AccuracyCost(0.3, 0.1),
            "fp16 + staleness 1": AccuracyCost(0.4, 0.1),
        },
    )
    text = say(*BARE, accuracy=table)
    assert "fp16 + staleness 1 would be " in lossy_of(text)
    assert "It lost 0.40 +- 0.10 points of accuracy on fashion." in lossy_of(text)
    text = say(*BARE, "--max-points-lost", "0.2", accuracy=table)
    assert "workers with fp16 would be " in lossy_of(text)
    unspared = say(*BARE, "--max-points-lost", "0", accuracy=table)
    assert "workers with fp32: " in advice_of(unspared)
    assert "would be" not in lossy_of(unspared)


def test_the_length_of_the_training_is_told_and_a_short_one_stays_on_one_worker(say):
    text = say(*BARE, "--total-samples", "115M", "--json", "out.json")
    assert "The whole training takes 7.03 h instead of 110 h on one worker." in advice_of(text)
    assert "3.73 h for the whole training" in lossy_of(text)
    found = json.loads(Path("out.json").read_text())
    assert found["total_samples"] == 115_000_000
    assert found["recommended"]["training_s"] == pytest.approx(3600 * 7.03, rel=1e-3)
    short = say("--params", "1M", "--step-ms", "5", *BARE[4:], "--total-samples", "3k")
    assert advice_of(short).startswith("stay on one worker: it takes 469 ms for the whole")
    assert "lossy: " not in short


def test_a_timeline_is_shown_when_asked_for(say):
    text = say(*BARE, "--timeline")
    assert re.search(r"^compute  f+b+", text, re.MULTILINE)
    assert "columns are" in text


def test_any_encoding_can_say_it(say):
    say(*BARE, "--timeline", "--noise-scale", "2000").encode("ascii")


@pytest.mark.parametrize("workers", ["1,2", "1,2,4,8,16,32,64,128,256"])
@pytest.mark.parametrize("columns", [40, 60, 100])
def test_accuracy_is_told_at_any_width(say, monkeypatch, columns, workers):
    """It is for clusters that the table is too wide."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", say(*BARE[:-1], workers)).splitlines()
    for name, cost in measured_accuracy().points_lost.items():
        assert any(name in line and str(cost) in line for line in lines)
    assert sum("accuracy cost" in line for line in lines) == 1


def test_the_speed_that_a_cluster_lends_is_told(say, tmp_path):
    """ResNet-50's is no speed of another model."""
    text = " ".join(say("--params", "340M", "--cluster", "mn-1").split())
    lent = "A worker's speed: 161 samples/s of ResNet-50, 224 x 224, fp32, batch 64 a worker, from"
    assert f"{lent} the cluster's file." in text
    assert "A worker's speed" not in say("--params", "340M", "--step-ms", "9", "--cluster", "mn-1")
    (tmp_path / "lab.toml").write_text(
        "num_nodes = 1\nworkers_per_node = 2\nsamples_per_s = 10\n[intra]\nbandwidth_bps = 1e9\n"
    )
    text = " ".join(say("--params", "1M", "--cluster", "lab.toml").split())
    assert "A worker's speed: 10 samples/s, from the cluster's file." in text


def test_presets_bring_their_workers(say):
    text = say("--params", "25M", "--cluster", "mn-1", "--micro-batch", "32")
    assert "1,024" in text
    assert "109 Gbit/s" in text


def test_nodes_of_several_workers(say):
    text = say(*BARE[:-2], "--per-node", "8", "--node-link", "400gbit", "--workers", "1,8,16")
    assert "8 workers a machine" in text


@pytest.mark.parametrize(
    ("per_node", "counts"),
    [
        ("1", "1 2 4 8 16 32"),
        ("6", "1 2 4 6 12 24 30"),
        ("8", "1 2 4 8 16 32"),
        ("24", "1 2 4 8 16 24 48"),
    ],
)
def test_the_usual_numbers_of_workers_fill_the_machines(say, per_node, counts):
    text = say(*BARE[:-2], "--per-node", per_node)
    header = next(line for line in text.splitlines() if line.startswith("workers"))
    assert header.removesuffix("accuracy cost").split()[1:] == counts.split()


def test_a_cluster_file(say, tmp_path):
    (tmp_path / "lab.toml").write_text(
        "num_nodes = 4\nworkers_per_node = 1\n[intra]\nbandwidth_bps = 1e9\n"
        "[inter]\nbandwidth_bps = 1e9\n"
    )
    text = say("--params", "1M", "--step-ms", "100", "--cluster", "lab.toml")
    header = next(line for line in text.splitlines() if line.startswith("workers"))
    assert header.split()[1:4] == ["1", "2", "4"]


def test_measurements_are_a_cluster(say, refuse_advice, tmp_path):
    measure(Communicator.single_process(), ()).write(tmp_path / "here.json")
    text = say("--params", "1M", "--step-ms", "100", "--cluster", "here.json")
    assert "measured here: " in text
    for other in ("{}", "[]", '{"cluster": 3}'):
        (tmp_path / "here.json").write_text(other)
        message = refuse_advice("--params", "1M", "--step-ms", "100", "--cluster", "here.json")
        assert "`cluster` (=here.json) holds no measurements: it is no file of" in message
    assert "`cluster` (=no.json) can't be read" in refuse_advice(*BARE[:4], "--cluster", "no.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("copy_bytes_per_s", "fast"), ("burst_s", None), ("gradient_s", [1]), ("num_nodes", None)],
)
def test_measurements_that_are_no_numbers_are_named(refuse_advice, tmp_path, field, value):
    measure(Communicator.single_process(), ()).write(tmp_path / "here.json")
    table = json.loads((tmp_path / "here.json").read_text())
    (tmp_path / "here.json").write_text(
        json.dumps(table | {"cluster": table["cluster"] | {field: value}})
    )
    message = refuse_advice("--params", "1M", "--step-ms", "100", "--cluster", "here.json")
    assert (
        f"`cluster` (=here.json) holds no measurements: `{field}` (={value!r}) must be" in message
    )


@pytest.mark.parametrize("name", ["a[/b]", "lab[a100]", "[bold]"])
def test_a_name_is_printed_as_it_is(say, tmp_path, name):
    (tmp_path / "lab.toml").write_text(
        f"name = '{name}'\nnum_nodes = 1\nworkers_per_node = 2\n[intra]\nbandwidth_bps = 1e9\n"
    )
    text = say("--params", "1M", "--step-ms", "100", "--cluster", "lab.toml")
    assert text.startswith(f"{name}: 1 Gbit/s")


@pytest.mark.parametrize("columns", [20, 40, 60, 79, 100, 200])
def test_any_width_is_filled_and_none_exceeded(say, monkeypatch, columns):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    text = re.sub(r"\x1b\[[0-9;]*m", "", say(*BARE, "--timeline", "--noise-scale", "2000"))
    lines = [line for line in text.splitlines() if not line.startswith("in code:")]
    assert max(map(len, lines)) <= columns  # code is for copying: not wrapped
    assert "advice:" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "many", *BARE[2:]], "`params` (=many) must be a count such as 25M"),
        (["--params", "0", *BARE[2:]], "`params` (=0) must be at least 1."),
        (["--params", "1e400", *BARE[2:]], "`params` (=1e400) is too large: at most 9.22e+18."),
        (["--params", "1e15", *BARE[2:]], "`params` (=1,000,000,000,000,000) are 152,587,890"),
        ([*BARE[:2], *BARE[4:]], "`step_ms` is missing"),
        ([*BARE[:3], "0", *BARE[4:]], "`step_ms` (=0.0) must be above 0"),
        ([*BARE[:4], *BARE[6:]], "`link` is missing"),
        ([*BARE[:5], "10", *BARE[6:]], "`link` (=10) must be bits per second such as 10gbit"),
        ([*BARE[:5], "0gbit", *BARE[6:]], "`link` (=0gbit) must be above 0."),
        ([*BARE[:5], "1e400gbit", *BARE[6:]], "`link` (=1e400gbit) is too large."),
        ([*BARE[:7], "1,two"], "`workers` (=1,two) must be numbers between commas"),
        ([*BARE[:7], "0"], "`workers` (=0) must be at least 1."),
        ([*BARE[:7], "1,1e400"], "`workers` (=1e400) is too large: at most 9.22e+18."),
        (
            [*BARE[:7], "1,1e12", "--stragglers", "5"],
            "`workers` (=1,000,000,000,000) must be at most 1,048,576.",
        ),
        ([*BARE, "--latency-us", "-1"], "`latency_us` (=-1.0) must be 0 or more"),
        ([*BARE, "--latency-us", "inf"], "`latency_us` (=inf) must be 0 or more, and finite"),
        ([*BARE, "--per-node", "0"], "`per_node` (=0) must be at least 1."),
        ([*BARE, "--per-node", "3"], "`workers` (=4) must fill nodes of 3 workers; nearest: 3, 6"),
        ([*BARE, "--copy-gb-s", "0"], "`copy_gb_s` (=0.0) must be above 0"),
        ([*BARE, "--contention", "-5"], "`contention` (=-5.0) must be 0 or more"),
        ([*BARE, "--stragglers", "-5"], "`stragglers` (=-5.0) must be 0 or more"),
        ([*BARE, "--stragglers", "101"], "`stragglers` (=101) must be at most 100; 5 is about"),
        ([*BARE, "--stragglers", "nan"], "`stragglers` (=nan) must be 0 or more"),
        ([*BARE, "--global-batch", "100"], "`global_batch` (=100) must be a multiple of"),
        ([*BARE, "--dtype", "bf16"], "`dtype` (='bf16'): did you mean `bfloat16`"),
        ([*BARE, "--micro-batch", "0"], "`micro_batch` (=0) must be at least 1."),
        ([*BARE, "--max-points-lost", "-1"], "`max_points_lost` (=-1.0) must be 0 or more"),
        ([*BARE, "--total-samples", "0"], "`total_samples` (=0) must be at least 1."),
        ([*BARE, "--noise-scale", "0"], "`noise_scale` (=0) must be at least 1."),
        ([*BARE, "--cluster", "mn-1"], "`link` (=10gbit) and `cluster` (=mn-1) both say"),
        (
            ["--params", "1M", "--step-ms", "9", "--cluster", "mn-1", "--workers", "2048"],
            "`workers` (=2048) exceeds the 1024 of cluster mn-1",
        ),
        (
            ["--params", "1M", "--step-ms", "9", "--cluster", "mn1"],
            "`cluster` (=mn1) is neither a file nor a preset; did you mean `mn-1`?",
        ),
    ],
)
def test_bad_input_is_one_clear_message(refuse_advice, arguments, message):
    assert message in refuse_advice(*arguments)


def test_without_anything_it_says_what_it_needs(refuse_advice):
    assert "`link` is missing" in refuse_advice()
    assert "`params` is missing" in refuse_advice("--link", "10gbit")


def test_a_recipe_is_measured(say):
    text = say("digits", "--link", "1gbit", "--workers", "1,2", "--json", "out.json", "--timeline")
    found = json.loads(Path("out.json").read_text())
    assert found["params"] > 1000
    assert found["global_batch"] % found["micro_batch"] == 0
    assert found["compute_s"] > 0
    assert found["total_samples"] == 30 * 1437
    assert "advice: " in text


def test_columns_set_the_width_in_a_pipe(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = say(*BARE, "--timeline", "--noise-scale", "2000")
    lines = [line for line in text.splitlines() if not line.startswith("in code:")]
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--params", "1M"],
            "`params` (=1M) is measured for a recipe or a script: leave `--params` out",
        ),
        (["--dtype", "float64"], "`dtype` (=float64) is measured for a recipe or a script: leave"),
        (["--step-ms", "9"], "`step_ms` (=9) is measured for a recipe or a script: leave"),
        (
            ["--workers", "none"],
            "`workers` (=none) must be numbers between commas, such as 1,2,4,8",
        ),
    ],
)
def test_a_recipes_flags_are_checked(refuse_advice, flags, message):
    assert message in refuse_advice("digits", "--link", "1gbit", *flags)


def test_a_recipe_has_its_own_dtype(say):
    flags = ("--link", "1gbit", "--workers", "4", "--json", "out.json")
    found = {}
    for precision in ("float32", "float64", "bfloat16"):
        say("digits", *flags, "--precision", precision)
        cells = json.loads(Path("out.json").read_text())["predictions"]
        found[precision] = next(p["sent_bytes"] for p in cells if p["policy"] == "fp32")
    assert found["float64"] == 2 * found["float32"]
    assert found["bfloat16"] == found["float32"]  # autocast: the parameters have 32 bits


def test_a_recipes_own_checks_are_made(refuse_advice):
    message = refuse_advice("digits", "--link", "1gbit", "--micro-batch", "7")
    assert "multiple of `micro_batch`" in message


def test_an_unknown_recipe_gets_the_nearest(refuse_advice):
    assert "did you mean `digits`?" in refuse_advice("digit", "--link", "1gbit")


def test_a_flag_that_neither_advise_nor_the_recipe_has_is_refused(refuse_advice):
    message = refuse_advice("digits", "--microbatch", "8", "--link", "1gbit")
    assert "`--microbatch` is no flag of `allstep advise digits`; did you mean" in message
    assert "`extra` is no flag of" in refuse_advice("digits", "extra", "--link", "1gbit")


def test_help_of_a_recipe_shows_its_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["advise", "digits", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--link RATE" in text  # of advise
    assert "--precision" in text  # of the recipe


def test_help_on_an_unknown_recipe_says_so(refuse_advice):
    assert "did you mean `digits`?" in refuse_advice("digit", "--help")


def test_what_is_behind_two_dashes_is_the_recipes(say):
    flags = ("--link", "1gbit", "--workers", "2", "--json", "out.json")
    say("digits", *flags, "--", "--micro-batch", "8")
    assert json.loads(Path("out.json").read_text())["micro_batch"] == 8


def test_bare_numbers_have_nothing_behind_two_dashes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["advise", *BARE, "--", "train.py"])
    assert stop.value.code == 2
    assert "unrecognized arguments: -- train.py" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["advise", "--help"])
    assert stop.value.code == 0
    assert "allstep advise --params 25M" in capsys.readouterr().out


def bills(text):
    """(workers, machines, hours, cost, policy) of each row; a star marks the cheapest."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == ["workers", "machines"])
    stop = lines.index("efficiency")
    return [line.split(maxsplit=4) for line in lines[start + 1 : stop]]


@pytest.mark.parametrize(("more", "factor"), [((), 1.0), (("--interruptions-per-day", "2"), 1.01)])
def test_what_a_training_costs(say, more, factor):
    """One worker takes 110 ms for 32 of 115 million samples."""
    flags = ("--workers", "1,2,4,8", "--per-node", "4", "--total-samples", "115M")
    rows = bills(say(*BARE, *flags, "--price-per-hour", "3", *more))
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "1"], ["4", "1"], ["8", "2"]]
    hours = 115e6 / 32 * 0.110 / 3600
    assert float(rows[0][2]) == pytest.approx(factor * hours, rel=2e-3)
    for _, machines, row_hours, cost, _ in rows:
        total = 3 * int(machines) * float(row_hours)
        assert float(cost.strip("*")) == pytest.approx(total, rel=2e-3)
    assert [row[3][0] == "*" for row in rows] == [False, False, True, False]


def test_a_noise_scale_makes_large_batches_dearer(say):
    flags = ("--workers", "1,8", "--total-samples", "115M", "--price-per-hour", "3")
    plain, dearer = (bills(say(*BARE, *flags, *more)) for more in ((), ("--noise-scale", "1000")))
    assert dearer[0] == plain[0]
    ratio = float(dearer[1][2]) / float(plain[1][2])
    assert ratio == pytest.approx((1 + 256 / 1000) / (1 + 32 / 1000), rel=2e-3)


def test_a_training_that_never_ends_has_no_hours_in_json(say, tmp_path):
    """Its machines are interrupted more often than they write a checkpoint."""
    rare = ("--interruptions-per-day", "12", "--checkpoint-every-s", "86400")
    length = ("--total-samples", "1B", "--workers", "1,512", "--price-per-hour", "1")
    job = ("--params", "1B", "--step-ms", "500", "--cluster", "ethernet-10g")
    say(*job, *length, *rare, "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["predictions"]
    hours = {p["workers"]: p["training_hours"] for p in found}
    assert hours[1] > 0 and hours[512] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "100000000000"), "`workers` (=100,000,000,000) must be at most 1,048,576."),
        (("--price-per-hour", "3"), "`price_per_hour` (=3) says what a training costs"),
        (("--restart-s", "3"), "`restart_s` (=3) counts in what the training costs"),
        (("--price-per-hour", "-1"), "`price_per_hour` (=-1"),
        (("--price-per-hour", "3", "--checkpoint-every-s", "0"), "`checkpoint_every_s` (=0"),
    ],
)
def test_a_price_is_refused(refuse_advice, flags, message):
    assert message in refuse_advice(*BARE, *flags)
