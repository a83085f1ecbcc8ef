"""`allstep advise --mesh`: what it says, what it writes and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from allstep.cli.main import main
from tests.helpers.texts import write_topics

pytestmark = pytest.mark.usefixtures("in_empty_folder")

BLOCKS = ("--transformer", "depth=24,width=1024,heads=16,sequence-length=512")
BARE = ("--params", "355M", "--step-ms", "900", "--micro-batch", "8", "--link", "25gbit")
NODES = ("--per-node", "8", "--node-link", "400gbit", "--copy-gb-s", "600")


@pytest.fixture
def say(capsys):
    """Runs `allstep advise` and returns what it prints, and all numbers."""

    def run(*arguments: str) -> tuple[str, dict[str, Any]]:
        assert main(["advise", *arguments, "--json", "out.json"]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return " ".join(found.out.split()), json.loads(Path("out.json").read_text())

    return run


def test_one_mesh_is_predicted(say):
    text, found = say(*BARE, *NODES, *BLOCKS, "--mesh", "data=4,tensor=2", "--timeline")
    (prediction,) = found["predictions"]
    assert (prediction["data"], prediction["tensor"], prediction["workers"]) == (4, 2, 8)
    assert "data=4,tensor=2*" in text
    for title in ("step", "waits", "GiB a worker", "samples/s", "tokens/s", "speed-up"):
        assert title in text
    assert "Batch: 8 a copy." in text
    assert "in code: comm.mesh(data=4, tensor=2) and allstep.Synchronous(" in text
    assert "columns are" in text
    assert prediction["samples_per_s"] == pytest.approx(32 / prediction["step_s"])
    assert f"{512 * prediction['samples_per_s']:,.3g}" in text
    needs = prediction["memory_bytes"]
    assert needs["total"] == sum(needs[key] for key in needs if key != "total")
    assert found["states_per_param"] == 2


def test_undivided_mesh_is_the_usual_advice(say):
    _, mesh = say(*BARE, *NODES, *BLOCKS, "--mesh", "data=8")
    _, usual = say(*BARE, *NODES, "--workers", "8")
    (expected,) = (p for p in usual["predictions"] if p["policy"] == "fp32")
    (found,) = mesh["predictions"]
    for key in ("step_s", "exposed_s", "speed_up", "sent_bytes", "algorithm", "bucket_bytes"):
        assert found[key] == expected[key]
    _, divided = say(*BARE, *NODES, *BLOCKS, "--mesh", "data=4,tensor=2")
    assert divided["predictions"][0]["step_s"] != expected["step_s"]


def test_auto_ranks_all_meshes_that_fit_and_says_why_others_drop_out(say):
    flags = (*BARE, *NODES, *BLOCKS, "--mesh", "auto", "--workers", "16", "--total-samples", "10M")
    text, found = say(*flags)
    assert len(found["predictions"]) == 5 + 4
    assert found["left_out"] == {}
    times = [p["training_s"] for p in found["predictions"]]
    assert times == sorted(times)
    assert found["recommended"]["tensor"] == 1
    assert "The whole training takes " in text

    text, found = say(*flags, "--memory-gib", "10")
    assert list(found["left_out"]) == ["data=16,tensor=1", "data=16,tensor=1,shard=16"]
    assert "left out: data=16,tensor=1: a worker needs 14.4 GiB, and has 10." in text
    assert found["recommended"]["tensor"] == 2
    assert "advice: data=8,tensor=2: " in text

    text, found = say(*flags, "--memory-gib", "12", "--node-link", "100gbit")
    assert list(found["left_out"]) == ["data=16,tensor=1"]
    assert found["recommended"]["shard"] == 16
    assert "advice: data=16,tensor=1,shard=16: " in text
    assert "in code: torch's fully_shard over 16 workers along `data`, comm.mesh(data=16, " in text

    text, found = say(*flags, "--memory-gib", "1")
    assert found["recommended"] is None
    assert "advice: none of these meshes fits: data=1,tensor=16 needs least" in text
    assert "in code" not in text


def test_auto_ranks_pipelines_where_a_step_has_micro_batches(say):
    flags = (*BARE, *NODES, *BLOCKS, "--mesh", "auto", "--workers", "16", "--global-batch", "256")
    text, found = say(*flags, "--memory-gib", "10")
    pipelined = [p for p in found["predictions"] if p["pipeline"] > 1]
    assert [p["shard"] > 1 for p in pipelined].count(True) == 6
    assert len(pipelined) == 16
    assert {p["data"] * p["pipeline"] * p["tensor"] for p in pipelined} == {16}
    assert all(p["bubble_s"] > 0 for p in pipelined)
    assert list(found["left_out"]) == [
        "data=16,tensor=1",
        "data=16,tensor=1,shard=16",
        "data=1,pipeline=16,tensor=1",
    ]
    assert "data=1,pipeline=16,tensor=1: a worker needs 10.9 GiB" in text  # of 16 micro-batches

    sharded = ("--mesh", "data=2,pipeline=4,shard=2", "--global-batch", "128")
    text, found = say(*BARE, *BLOCKS, *sharded)
    assert found["predictions"][0]["sharding_s"] > 0
    assert "fully_shard of each stage over 2 workers along `data`, allstep.nn.Pipeline(" in text

    text, found = say(*BARE, *BLOCKS, "--mesh", "data=2,pipeline=4", "--global-batch", "128")
    (one,) = found["predictions"]
    assert one["waiting_share"] > one["bubble_s"] / one["step_s"] > 0.15
    assert (
        'in code: allstep.nn.Pipeline(..., schedule="1f1b"), comm.mesh(data=2, pipeline=4' in text
    )
    assert "since the busiest stage sets the pace" in text  # that with the logits
    text, found = say(
        *BARE, *BLOCKS, "--mesh", "data=2,pipeline=4", "--global-batch", "128",
        "--stages-per-worker", "2",
    )  # fmt: skip
    assert found["stages_per_worker"] == 2
    assert found["predictions"][0]["bubble_s"] == pytest.approx(one["bubble_s"] / 2, rel=0.1)
    assert 'schedule="interleaved"' in text


def test_auto_leaves_out_what_does_not_divide(say):
    heads = ("--transformer", "depth=24,width=1020,heads=6,sequence-length=512")
    text, found = say(*BARE, *heads, "--mesh", "auto", "--workers", "12")
    assert list(found["left_out"]) == ["data=3,tensor=4", "data=1,tensor=12"]
    assert "left out: data=3,tensor=4: `tensor` (=4) must divide the 6 heads" in text


def test_a_recipe_knows_its_blocks(say, tmp_path):
    folder = write_topics(tmp_path / "texts", 4)
    small = ("--vocab-size", "300", "--sequence-length", "16", "--width", "16", "--depth", "2")
    recipe = ("text", "--folder", str(folder), *small, "--threads", "1")
    text, found = say(*recipe, "--link", "1gbit", "--mesh", "auto", "--workers", "8")
    shares = [found["transformer"].pop(f"measured_{name}share") for name in ("", "logits_")]
    assert all(0 < share < 1 for share in shares)
    assert found["transformer"] == {
        "depth": 2,
        "width": 16,
        "heads": 4,
        "sequence_length": 16,
        "activation_bytes": 4,
    }
    assert found["states_per_param"] == 2  # AdamW's, counted
    assert list(found["left_out"]) == [  # of the two micro-batches only a single copy has both
        "data=4,pipeline=2,tensor=1",
        "data=2,pipeline=2,tensor=2",
        "data=1,tensor=8",
    ]
    assert "needs 2 micro-batches of each copy in a step, or more, and there are 1" in text
    assert "must be a multiple of `tensor_parallel` (=8)" in text
    assert found["total_samples"] > 0
    _, momentum = say(
        *recipe, "--link", "1gbit", "--mesh", "data=2", "--optimizer", "sgd",
        "--precision", "bfloat16",
    )  # fmt: skip
    assert momentum["states_per_param"] == 1
    assert momentum["transformer"]["activation_bytes"] == 2


MESH = (*BARE, *BLOCKS, "--mesh")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BARE, "--mesh", "data=4,tensor=2"), "of which the number of parameters doesn't say the"),
        ((*MESH, "data=4,pipe=2"), "has no place for `pipe=2`; give data=N,pipeline=N,tensor=N,"),
        (
            (*MESH, "8"),
            "`mesh` (=8) has no place for `8`; give data=N,pipeline=N,tensor=N,shard=N.",
        ),
        ((*MESH, "data=4,shard=3"), "`shard` (=3) must divide `data` (=4)."),
        ((*MESH, "data=2,data=2"), "`mesh` (=data=2,data=2) has `data` twice."),
        ((*MESH, "data=0"), "`mesh: data` (=0) must be at least 1."),
        ((*MESH, "data=two"), "`mesh: data` (=two) must be a count"),
        ((*MESH, "data=4,tensor=3"), "`tensor` (=3) must divide the 16 heads"),
        (
            (*MESH, "data=4,tensor=2", "--workers", "4"),
            "has 8 workers, and `workers` (=4) says otherwise",
        ),
        ((*MESH, "auto"), "`workers` is missing: of how many `--mesh auto` ranks the meshes"),
        ((*MESH, "auto", "--workers", "2,4"), "`workers` (=2,4) are several numbers"),
        ((*MESH, "auto", "--workers", "4", "--memory-gib", "0"), "`memory_gib` (=0.0) must be abo"),
        ((*MESH, "data=2", "--states-per-param", "-1"), "`states_per_param` (=-1.0) must be 0 or"),
        ((*MESH, "data=2", "--stragglers", "5"), "`stragglers` (=5) isn't known of a `mesh`"),
        ((*MESH, "data=2", "--plot", "a.png"), "`plot` (=a.png) isn't known of a `mesh` (=data=2)"),
        ((*MESH, "data=2", "--measure"), "`measure` (=True) isn't known of a `mesh` (=data=2)"),
        (
            (*MESH, "data=3,tensor=4", "--per-node", "6"),
            "`tensor` (=4) must divide the 6 workers of a node",
        ),
        (
            (*MESH, "pipeline=32", "--global-batch", "256"),
            "`pipeline` (=32) must be at most the 24 blocks, of which each stage has one or more.",
        ),
        (
            (*MESH, "data=2,pipeline=4", "--global-batch", "48"),
            "needs 4 micro-batches of each copy in a step, or more, and there are 3",
        ),
        ((*MESH, "pipeline=4"), "and there are 1: give a larger `global_batch` or a smaller"),
        (
            (*MESH, "pipeline=8", "--global-batch", "64", "--stages-per-worker", "4"),
            "`pipeline` (=8) x `stages_per_worker` (=4) must be at most the 24 blocks",
        ),
        (
            (*MESH, "data=2", "--stages-per-worker", "2"),
            "`stages_per_worker` (=2) counts in a pipeline, which `mesh` (=data=2) has none of",
        ),
        (
            (*MESH, "data=2", "--stages-per-worker", "0"),
            "`stages_per_worker` (=0) must be at least",
        ),
        (
            (*MESH, "data=2,pipeline=3", "--global-batch", "64", "--per-node", "2"),
            "`pipeline x tensor` (=3) must divide the 2 workers of a node",
        ),
        ((*BARE, *BLOCKS), "counts where a model is divided; give `--mesh` auto or"),
        ((*BARE, "--memory-gib", "2"), "`memory_gib` (=2) counts where a model is divided"),
        (
            (*BARE, "--mesh", "data=2", "--transformer", "depth=2,width=8"),
            "`transformer` (=depth=2,width=8) doesn't say `heads`.",
        ),
        (
            ("--params", "1M", *BARE[2:], *BLOCKS, "--mesh", "data=2"),
            "`params` (=1,000,000) are fewer than the 302,309,376 of 24 blocks",
        ),
        (
            ("digits", "--link", "1gbit", "--mesh", "data=2"),
            "Recipe `digits` has no blocks that tensor parallelism divides; `text` has.",
        ),
        (
            ("digits", "--link", "1gbit", "--mesh", "data=2", *BLOCKS),
            "is the recipe's own: leave `--transformer` out.",
        ),
    ],
)
def test_bad_input_is_one_clear_message(refuse_advice, arguments, message):
    assert message in refuse_advice(*arguments)


def test_a_ratio_that_two_decimals_would_hide(say):
    text, _ = say(
        "--params", "355M", "--step-ms", "1", "--link", "1mbit", *BLOCKS, "--mesh", "data=2"
    )
    assert "0.00x" not in text
    assert "comes to 1.7e-07x its speed" in text


def test_too_few_parameters_are_told_before_any_output(capsys):
    arguments = ("--params", "1M", *BARE[2:], *BLOCKS, "--mesh", "data=2")
    assert main(["advise", *arguments]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--experts", "4"),
            "divides plain blocks, and those of recipe `text` have experts: leave `--experts` out",
        ),
        (("--tensor-parallel", "2"), "both say how the model is divided: leave these out"),
        (("--pipeline", "2"), "both say how the model is divided: leave these out"),
        (("--heads", "1"), "`heads` (=1) must be a multiple of `tensor_parallel` (=2)"),
    ],
)
def test_a_recipe_that_does_not_divide_is_refused(refuse_advice, tmp_path, flags, message):
    folder = write_topics(tmp_path / "texts", 4)
    arguments = ("text", "--folder", str(folder), "--link", "1gbit", "--mesh", "data=1,tensor=2")
    assert message in refuse_advice(*arguments, *flags)


@pytest.mark.parametrize("flags", [("--shard",), ("--tensor-parallel", "2"), ("--pipeline", "2")])
def test_a_divided_recipe_without_a_mesh_is_refused(refuse_advice, tmp_path, flags):
    """Whose prediction would be of whole copies."""
    folder = write_topics(tmp_path / "texts", 4)
    found = refuse_advice("text", "--folder", str(folder), "--link", "1gbit", *flags)
    assert "divide its model, and whole copies are predicted" in found


def test_a_recipe_whose_blocks_make_no_equal_stages_is_refused(refuse_advice, tmp_path):
    folder = write_topics(tmp_path / "texts", 4)
    arguments = ("text", "--folder", str(folder), "--link", "1gbit", "--mesh", "data=1,pipeline=2")
    found = refuse_advice(*arguments, "--depth", "3", "--global-batch", "64")
    assert "`depth` (=3) must be a multiple of `pipeline` (=2)" in found
    assert "needs 2 micro-batches" in refuse_advice(*arguments, "--global-batch", "16")
