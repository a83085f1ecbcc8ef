"""The recipe `cots`: the same on any number of workers, goes on where it was, tests its neurons."""

import itertools
import json
import signal
from typing import ClassVar

import pytest
import torch

from allstep.cli import run_folder
from allstep.comm import Communicator
from allstep.errors import CheckpointError, DisagreementError, UsageError
from allstep.nn import Grid
from allstep.recipes import DividedRecipe
from allstep.recipes.cots import Cots
from allstep.recipes.cots_net import NETS
from allstep.recipes.cots_pictures import TrainingPictures
from allstep.train import Checkpoints
from tests.helpers.launched import Launched
from tests.helpers.ranks import run_ranks
from tests.nn.grids import on_grid

TINY = {"steps": 3, "patches": 40, "batch": 8, "precision": "float64", "log_every_steps": 1}


def run(recipe: Cots, run_dir, num_workers: int = 1, *, resume: bool = False) -> dict:
    run_dir.mkdir(exist_ok=True)
    codes = run_ranks(num_workers, lambda comm: recipe.run(comm, run_dir, resume=resume))
    assert codes == [0] * num_workers
    return json.loads((run_dir / "report.json").read_text())


def rows_of(report: dict) -> dict[tuple[int, str], dict]:
    return {(i, row["name"]): row for i, row in enumerate(report["neurons"])}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    return run_dir, run(Cots(**TINY), run_dir)


def test_cots_report_and_pictures(alone):
    run_dir, report = alone
    rows = rows_of(report)
    names = [name for _, name in rows]
    assert names[:4] == [
        "stage 1 filters", "stage 1 filters, untrained", "random patches", "stage 1 output",
    ]  # fmt: skip
    assert names[-4:] == ["brightness", "contrast", "mean face (supervised)", "never a face"]
    assert len(rows) == 3 * 2 * 3 + 4
    for first in range(0, 18, 3):  # as many untrained neurons, as many random patches
        counts = {report["neurons"][i]["num_neurons"] for i in range(first, first + 3)}
        assert len(counts) == 1
    template, never = report["neurons"][-2:]
    assert template["auc"] > 0.85 and template["accuracy"] > never["accuracy"]
    assert never["accuracy"] == pytest.approx(182 / 232)
    assert report["num_steps"] == 9 and report["interrupted"] is None
    assert (run_dir / "filters.png").stat().st_size > 1000
    assert (run_dir / "best_stimuli.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_cots_on_two_workers_gives_the_same(alone, tmp_path):
    report = run(Cots(**TINY), tmp_path / "two", 2)
    assert report["workers"] == 2
    assert report["num_parameters"] == alone[1]["num_parameters"]
    for name, cost in alone[1]["costs"].items():
        assert report["costs"][name] == pytest.approx(cost, rel=1e-12)
    for key, row in rows_of(alone[1]).items():
        found = rows_of(report)[key]
        assert (found["auc"], found["accuracy"]) == pytest.approx((row["auc"], row["accuracy"]))


def filters_of(run_dir) -> list[torch.Tensor]:
    """All stages' filters, whole, as the last checkpoint has them."""
    found = Checkpoints(run_dir / "checkpoints", Communicator.single_process()).load_latest()
    assert found is not None
    return found[1]["below"]


@pytest.mark.parametrize(
    ("num_workers", "data_parallel"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2), (3, 3))],
)
def test_cots_divided_net_on_divided_data_is_that_of_one_worker(
    alone, tmp_path, num_workers, data_parallel
):
    """Three nets have 2, 3 and 3 of the 8 pictures."""
    run(Cots(**TINY, data_parallel=data_parallel), tmp_path / "run", num_workers)
    found, wanted = filters_of(tmp_path / "run"), filters_of(alone[0])
    assert len(found) == 3
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


class OwnSamplesOnly(Cots):
    """The control: the nets' gradients are not exchanged."""

    def _training(self, *arguments):
        training = super()._training(*arguments)
        begin_epoch = training.begin_epoch

        def begin_and_detach() -> bool:
            is_new = begin_epoch()
            training._exchange.detach()
            return is_new

        training.begin_epoch = begin_and_detach
        return training


def test_cots_nets_that_do_not_exchange_are_others(alone, tmp_path):
    recipe = OwnSamplesOnly(**TINY | {"log_every_steps": 100}, data_parallel=2)
    with pytest.raises(DisagreementError, match="`values of below/0 of rank 0` is checksum"):
        run(recipe, tmp_path / "run", 2)


def test_cots_with_nets_that_do_not_divide_the_workers(tmp_path):
    with pytest.raises(UsageError, match=r"`data_parallel` \(=2\) must divide the workers \(3\)"):
        run(Cots(**TINY, data_parallel=2), tmp_path / "run", 3)
    with pytest.raises(UsageError, match=r"`data_parallel` \(=9\) must be at most `batch` \(=8\)"):
        Cots(**TINY, data_parallel=9)


class Interrupted(Cots):
    """Gets a signal while it draws the pictures of an update."""

    signal_at: ClassVar[int]

    def pictures(self, *arguments) -> TrainingPictures:
        pictures = super().pictures(*arguments)
        numbers, draw = itertools.count(1), pictures.draw

        def interrupting_draw(generator: torch.Generator) -> torch.Tensor:
            if next(numbers) == self.signal_at:
                signal.raise_signal(signal.SIGTERM)
            return draw(generator)

        pictures.draw = interrupting_draw
        return pictures


@pytest.mark.parametrize("num_done", [2, 3])  # within a stage, and between two
def test_cots_resumes_bit_for_bit(alone, tmp_path, num_done):
    Interrupted.signal_at = num_done - 1  # workers agree to stop one update later
    recipe = Interrupted(**TINY)
    assert recipe.run(Communicator.single_process(), tmp_path, resume=False) == 128 + signal.SIGTERM
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["neurons"] == [] and report["num_steps"] == num_done
    report = run(Cots(**TINY), tmp_path, resume=True)
    assert report["costs"] == alone[1]["costs"]
    assert report["neurons"] == alone[1]["neurons"]


@pytest.mark.slow
def test_cots_resumes_on_another_mesh(alone, tmp_path):
    """Within a stage: its momentum is divided anew, too."""
    Interrupted.signal_at = 1
    recipe = Interrupted(**TINY)
    assert recipe.run(Communicator.single_process(), tmp_path, resume=False) == 128 + signal.SIGTERM
    run(Cots(**TINY, data_parallel=2), tmp_path, 2, resume=True)
    for x, y in zip(filters_of(tmp_path), filters_of(alone[0]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_cots_refuses_a_folder_that_does_not_fit(alone, tmp_path):
    run_dir, _ = alone
    comm = Communicator.single_process()
    with pytest.raises(UsageError, match=r"holds a run's checkpoints \(the newest of step 9\)"):
        Cots(**TINY).run(comm, run_dir, resume=False)
    with pytest.raises(CheckpointError, match=r"`lr` \(=0.5\) differs from .* \(=None\)"):
        Cots(**TINY, lr=0.5).run(comm, run_dir, resume=True)
    with pytest.raises(CheckpointError, match="There is no whole checkpoint in"):
        Cots(**TINY).run(comm, tmp_path, resume=True)


def test_cots_with_a_rate_that_is_too_high(tmp_path):
    recipe = Cots(**TINY | {"steps": 60}, lr=1000.0)
    for num_workers in (1, 2):
        with pytest.raises(UsageError, match=r"`lr` \(=1000.0\) is too high: the cost of stage 1"):
            run(recipe, tmp_path / str(num_workers), num_workers)
    assert not list(tmp_path.glob("*/checkpoints/*"))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("pixels", 25, "must be one of 24, 48, 200"),
        ("channels", 2, "must be 1 or 3"),
        ("steps", 0, "must be at least 1"),
        ("lr", 0.0, "must be positive"),
        ("momentum", 1.0, "must be at least 0 and below 1"),
        ("sparsity", -1.0, "must be 0 or more"),
        ("face_share", 1.0, "must be at least 0 and below 1"),
    ],
)
def test_cots_refuses_wrong_values(field, value, rule):
    with pytest.raises(UsageError, match=rf"`{field}` \(={value}\) {rule}"):
        Cots(**{field: value})


def test_cots_recipe_round_trip_in_a_run_folder(tmp_path):
    recipe = Cots(size="large", faces=tmp_path / "x.vec")
    run_folder.write_recipe(tmp_path, recipe)
    found = run_folder.read_recipe(tmp_path, argument="run")
    assert found == recipe and isinstance(found, DividedRecipe)
    with pytest.raises(UsageError, match="Recipe `cots` divides its model over the workers"):
        run_folder.data_parallel(found)


@pytest.mark.parametrize("pixels", [24, 48])
def test_cots_nets_on_four_workers(pixels):
    def maps(grid: Grid) -> list[int]:
        stages = Cots(pixels=pixels, size=size).stages(grid, 0)
        x = torch.randn(2, 1, *stages[0].in_layout.windows[grid.rank].shape)
        assert (
            torch.nn.Sequential(*stages)(x).shape[2:]
            == stages[-1].out_layout.windows[grid.rank].shape
        )
        return [stage.filtering.depth for stage in stages]

    size = "small"
    depths = [shape.block[0] for shape in NETS[pixels].stages]
    assert on_grid((2, 2), maps) == [depths] * 4
    size = "large"
    assert on_grid((2, 1), maps) == [[4 * depth for depth in depths]] * 2


@pytest.mark.slow
@pytest.mark.process
def test_cots_command_on_two_workers(tmp_path):
    flags = ["--steps", "3", "--patches", "40", "--batch", "8", "--workers", "2"]
    command = Launched("-m", "allstep", "train", "cots", "--run-dir", "run", *flags, cwd=tmp_path)
    command.finish(within_s=100)
    assert command.code == 0, command.errors
    assert "stage 3 output" in command.output and "2 worker(s)" in command.output
    again = Launched("-m", "allstep", "train", "--resume", "run", cwd=tmp_path)
    again.finish(within_s=100)  # on one worker; nothing is left but the test
    assert again.code == 0, again.errors
    lines = [
        [line for line in output.splitlines() if "stage" in line]
        for output in (command.output, again.output)
    ]
    assert [line[:40] for line in lines[0]] == [line[:40] for line in lines[1]]
