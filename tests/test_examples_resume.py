"""Examples that are killed and started again end with the bits of those that were not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allstep import Communicator
from examples import dcgan, dynamic_net, seq2seq, speech
from tests import test_example_of_seq2seq, test_example_of_speech, test_examples_of_models
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

State = dict[str, Tensor]


class CrashError(Exception):
    """The end of a life."""


def train_dcgan(comm: Communicator, run_dir: Path | None, staleness: int = 0) -> State:
    options = dcgan.Options(
        epochs=2, global_batch=8, micro_batch=2, width=2, noise=3, staleness=staleness,
        dtype=torch.float64, run_dir=run_dir,
    )  # fmt: skip
    nets = dcgan.train(comm, test_examples_of_models.IMAGES, options).nets
    return {f"{i} {name}": x for i, net in enumerate(nets) for name, x in net.state_dict().items()}


def train_late_dcgan(comm: Communicator, run_dir: Path | None) -> State:
    return train_dcgan(comm, run_dir, staleness=1)


def train_dynamic_net(comm: Communicator, run_dir: Path | None) -> State:
    options = dynamic_net.Options(epochs=2, global_batch=512, micro_batch=128, run_dir=run_dir)
    return dynamic_net.train(comm, options)[0].state_dict()


def train_speech(comm: Communicator, run_dir: Path | None) -> State:
    options = test_example_of_speech.small(epochs=2, run_dir=run_dir)
    recordings = test_example_of_speech.made_recordings()
    return speech.train(comm, recordings, options).state_dict()


def train_actor_critic(
    comm: Communicator, run_dir: Path | None, env: str = test_examples_of_models.CARTPOLE
) -> State:
    from examples import actor_critic

    options = test_examples_of_models.small_games(env, updates=12, run_dir=run_dir)
    return actor_critic.train(comm, options).state_dict()


def train_actor_critic_of_pictures(comm: Communicator, run_dir: Path | None) -> State:
    return train_actor_critic(comm, run_dir, test_examples_of_models.BREAKOUT)


TRAININGS: list[Any] = [
    pytest.param(train_dcgan, 5, id="dcgan"),
    pytest.param(train_late_dcgan, 5, id="dcgan-late"),
    pytest.param(train_dynamic_net, 4, id="dynamic_net"),
    pytest.param(train_speech, 3, id="speech"),
    pytest.param(
        train_actor_critic, 11, id="actor_critic", marks=test_examples_of_models.needs_games
    ),
    pytest.param(
        train_actor_critic_of_pictures, 11, id="actor_critic-pictures",
        marks=test_examples_of_models.needs_games,
    ),
]  # fmt: skip


@contextmanager
def crash_at(num_updates: int) -> Iterator[None]:
    """An optimizer that has made so many updates makes no more."""

    def end(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(int(state["step"]) == num_updates for state in optimizer.state.values()):
            raise CrashError

    handle = register_optimizer_step_pre_hook(end)
    try:
        with pytest.raises(CrashError):
            yield
    finally:
        handle.remove()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("train", "num_updates"), TRAININGS)
def test_an_example_that_crashed_ends_with_the_same_bits(
    train: Callable[[Communicator, Path | None], State],
    num_updates: int,
    num_workers: int,
    tmp_path: Path,
    thread_generators: None,  # noqa: F811
) -> None:
    def lives(run_dir: Path | None) -> list[State]:
        def life(comm: Communicator) -> State:
            return train(comm, run_dir)

        return run_ranks(num_workers, life)

    whole = lives(None)
    with crash_at(num_updates):
        lives(tmp_path)
    for resumed in (lives(tmp_path), lives(tmp_path)):  # the second has no step left
        for state, other in zip(resumed, whole, strict=True):
            assert differing_names(state, other) == []


def test_seq2seq_that_crashed_ends_with_the_same_bits(
    tmp_path: Path,
    thread_generators: None,  # noqa: F811
) -> None:
    """On a pair of ranks, and gone on with alone."""
    dictionary = tmp_path / "cmudict.dict"
    dictionary.write_text(test_example_of_seq2seq.DICTIONARY, encoding="utf-8")
    words = seq2seq.read_words(dictionary)

    def lives(num_workers: int, run_dir: Path | None) -> State:
        def life(comm: Communicator) -> State:
            options = replace(test_example_of_seq2seq.OPTIONS, run_dir=run_dir)
            _, model = test_example_of_seq2seq.trained(comm, words, options)
            return model.state_dict()

        return {name: x for state in run_ranks(num_workers, life) for name, x in state.items()}

    whole = lives(2, None)
    runs = [tmp_path / "pair", tmp_path / "alone"]
    for run_dir in runs:
        with crash_at(3):
            lives(2, run_dir)
    assert differing_names(lives(2, runs[0]), whole) == []
    assert state_difference(lives(1, runs[1]), whole) < 1e-10
