"""The model-parallel examples learn, and learn the same on any number of workers."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.processes import run_script
from tests.helpers.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "numbers"), [("parallel_mlp", (2, 3)), ("parallel_convolution", (2, 4))]
)
def test_examples_train_the_same_on_any_number_of_workers(name, numbers, monkeypatch):
    module = load(name)
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
