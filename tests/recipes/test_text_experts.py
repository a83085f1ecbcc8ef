"""`text` with experts that are divided over workers: the run of one worker, and what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError
from allstep.nn import MixtureOfExperts
from allstep.optim import NonfiniteGradientError
from allstep.recipes.text import Text
from allstep.train import read_checkpoint
from allstep.train.packing import tensors_in
from tests.helpers.compare import differing_names
from tests.helpers.divided import Found, keep_one_checkpoint, largest_difference, merged
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import small_text
from tests.helpers.texts import check_three_workers_refused

Train = Callable[..., Found]


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 2, "dropout": 0.1, "experts": 4, "capacity_factor": 1.0, "held_out": 0.05}
    return small_text(folder, **usual | changes)


def initial_of(recipe: Text) -> dict[str, Tensor]:
    """Threads share the random state that initial weights are drawn from."""
    return recipe.task(Communicator.single_process()).model.double().state_dict()


@pytest.fixture
def train(folder: Path, tmp_path: Path, thread_generators: Any) -> Train:  # noqa: F811
    def train(
        size: int,
        recipe: Text,
        spoil: Callable[[nn.Module, Communicator], None] = lambda model, comm: None,
        run_dir: str | None = None,
        resume: bool = False,
    ) -> Found:
        initial = initial_of(recipe)
        where = tmp_path / (run_dir or f"run-{len(list(tmp_path.iterdir()))}")

        def work(comm: Communicator) -> Found:
            task = recipe.task(comm)
            task.model.double().load_state_dict({n: initial[n] for n in task.model.state_dict()})
            spoil(task.model, comm)
            report = allstep.fit(task, recipe, comm, where, resume=resume)
            return task.model.state_dict(), report

        return merged(run_ranks(size, work, timeout_s=100))

    return train


# -- the same run on any number of workers -------------------------------------------------------


def test_experts_on_any_number_of_workers(folder: Path, train: Train) -> None:
    """With dropout, clipping, dropped tokens, and an epoch's last batch of fewer micro-batches."""
    recipe = small(folder, train_share=0.2, clip_norm=0.2)
    one = train(1, recipe)
    assert one[1].num_steps >= 7
    assert one[1].metrics["dropped"] > 0.01
    for size in (2, 4):
        assert largest_difference(one, train(size, recipe)) < 1e-10
    unclipped = train(1, small(folder, train_share=0.2, clip_norm=None))
    assert largest_difference(one, unclipped) > 1e-6


def test_control_of_experts(folder: Path, train: Train) -> None:
    """The mean over workers of what only one of them has is another model."""

    def average(model: nn.Module, comm: Communicator) -> None:
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                for p in layer.experts.parameters():
                    p.register_hook(lambda gradient: gradient / comm.size)

    recipe = small(folder, train_share=0.11, optimizer="sgd", lr=0.5)
    one = train(1, recipe)
    assert largest_difference(one, train(2, recipe)) < 1e-10
    assert largest_difference(one, train(2, recipe, average)) > 1e-3


def test_padded_paragraphs(folder: Path, train: Train) -> None:
    """Whose micro-batches have different numbers of targets; balance losses count by these."""
    recipe = small(folder, samples="paragraphs", train_share=0.11)
    assert largest_difference(train(1, recipe), train(2, recipe)) < 1e-10


def train_alone(comm: Communicator, recipe: Text, run_dir: Path) -> Found:
    task = recipe.task(comm)
    return task.model.state_dict(), allstep.fit(task, recipe, comm, run_dir)


@pytest.mark.process
def test_experts_in_processes(folder: Path, tmp_path: Path) -> None:
    """Which draw the initial weights themselves."""
    recipe = small(folder, train_share=0.15, capacity_factor=None)
    one = train_alone(Communicator.single_process(), recipe, tmp_path / "one")
    both = run_processes(2, train_alone, recipe, tmp_path / "both", timeout_s=100)
    assert largest_difference(one, merged(both)) < 1e-10


@pytest.mark.process
def test_exact_sums_of_experts_in_processes(folder: Path, tmp_path: Path) -> None:
    """Parameters, moments, units of the grid, logged losses and evaluation."""
    changes = {"precision": "float32", "clip_norm": 0.2, "train_share": 0.15, "threads": 1}
    recipe = small(folder, compression="exact", **changes)
    one = train_alone(Communicator.single_process(), recipe, tmp_path / "one")
    both = run_processes(2, train_alone, recipe, tmp_path / "both", timeout_s=100)
    assert largest_difference(one, merged(both)) == 0
    tensors, same = (tensors_in(read_checkpoint(newest(tmp_path / n))) for n in ("one", "both"))
    assert not differing_names(tensors, same)
    assert logged(tmp_path / "one") == logged(tmp_path / "both")
    rounded = small(folder, **changes)
    other = run_processes(2, train_alone, rounded, tmp_path / "fp32", timeout_s=100)
    assert largest_difference(one, merged(other)) > 0
    assert logged(tmp_path / "one") != logged(tmp_path / "fp32")


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def logged(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in x.items() if k not in ("samples_per_s", "time")} for x in lines]


def test_experts_are_not_elastic(folder: Path, tmp_path: Path) -> None:
    recipe, comm = small(folder, compression="exact"), Communicator.single_process()
    with pytest.raises(UsageError, match=r"task.model.blocks.0.mlp.experts` is divided over work"):
        allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run", elastic=True)


@pytest.mark.parametrize(
    ("first", "then"),
    [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 4), (1, 2)))],
)
def test_experts_resume_on_other_workers(
    folder: Path, tmp_path: Path, train: Train, first: int, then: int
) -> None:
    """From a checkpoint in the middle of an epoch, which has all experts and their moments."""
    recipe = small(folder, train_share=0.3, checkpoint_every_steps=5, keep_checkpoints=9)
    undisturbed = train(first, recipe, run_dir="run")
    checkpoints = tmp_path / "run" / "checkpoints"
    keep_one_checkpoint(tmp_path / "run", 5)
    resumed = train(then, recipe, run_dir="run", resume=True)
    assert len(list(checkpoints.iterdir())) > 1
    assert largest_difference(undisturbed, resumed) < 1e-10


# -- what it is trained for ----------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [1, 2])
def test_balance_counts_for_each_target(folder: Path, pipeline: int) -> None:
    def task_of(**changes: Any) -> allstep.Task:
        recipe = small(folder, pipeline=pipeline, **changes)
        return recipe.task(Communicator.single_process())

    model = task_of().model.double().eval()
    losses = []
    for weight in (0.0, 2.0):
        task = task_of(balance_weight=weight)
        batch = task.train_set[0]
        losses.append(task.loss(model, tuple(part[None] for part in batch)))
    (plain, count), (balanced, _) = losses
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    balances: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, x, found: balances.append(found[1]))
    _, balance, *_ = model(batch[0][None])
    torch.testing.assert_close(balance, torch.stack(balances).mean())
    torch.testing.assert_close(balanced - plain, 2.0 * count * balance)
    metrics = task.metrics(model, tuple(part[None] for part in batch))
    dropped = sum(layer.num_dropped for layer in layers)
    assert dropped > 0
    assert metrics["dropped"] == (dropped, 16 * 2 * 2)  # tokens, experts of each, layers
    assert metrics["balance"][1] == 16


def test_experts_cost_a_token_as_much_as_a_single_network(folder: Path) -> None:
    def parameters(**changes: Any) -> dict[str, int]:
        recipe = small(folder, depth=1, **changes)
        named = recipe.task(Communicator.single_process()).model.named_parameters()
        return {name: p.numel() for name, p in named if "mlp." in name and p.ndim == 2}

    for top_k in (1, 2, 4):
        of_experts = parameters(top_k=top_k)
        del of_experts["blocks.0.mlp.router.weight"]
        assert sum(of_experts.values()) * top_k == 4 * sum(parameters(experts=None).values())


def test_nobody_sees_later_tokens_without_a_limit(folder: Path) -> None:
    recipe = small(folder, capacity_factor=None)
    model = recipe.task(Communicator.single_process()).model.double().eval()
    one, other = torch.zeros(2, 1, 16, dtype=torch.int64)
    other[0, -1] = 5
    assert torch.allclose(model(one)[0][:, :-1], model(other)[0][:, :-1], rtol=0, atol=1e-12)


# -- a gradient that is not finite ---------------------------------------------------------------


def overflow(model: nn.Module, comm: Communicator) -> None:
    """The gradient of one expert, which the last worker has."""
    for name, p in model.named_parameters():
        if name.endswith("blocks.0.mlp.experts.3.output.bias"):
            p.register_hook(lambda gradient: gradient * math.inf)


def test_one_workers_bad_gradient_is_named_on_all(folder: Path, train: Train) -> None:
    recipe = small(folder, train_share=0.2)
    with pytest.raises(NonfiniteGradientError, match=r"blocks\.0\.mlp\.experts\.3\.output\.bias"):
        train(2, recipe, overflow)


def test_one_workers_bad_gradient_skips_the_step_on_all(folder: Path, train: Train) -> None:
    recipe = small(folder, train_share=0.2, nonfinite="skip")
    _, report = train(2, recipe, overflow)
    assert report.num_skipped == report.num_steps > 0


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 1}, r"`experts` \(=1\) must be at least 2"),
        ({"top_k": 5}, r"`top_k` \(=5\) must be at most `experts` \(=4\)"),
        ({"top_k": 3}, r"`top_k` \(=3\) must divide the 64 hidden features"),
        ({"capacity_factor": 0.0}, r"`capacity_factor` \(=0.0\) must be positive"),
        ({"balance_weight": -1.0}, r"`balance_weight` \(=-1.0\) must be 0 or more"),
        ({"staleness": 1}, r"`staleness` \(=1\) is for models that are whole"),
        ({"sync_every": 2}, r"`sync_every` \(=2\) is for models that are whole"),
    ],
)
def test_values_that_mean_nothing(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes)


def test_experts_that_do_not_divide(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "`experts` (=4) must be a multiple of the 3 workers, as each has as many; nearest: 3, 6"
    flags = ["--folder", str(folder), "--experts", "4", "--expert-copies", "1"]
    recipe = small(folder / "nowhere", expert_copies=1)
    check_three_workers_refused(recipe, flags, words, tmp_path / "run", capsys)
    with pytest.raises(UsageError, match="must be a multiple of the 3 copies of the model"):
        small(folder, tensor_parallel=2, expert_copies=1).check_workers(6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_scale_every_steps": 2}, r"`noise_scale_every_steps` \(=2\) .* leave it out"),
    ],
)
def test_what_looks_at_one_workers_gradients(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    recipe = small(folder, **changes)

    def work(comm: Communicator) -> None:
        allstep.fit(recipe.task(comm), recipe, comm, tmp_path / "run")

    with pytest.raises(UsageError, match=words):
        run_ranks(2, work)
