"""Recipes and their counts of operations on a real GPU; see `tests.helpers.on_gpu`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import allstep
from allstep import Communicator
from allstep.recipes.gru import Gru
from allstep.train.devices import map_tensors
from allstep.train.flops import count_flops
from tests.helpers.compare import differing_names
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu, run_on_gpu
from tests.helpers.small_recipes import small_gru, small_text
from tests.helpers.texts import write_topics

pytestmark = [pytest.mark.gpu, pytest.mark.process]

STEPS, BATCH, WIDTH, HIDDEN = 7, 5, 16, 32
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Called(TorchDispatchMode):
    """The names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def count_and_names(function: Callable[[], Tensor]) -> tuple[float | None, set[str]]:
    """Operations of a forward and backward pass, and what is called in one."""
    with Called() as called:
        function().sum().backward()
    return count_flops(lambda: function().sum().backward()), called.names


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(
    "form",
    [{}, {"batch_first": True, "bias": False}, {"bidirectional": True, "dtype": torch.float64}],
)
def test_operations_of_recurrent_layers_are_those_of_their_products(
    kind: type[nn.RNNBase], gates: int, form: dict[str, Any]
) -> None:
    net = kind(WIDTH, HIDDEN, num_layers=2, device=gpu(), **form)
    x = torch.randn(STEPS, BATCH, WIDTH, dtype=net.weight_hh_l0.dtype, device=gpu())
    x = (x.transpose(0, 1) if net.batch_first else x).requires_grad_()
    counted, names = count_and_names(lambda: net(x)[0])
    matrices = sum(p.numel() for p in net.parameters() if p.ndim == 2)
    expected = 3 * 2 * STEPS * BATCH * matrices
    if on_cpu():  # step by step, without the gradient of the first hidden state
        assert counted == pytest.approx(expected, rel=0.1)
        return
    assert {"_cudnn_rnn", "_cudnn_rnn_backward"} <= names
    assert counted == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_operations_of_fused_attention_are_those_of_its_products(kernel: str, causal: bool) -> None:
    """The scores once more in the backward pass, then four gradients."""
    if on_cpu() and kernel != "flash":
        pytest.skip("a kernel of GPUs")
    batch, heads, length, width = 2, 4, 64, 32
    dtype = torch.float32 if on_cpu() else torch.float16
    query, key, value = (
        torch.randn(batch, heads, length, width, dtype=dtype, device=gpu(), requires_grad=True)
        for _ in range(3)
    )

    def attend() -> Tensor:
        with sdpa_kernel(KERNELS[kernel]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    counted, names = count_and_names(attend)
    product = 2 * batch * heads * length * length * width
    assert counted == pytest.approx(7 * product, rel=0.01)
    assert any(name.startswith(f"_scaled_dot_product_{kernel}_attention") for name in names)


RECIPES = {
    "gru": partial(small_gru, width=16, log_every_steps=1),
    "text": partial(small_text, dropout=0.1, objective="causal"),
}


def train_recipe(comm: Communicator, name: str, folder: str, run_dir: str) -> dict[str, Any]:
    recipe = RECIPES[name](Path(folder), precision="float32", compression="exact")
    task = recipe.task(comm)
    report = allstep.fit(task, recipe, comm, Path(run_dir))
    state = map_tensors(task.model.state_dict(), lambda tensor: tensor.cpu())
    return {
        "model": state,
        "metrics": dict(report.metrics),
        "flops": report.flops_per_sample,
        "num_steps": report.num_steps,
    }


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_the_same_bits_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Dropout between layers and in fused attention, with sums that are exact."""
    folder = str(write_topics(tmp_path / "texts", 3, num_characters=1500))
    runs = {
        size: run_on_gpu(size, train_recipe, name, folder, str(tmp_path / str(size)))
        for size in (1, 2, 3)
    }
    (expected,) = runs[1]
    assert expected["num_steps"] > 2 and expected["flops"] > 0
    for size in (2, 3):
        for found in runs[size]:
            assert not differing_names(found["model"], expected["model"]), size
            assert found["metrics"] == expected["metrics"], size


def test_gru_trains_in_lower_precision_without_a_warning(tmp_path: Path) -> None:
    """Its layers stay in one piece for cuDNN, which warns otherwise, also while a cost is measured.

    Warnings are errors here.
    """
    folder = write_topics(tmp_path / "texts", 3, num_characters=700)
    recipe = replace(small_gru(folder), precision="float32" if on_cpu() else "bfloat16")
    comm = Communicator.single_process(gpu())
    task = recipe.task(comm)
    report = allstep.fit(task, recipe, comm, tmp_path / "run")
    assert isinstance(recipe, Gru)
    scores = 2 * recipe.sequence_length * recipe.width * 256
    per_sample = 3 * (recipe.forward_flops / recipe.micro_batch + scores)
    assert report.flops_per_sample == pytest.approx(per_sample, rel=0.1 if on_cpu() else 0.01)
