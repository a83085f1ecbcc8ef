"""GAN, actor-critic, early exits: one worker, two and three train the same models, in float64."""

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator
from examples import dcgan, dynamic_net
from tests.helpers.compare import state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks

State = dict[str, Tensor]
IMAGES = torch.randint(
    0, 255, (28, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def assert_same(state: State, other: State) -> None:
    assert state_difference(state, other) < 1e-10


@pytest.mark.parametrize("staleness", [0, 1])
def test_dcgan_is_the_same_on_any_number_of_workers(
    thread_generators: None,  # noqa: F811
    staleness: int,
) -> None:
    options = dcgan.Options(
        epochs=2, global_batch=12, micro_batch=3, width=2, noise=3, staleness=staleness,
        dtype=torch.float64,
    )  # fmt: skip

    def work(comm: Communicator) -> list[State]:
        return [net.state_dict() for net in dcgan.train(comm, IMAGES, options).nets]

    [lone] = run_ranks(1, work)
    for num_workers in (2, 3):
        for nets in run_ranks(num_workers, work):
            for net, lone_net in zip(nets, lone, strict=True):
                assert_same(net, lone_net)


def test_dcgan_late_gradients_are_all_applied() -> None:
    """As many updates of both nets as without, of other gradients."""
    comm = Communicator.single_process()
    trained = {}
    for late in (0, 1):
        options = dcgan.Options(epochs=1, global_batch=14, micro_batch=14, width=2, staleness=late)
        torch.manual_seed(0)
        gan = dcgan.train(comm, IMAGES, options)
        for optimizer in gan.optimizers:
            assert {int(state["step"]) for state in optimizer.state.values()} == {2}
        trained[late] = gan.draw.state_dict()
    assert state_difference(trained[0], trained[1]) > 1e-5


def test_dcgan_distance_of_pictures_to_themselves_and_to_brighter_ones() -> None:
    real = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert dcgan.distance(real, real) == pytest.approx(0, abs=1e-6)
    brighter = dcgan.distance(real, real + 0.1)
    variance = real.double().flatten(1).T.cov()
    share = torch.linalg.eigvalsh(variance)[-dcgan.NUM_COMPONENTS :].sum()
    # The means differ by 0.1 a pixel; the components see a part of it.
    assert 0 < brighter <= 64 * 0.01 / share


def depths_and_state(comm: Communicator) -> tuple[list[int], State]:
    options = dynamic_net.Options(epochs=2, global_batch=48, micro_batch=4, sure=0.5, lr=1e-2)
    model, depths = dynamic_net.train(comm, options)
    return depths, model.state_dict()


def test_early_exits_are_the_same_on_any_number_of_workers() -> None:
    [(lone_depths, lone)] = run_ranks(1, depths_and_state)
    assert len(set(lone_depths)) >= 3  # often not all blocks, and not always as many
    for num_workers in (2, 3):
        ranks = run_ranks(num_workers, depths_and_state)
        assert ranks[0][0] != ranks[1][0]  # another graph than the other worker's
        for _, state in ranks:
            assert_same(state, lone)


needs_games = pytest.mark.skipif(
    find_spec("gymnasium") is None or find_spec("minatar") is None,
    reason="needs gymnasium and minatar: pip install 'allstep[games]'",
)
CARTPOLE, BREAKOUT = "CartPole-v1", "MinAtar/Breakout-v1"


def small_games(env: str = CARTPOLE, **changes: Any) -> Any:
    from examples import actor_critic

    arguments: dict[str, Any] = {"global_batch": 6, "micro_batch": 1, "width": 8, "max_steps": 40}
    arguments |= {"updates": 4, "test_episodes": 7} | changes
    return replace(actor_critic.GAMES[env], **arguments)


@needs_games
@pytest.mark.parametrize("env", [CARTPOLE, BREAKOUT])
def test_actor_critic_is_the_same_on_any_number_of_workers(
    thread_generators: None,  # noqa: F811
    env: str,
) -> None:
    from examples import actor_critic

    options = small_games(env, seed=4)  # earns something in either game

    def work(comm: Communicator) -> tuple[float, State]:
        model = actor_critic.train(comm, options)
        return actor_critic.test(comm, model, options), model.state_dict()

    [(lone_return, lone)] = run_ranks(1, work)
    assert lone_return > {CARTPOLE: 5, BREAKOUT: 0.2}[env]
    assert state_difference(lone, actor_critic.ActorCritic(options).state_dict()) > 1e-4
    for num_workers in (2, 3):
        for found, state in run_ranks(num_workers, work):
            assert found == lone_return
            assert_same(state, lone)


@needs_games
def test_actor_critic_weighs_steps_not_episodes_nor_workers(
    thread_generators: None,  # noqa: F811
) -> None:
    """One update's gradient is that of the mean over all steps; means of means are others."""
    from examples import actor_critic

    seeds = [list(range(3)), list(range(3, 6))]  # of two workers' episodes
    options = small_games()
    torch.manual_seed(0)
    model = actor_critic.ActorCritic(options)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # a new net's last layers are zero, and so are most gradients
    played = [actor_critic.play(model.actor, part, options, greedy=False) for part in seeds]
    lengths = [[len(episode.rewards) for episode in part] for part in played]
    assert sum(lengths[0]) != sum(lengths[1])

    def gradient(losses: list[Tensor]) -> Tensor:
        grads = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
        return torch.cat([g.flatten() for g in grads])

    def sums(part: list[Any]) -> list[Tensor]:
        return [actor_critic.summed_loss(model, [episode], options) for episode in part]

    whole = gradient(sums(played[0] + played[1])) / sum(map(sum, lengths))

    def work(comm: Communicator) -> Tensor:
        net = deepcopy(model)
        exchange = allstep.attach(net, comm)
        own = played[comm.rank]
        (actor_critic.summed_loss(net, own, options) / len(own)).backward()
        total = comm.all_reduce(torch.tensor([sum(lengths[comm.rank])])).item()
        actor_critic.weigh(net, 6 / total)
        exchange.detach()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    for found in run_ranks(2, work):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    of_workers = sum(gradient(sums(part)) / sum(n) for part, n in zip(played, lengths, strict=True))
    of_episodes = gradient(
        [loss / n for part, ns in zip(played, lengths, strict=True)
         for loss, n in zip(sums(part), ns, strict=True)]
    )  # fmt: skip
    for naive in (of_workers / 2, of_episodes / 6):
        assert (naive - whole).abs().max() > 1e-4


@needs_games
def test_actor_critic_advantages_are_those_of_a_written_episode() -> None:
    """Two steps of reward 1; the critic says 0.5, 0.25 and, after the last, 0.125."""
    from examples import actor_critic

    options = small_games(discount=0.5, smoothing=0.5)
    values = torch.tensor([0.5, 0.25, 0.125])
    for ended, after in ((True, 0.0), (False, 0.125)):
        second = 0.5 + 0.5 * after - 0.25
        first = 0.5 + 0.5 * 0.25 - 0.5 + 0.25 * second
        zeros = torch.zeros(3, 4)
        episode = actor_critic.Episode(zeros, torch.zeros(2), [1.0, 1.0], ended)
        found = actor_critic.advantages(episode, values, options)
        assert found.tolist() == pytest.approx([first, second])


def test_early_exit_net_counts_each_sample_once() -> None:
    options = dynamic_net.Options(sure=0.3)
    model = dynamic_net.EarlyExit(options)
    images = torch.rand(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    answers = model(images)
    assert sum(int(leaves.sum()) for _, _, leaves in answers) == 50
    assert len(answers[1][0]) == 50 - int(answers[0][2].sum())
    labels = torch.zeros(50, dtype=torch.int64)
    found = dynamic_net.metrics(model, [images, labels])
    assert all(count == 50 for _, count in found.values())
    by_hand = [
        nn.functional.cross_entropy(logits[i : i + 1], labels[:1])
        for _, logits, _ in answers
        for i in range(len(logits))
    ]
    torch.testing.assert_close(dynamic_net.loss_of(answers, labels), sum(by_hand) / 50)
