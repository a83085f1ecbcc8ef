"""The same model on any number of workers: the promise that all else serves."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import allstep
from allstep import Communicator
from allstep.data.random import derive_seed
from tests.helpers import same_model
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.generators import seed_this_thread, thread_generators  # noqa: F401
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

TOLERANCE = 1e-10
NUM_WORKERS = (1, 2, 3, 4, 5, 6)
# Workers, loader processes of each.
QUICK = [(1, 2), (2, 0), (3, 2)]
SLOW = [(4, 2), (5, 0), (6, 2)]
LONG = [(2, 2), (3, 0), (4, 0), (5, 2), (6, 0)]


def train_with_fit(
    comm: Communicator, run_dir: str, optimizer: str, *, loader_workers: int = 0
) -> dict[str, Tensor]:
    task = same_model.make_task(optimizer)
    options = replace(
        same_model.OPTIONS,
        epochs=same_model.NUM_EPOCHS,
        loader_workers=loader_workers,
        keep_checkpoints=1,
        evaluate_every_epochs=same_model.NUM_EPOCHS,
    )
    allstep.fit(task, options, comm, Path(run_dir))
    return task.model.state_dict()


def train_both_ways(
    comm: Communicator, run_dir: str, loader_workers: int
) -> dict[str, dict[str, Tensor]]:
    """Both optimizers, through `fit` and through a user's own loop."""
    ways = [(way, optimizer) for way in ("fit", "steps") for optimizer in same_model.OPTIMIZERS]
    if loader_workers:  # each way and each optimizer once
        ways = [("fit", "sgd"), ("steps", "adamw")]
    results = {}
    for way, optimizer in ways:
        if way == "fit":
            state = train_with_fit(
                comm, f"{run_dir}/{optimizer}", optimizer, loader_workers=loader_workers
            )
        else:
            state = same_model.train_with_steps(comm, optimizer, loader_workers=loader_workers)
        results[f"{way} {optimizer}"] = state
    return results


def assert_same(
    ours: dict[str, dict[str, Tensor]], reference: dict[str, dict[str, Tensor]]
) -> None:
    for name, state in ours.items():
        assert state_difference(state, reference[name]) < TOLERANCE, name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    run_dir = str(tmp_path_factory.mktemp("reference"))
    return train_both_ways(Communicator.single_process(), run_dir, loader_workers=0)


def test_fit_gives_the_bits_of_a_loop_with_steps(reference: dict[str, dict[str, Tensor]]) -> None:
    for optimizer in same_model.OPTIMIZERS:
        assert not differing_names(reference[f"fit {optimizer}"], reference[f"steps {optimizer}"])


@pytest.mark.process
@pytest.mark.parametrize(
    ("num_workers", "loader_workers"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_same_model_as_processes(
    num_workers: int,
    loader_workers: int,
    reference: dict[str, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    train = functools.partial(train_both_ways, run_dir=str(tmp_path), loader_workers=loader_workers)
    for result in run_processes(num_workers, train, timeout_s=150):
        assert_same(result, reference)


@pytest.mark.parametrize("optimizer", same_model.OPTIMIZERS)
def test_same_model_as_threads(
    optimizer: str,
    thread_generators: None,  # noqa: F811
) -> None:
    def train(comm: Communicator) -> dict[str, Tensor]:
        return same_model.train_with_steps(comm, optimizer, augment=False)

    (reference,) = run_ranks(1, train)
    for num_workers in NUM_WORKERS[1:]:
        for result in run_ranks(num_workers, train):
            assert state_difference(result, reference) < TOLERANCE, num_workers


def train_by_hand(
    comm: Communicator, *, weigh: bool = True, seed_by_rank: bool = False
) -> dict[str, Tensor]:
    """The loop that one writes without `steps`, with one mistake or another."""
    task = same_model.make_task("sgd", augment=False)
    model, update = task.model, task.optimizer(task.model)
    exchange = allstep.attach(model, comm)
    loader = allstep.data.loader(
        task.train_set,
        comm,
        global_batch=same_model.GLOBAL_BATCH,
        micro_batch=same_model.MICRO_BATCH,
        seed=11,
    )
    while loader.epoch < same_model.NUM_EPOCHS:
        for batch in loader.global_batches():
            micro_batches = list(batch.micro_batches)
            with exchange.no_sync():
                for order, micro_batch in enumerate(micro_batches):
                    key = (comm.rank, order) if seed_by_rank else (0, micro_batch.index)
                    seed_this_thread(derive_seed(batch.step, *key))
                    share = comm.size * micro_batch.num_samples / batch.num_samples
                    if not weigh:
                        share = 1 / len(micro_batches)
                    (same_model.loss_of(model, micro_batch.data) * share).backward()
            exchange.synchronize()
            update.step()
            update.zero_grad()
    exchange.sync_buffers()
    exchange.detach()
    return model.state_dict()


def by_hand_on(num_workers: int, **mistakes: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of rank 0."""

    def train(comm: Communicator) -> dict[str, Tensor]:
        return train_by_hand(comm, **mistakes)

    state = run_ranks(num_workers, train)[0]
    buffers = {name: value for name, value in state.items() if "running" in name}
    parameters = {n: v for n, v in state.items() if n.endswith(("weight", "bias"))}
    return parameters, buffers


def test_same_model_negative_controls() -> None:
    parameters, statistics = by_hand_on(1)
    same_parameters, own_statistics = by_hand_on(3)
    assert state_difference(same_parameters, parameters) < TOLERANCE
    # averaged over workers that each updated theirs after every micro-batch
    assert state_difference(own_statistics, statistics) > 1e-2

    mean_of_means, _ = by_hand_on(3, weigh=False)
    assert state_difference(mean_of_means, parameters) > 1e-2

    alone, _ = by_hand_on(1, seed_by_rank=True)
    by_rank, _ = by_hand_on(3, seed_by_rank=True)
    assert state_difference(by_rank, alone) > 1e-2
