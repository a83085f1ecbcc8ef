"""With exact sums experts are the same, to the last bit, on any number of workers."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, UsageError
from allstep.nn import MixtureOfExperts
from allstep.train import read_checkpoint
from allstep.train.packing import tensors_in
from tests.helpers.compare import differing_names, equal
from tests.helpers.generators import seeded_thread, thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

D, E = 33, 4  # odd, so that tokens begin anywhere in memory
NUM_EPOCHS = 4
JUMPS = {4: 1e6, 8: 1e-7}  # factors of the loss in some steps, which leave the grid


class Net(nn.Module):
    """Experts with dropout, without room for all of their tokens; one of them is seldom chosen."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.moe = MixtureOfExperts(
            lambda: nn.Sequential(nn.Linear(D, 65), nn.GELU(), nn.Dropout(0.2), nn.Linear(65, D)),
            comm,
            D,
            E,
            top_k=2,
            capacity_factor=1.25,
            seed=1,
            seeded=seeded_thread,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance_loss = self.moe(self.norm(x))
        return x + y, balance_loss


def samples(num: int = 51) -> TensorDataset:
    """Of 51 an epoch's last global batch of 20 has 11, in three micro-batches of 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 3, D, generator=generator)
    return TensorDataset(x, x.flip(-1).sin())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def train(
    comm: Communicator,
    run_dir: Path,
    *,
    num_epochs: int = NUM_EPOCHS,
    policy: allstep.Synchronous,
    optimizer: str = "adamw",
    factors: dict[int, float],
    shares: Any = "equal",
    num_samples: int = 51,
    global_batch: int = 20,
    num_calls: int = 1,
) -> tuple[list[float], int]:
    """Three global batches an epoch; returns their losses, and this worker's dropped tokens."""
    model = Net(comm)
    updates = OPTIMIZERS[optimizer](model.parameters())
    exchange = allstep.attach(model, comm, policy)
    losses, num_dropped = [], 0
    loader = allstep.data.loader(
        samples(num_samples),
        comm,
        global_batch=global_batch,
        micro_batch=4,
        seed=3,
        shares=shares,
    )
    state = {"optimizer": updates}
    with loader, allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as saved:
        for _ in saved.epochs(num_epochs):
            for batch in allstep.steps(loader, exchange, checkpoint=saved):
                for x, target in batch:
                    y, loss = x, torch.zeros(())
                    for _ in range(num_calls):
                        y, balance_loss = model(y)
                        loss = loss + 0.01 * balance_loss
                    loss = loss + (y - target).square().mean()
                    batch.backward(loss * factors.get(batch.step, 1.0))
                    num_dropped += model.moe.num_dropped
                losses.append(batch.global_loss())
                exchange.clip_grad_norm_(0.1)
                updates.step()
                if batch.step != 6:  # the next gradient is added to this one
                    updates.zero_grad()
    exchange.detach()
    return losses, num_dropped


class Trained(NamedTuple):
    """What a checkpoint has, of model, optimizer and exchange; and what was seen meanwhile."""

    tensors: dict[str, Tensor]
    losses: list[float]
    num_dropped: int


Run = Callable[..., Trained]


@pytest.fixture
def run(tmp_path: Path, thread_generators: Any) -> Run:  # noqa: F811
    """Trains in a folder, from its checkpoint if there is one."""

    def run(size: int, folder: str, compression: str = "exact", **options: Any) -> Trained:
        policy = allstep.Synchronous(compression=compression)

        def work(comm: Communicator) -> tuple[list[float], int]:
            given = {"factors": {}, "policy": policy, **options}
            return train(comm, tmp_path / folder, **given)

        by_rank, num_dropped = zip(*run_ranks(size, work), strict=True)
        assert all(losses == by_rank[0] for losses in by_rank)
        newest = max((tmp_path / folder / "checkpoints").glob("step-*"))
        return Trained(tensors_in(read_checkpoint(newest)), by_rank[0], sum(num_dropped))

    return run


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert len(found.tensors) > 50  # of the optimizer and the grid, too
    assert not differing_names(found.tensors, expected.tensors)
    assert found.losses == expected.losses
    assert found.num_dropped == expected.num_dropped > 0


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"optimizer": "sgd", "factors": JUMPS}],
    ids=["adamw", "sgd, jumps"],
)
def test_experts_have_the_same_bits_on_any_number_of_workers(
    run: Run, options: dict[str, Any]
) -> None:
    """With uneven micro-batches, dropout, dropped tokens, and clipping."""
    expected = run(1, "1", **options)
    for size in (2, 4):
        assert_same_bits(run(size, str(size), **options), expected)


@pytest.mark.slow
def test_experts_that_a_micro_batch_calls_twice(run: Run) -> None:
    """Each call's gradient is rounded, also by a lone worker, whose autograd would add them up."""
    options = {"num_samples": 48, "global_batch": 16, "num_calls": 2}
    expected = run(1, "1", **options)
    for size in (2, 4):
        assert_same_bits(run(size, str(size), **options), expected)


def test_a_worker_that_only_serves_experts_for_several_rounds(run: Run) -> None:
    assert_same_bits(run(2, "2", shares=[1, 4]), run(1, "1"))


def test_experts_resume_on_other_workers_with_the_same_bits(run: Run) -> None:
    """An epoch on each number of workers."""
    expected = run(1, "straight", factors=JUMPS)
    parts = [
        run(size, "parts", num_epochs=1 + i, factors=JUMPS) for i, size in enumerate((1, 2, 4, 1))
    ]
    losses = [loss for part in parts for loss in part.losses]
    num_dropped = sum(part.num_dropped for part in parts)
    assert_same_bits(Trained(parts[-1].tensors, losses, num_dropped), expected)


def test_control_of_the_same_bits(run: Run) -> None:
    one, two = (run(size, str(size), "fp32") for size in (1, 2))
    assert "models/0/moe.experts.0.3.weight" in differing_names(one.tensors, two.tensors)


# -- what else is done with gradients ------------------------------------------------------------


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=self.use_reentrant)


def gradients(
    comm: Communicator,
    expert: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(D, D)),
    look: Callable[[Tensor, list[nn.Parameter]], None] = lambda loss, parameters: None,
) -> list[Tensor]:
    """All experts' weights' gradients in three steps, of which the first leave the grid."""
    layer = MixtureOfExperts(expert, comm, D, E, top_k=2, seed=0, seeded=seeded_thread)
    exchange = allstep.attach(layer, comm, allstep.Synchronous(compression="exact"))
    found = []
    loader = allstep.data.loader(samples(), comm, global_batch=16, micro_batch=4, drop_last=True)
    with loader:
        for batch in allstep.steps(loader, exchange):
            for x, target in batch:
                y, balance_loss = layer(x)
                loss = (y - target).square().mean() + balance_loss
                look(loss, [p for p in layer.experts.parameters() if p.dim() > 1])
                batch.backward(loss)
            own = torch.stack([p.grad for p in layer.experts.parameters() if p.dim() > 1])
            found.append(torch.cat(comm.all_gather(own)))
            layer.zero_grad()
    exchange.detach()
    return found


def test_gradients_that_are_not_accumulated_are_not_summed() -> None:
    """`torch.autograd.grad` of an expert's parameters, on all workers alike."""

    def look(loss: Tensor, parameters: list[nn.Parameter]) -> None:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        assert any(gradient is not None for gradient in found)

    (expected,) = run_ranks(1, gradients)
    for size in (1, 2, 4):
        for found in run_ranks(size, partial(gradients, look=look)):
            assert equal(found, expected)


def test_checkpointing_in_an_expert() -> None:
    (expected,) = run_ranks(1, gradients)
    for found in run_ranks(2, partial(gradients, expert=lambda: Checkpointed(False))):
        assert equal(found, expected)
    with pytest.raises(UsageError, match=r"`experts.\d.linear.bias` got a gradient that no call"):
        run_ranks(2, partial(gradients, expert=lambda: Checkpointed(True)))


def test_hooks_on_an_experts_parameter_are_refused() -> None:
    """They would come after the rounding, and without what left the grid."""

    def look(_: Tensor, parameters: list[nn.Parameter]) -> None:
        parameters[0].register_hook(lambda gradient: gradient / 3)

    with pytest.raises(UsageError, match=r"`experts.\d.0.weight` has a hook, by `register_hook`"):
        run_ranks(2, partial(gradients, look=look))


def test_a_copy_of_an_attached_layer_is_free() -> None:
    """Nor has the layer itself aliases of its parameters when it is detached."""

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.is_leaf = self.weight.is_leaf
            return super().forward(x)

    def check(comm: Communicator) -> None:
        layer = MixtureOfExperts(lambda: Seen(D, D), comm, D, E, seed=0, seeded=seeded_thread)
        exchange = allstep.attach(layer, comm, allstep.Synchronous(compression="exact"))
        copied = copy.deepcopy(layer)
        for each, is_leaf in ((layer, False), (copied, True)):
            each(samples()[:][0])[0].sum().backward()
            assert all(expert.is_leaf is is_leaf for expert in each.experts.values())
        exchange.detach()
        layer(samples()[:][0])
        assert all(expert.is_leaf for expert in layer.experts.values())

    run_ranks(2, check)
