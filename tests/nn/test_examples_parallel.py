"""The model-parallel examples learn, and learn the same on any number of workers."""

from pathlib import Path

import pytest

from tests.helpers.processes import run_script
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import load_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("parallel_mlp", (2, 3)),
        pytest.param("parallel_convolution", (2, 4), marks=pytest.mark.slow),
    ],
)
def test_examples_train_the_same_on_any_number_of_workers(name, numbers, monkeypatch):
    module = load_script(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(module, "EPOCHS", 1)
    ((accuracy, norm),) = run_ranks(1, module.train)
    for num_workers in numbers:
        split_accuracy, split_norm = run_ranks(num_workers, module.train)[0]
        assert split_accuracy == accuracy and abs(split_norm - norm) < 1e-9 * norm


@pytest.mark.process
@pytest.mark.parametrize(
    "name", ["parallel_mlp", pytest.param("parallel_convolution", marks=pytest.mark.slow)]
)
def test_examples_run_in_two_processes(name, tmp_path):
    (printed, _) = run_script(2, EXAMPLES / f"{name}.py", tmp_path)
    assert float(printed.split()[2].rstrip(",")) > 0.85
