"""A2C on games, on any number of workers: episodes of uneven length, weighed by their steps.

pip install 'allstep[games]'
python examples/actor_critic.py
torchrun --nproc-per-node 2 examples/actor_critic.py --env MinAtar/Breakout-v1

A sample is an episode, and the loss is the mean over the steps of all episodes of a global batch.
A worker knows how many steps its own had; how many all had is known when the last has ended.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import allstep
from allstep.train import Batch

# The package's own registration would load it, and with it a library for plots, for any game.
gymnasium.register(
    "MinAtar/Breakout-v1",
    entry_point="minatar.gym:BaseEnv",
    kwargs={"game": "breakout", "use_minimal_action_set": True},
)


@dataclass(frozen=True)
class Options:
    """The flags and what is fixed."""

    env: str = "CartPole-v1"
    updates: int = 70
    global_batch: int = 16  # episodes
    micro_batch: int = 8  # one for each of two workers
    width: int = 64
    lr: float = 1e-2
    discount: float = 0.995
    smoothing: float = 0.98  # of advantages over steps, the lambda of GAE
    entropy_weight: float = 0.0005
    seed: int = 0
    run_dir: Path | None = None
    test_episodes: int = 100
    max_steps: int = 500


GAMES = {
    "CartPole-v1": Options(),
    "MinAtar/Breakout-v1": Options(
        env="MinAtar/Breakout-v1", updates=250, global_batch=64, micro_batch=32, width=128,
        lr=5e-3, discount=0.99, smoothing=0.95, entropy_weight=1e-3, max_steps=1000,
    ),
}  # fmt: skip


class ActorCritic(nn.Module):
    """Scores of the actions and an estimate of the return, from what is observed."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        game = make_game(options)
        observed, num_actions = game.observation_space.shape, int(game.action_space.n)
        self.actor = make_net(observed, options.width, num_actions)
        self.critic = make_net(observed, options.width, 1)
        random = torch.Generator().manual_seed(options.seed)
        # At first all actions are equally likely, and no reward is expected.
        zero = {self.actor[-1].weight, self.critic[-1].weight}
        for weight in self.parameters():
            if weight.ndim > 1 and weight not in zero:
                nn.init.xavier_normal_(weight, generator=random)
            else:
                nn.init.zeros_(weight)


def make_net(observed: tuple[int, ...], width: int, num_out: int) -> nn.Sequential:
    """A hidden layer for numbers, [feature]; a convolution before it for pictures, [y, x, channel].

    Source for pictures: Young and Tian, 2019, arXiv:1903.03176.
    """
    if len(observed) == 1:
        hidden = [nn.Linear(observed[0], width), nn.Tanh()]
    else:
        height, length, channels = observed
        hidden = [
            nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * (height - 2) * (length - 2), width), nn.ReLU(),
        ]  # fmt: skip
    return nn.Sequential(*hidden, nn.Linear(width, num_out)).double()


def make_game(options: Options) -> gymnasium.Env:
    return gymnasium.make(options.env, max_episode_steps=options.max_steps)


@dataclass(frozen=True)
class Episode:
    """What was seen, done and earned; one observation more than actions.

    Attributes:
        ended: whether the game was lost; else the time was over and more could have been earned.
    """

    observations: Tensor
    actions: Tensor
    rewards: list[float]
    ended: bool


def play(actor: nn.Module, seeds: list[int], options: Options, *, greedy: bool) -> list[Episode]:
    """An episode for each seed, side by side: one pass of the actor for those that go on."""
    games = [make_game(options) for _ in seeds]
    seen = [[game.reset(seed=seed)[0]] for game, seed in zip(games, seeds, strict=True)]
    actions: list[list[int]] = [[] for _ in games]
    rewards: list[list[float]] = [[] for _ in games]
    ended, going = [False] * len(games), list(range(len(games)))
    parameter = next(actor.parameters())
    while going:
        with torch.no_grad():
            scores = actor(as_input([seen[i][-1] for i in going], parameter))
        chosen = scores.argmax(1) if greedy else scores.softmax(1).multinomial(1)[:, 0]
        still = []
        for i, action in zip(going, chosen.tolist(), strict=True):
            observation, reward, ended[i], timed_out, _ = games[i].step(action)
            seen[i].append(observation)
            actions[i].append(action)
            rewards[i].append(float(reward))
            if not (ended[i] or timed_out):
                still.append(i)
        going = still
    return [
        Episode(as_input(s, parameter), torch.tensor(a).to(parameter.device), r, e)
        for s, a, r, e in zip(seen, actions, rewards, ended, strict=True)
    ]


def as_input(observations: list[np.ndarray], parameter: Tensor) -> Tensor:
    """What a net with this parameter takes; of pictures the channels come first."""
    stacked = torch.from_numpy(np.stack(observations)).to(parameter)
    return stacked.movedim(-1, 1).contiguous() if stacked.ndim == 4 else stacked


def advantages(episode: Episode, values: Tensor, options: Options) -> Tensor:
    """How much better each action was than the critic expected, [step].

    a_t = d_t + discount smoothing a_(t+1)
    d_t = (1 - discount) reward_t + discount value_(t+1) - value_t

    so that values are between 0 and 1 where no step earns more than 1.

    Source: Schulman et al., 2016, arXiv:1506.02438.
    """
    estimates = values.tolist()
    if episode.ended:
        estimates[-1] = 0.0
    found = [0.0] * (len(episode.rewards) + 1)
    for t in reversed(range(len(episode.rewards))):
        reward = (1 - options.discount) * episode.rewards[t]
        surprise = reward + options.discount * estimates[t + 1] - estimates[t]
        found[t] = surprise + options.discount * options.smoothing * found[t + 1]
    return torch.tensor(found[:-1]).to(values)


def summed_loss(model: ActorCritic, episodes: list[Episode], options: Options) -> Tensor:
    """The sum over all steps of the episodes of the actor's and the critic's loss."""
    seen = torch.cat([episode.observations for episode in episodes])
    by_episode = model.critic(seen)[:, 0].split([len(e.observations) for e in episodes])
    found = [advantages(e, v.detach(), options) for e, v in zip(episodes, by_episode, strict=True)]
    better, values = torch.cat(found), torch.cat([v[:-1] for v in by_episode])
    policy = Categorical(logits=model.actor(torch.cat([e.observations[:-1] for e in episodes])))
    actor_loss = -(better * policy.log_prob(torch.cat([e.actions for e in episodes]))).sum()
    critic_loss = (values - (values.detach() + better)).square().sum()
    bonus = options.entropy_weight * policy.entropy().sum()
    return actor_loss + critic_loss - bonus


def train(comm: allstep.Communicator, options: Options) -> ActorCritic:
    """The model after so many updates of so many episodes each."""
    model = ActorCritic(options).to(comm.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    exchange = allstep.attach(model, comm)
    episodes = TensorDataset(torch.arange(options.updates * options.global_batch))
    loader = allstep.data.loader(
        episodes, comm, global_batch=options.global_batch, micro_batch=options.micro_batch,
        seed=options.seed,
    )  # fmt: skip
    with allstep.AutoCheckpoint(
        options.run_dir, loader, exchange, state={"optimizer": optimizer}, every_steps=10
    ) as checkpoint:
        for _ in checkpoint.epochs(1):
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                num_steps = add_gradients(model, batch, options)
                # `p.grad` is of the mean over episodes of each one's sum; it is to be the mean
                # over steps.
                weigh(model, batch.num_samples / comm.all_reduce(num_steps).item())
                optimizer.param_groups[0]["lr"] = options.lr * (1 - batch.step / options.updates)
                optimizer.step()
                optimizer.zero_grad()
    if checkpoint.interrupted:
        sys.exit(128 + checkpoint.interrupted)
    exchange.detach()
    return model


def add_gradients(model: ActorCritic, batch: Batch, options: Options) -> Tensor:
    """Plays this worker's episodes and runs their backward passes; how many steps they had, [1]."""
    num_steps = torch.zeros(1, dtype=torch.int64)
    for (numbers,) in batch:
        seeds = (options.seed * options.updates * options.global_batch + numbers).tolist()
        played = play(model.actor, seeds, options, greedy=False)
        num_steps += sum(len(episode.rewards) for episode in played)
        batch.backward(summed_loss(model, played, options) / len(played))
    return num_steps


def weigh(model: nn.Module, factor: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def test(comm: allstep.Communicator, model: ActorCritic, options: Options) -> float:
    """The mean return of episodes that were not trained on, always the better-looking action."""

    def returns(net: nn.Module, batch: list[Tensor]) -> dict[str, tuple[float, int]]:
        played = play(net.actor, batch[0].tolist(), options, greedy=True)
        return {"return": (sum(sum(episode.rewards) for episode in played), len(played))}

    seeds = TensorDataset(10**6 + torch.arange(options.test_episodes))
    return allstep.Evaluator(returns, seeds, comm, micro_batch=10)(model)["return"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", choices=GAMES, default=Options.env, help="the game")
    parser.add_argument("--updates", type=int, help="by default as many as the game needs")
    parser.add_argument("--seed", type=int, help="by default 0")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    options = replace(GAMES[given["env"]], **given)
    with allstep.init() as comm:
        model = train(comm, options)
        mean_return = test(comm, model, options)
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        if comm.rank == 0:
            print(f"mean return {mean_return:.1f}, parameters' norm {norm:.9f}")


if __name__ == "__main__":
    main()
