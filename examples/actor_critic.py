"""A2C on CartPole, on any number of workers: episodes of uneven length, weighed by their steps.

pip install 'allstep[games]'
python examples/actor_critic.py
torchrun --nproc-per-node 2 examples/actor_critic.py

A sample is an episode, and the loss is the mean over the steps of all episodes of a global batch.
A worker knows how many steps its own had; how many all had is known when the last has ended.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import allstep
from allstep.train import Batch


@dataclass(frozen=True)
class Options:
    """The flags and what is fixed."""

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


class ActorCritic(nn.Module):
    """Scores of the two actions and an estimate of the return, from what is observed."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.actor = self._head(width, 2)
        self.critic = self._head(width, 1)
        random = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.xavier_normal_(weight, generator=random)
            else:
                nn.init.zeros_(weight)

    @staticmethod
    def _head(width: int, num_out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, num_out)).double()


@dataclass(frozen=True)
class Episode:
    """What was seen, done and earned; one observation more than actions.

    Attributes:
        ended: whether the pole fell; else the time was over and more could have been earned.
    """

    observations: Tensor
    actions: Tensor
    rewards: list[float]
    ended: bool


def play(actor: nn.Module, seeds: list[int], options: Options, *, greedy: bool) -> list[Episode]:
    """An episode for each seed, side by side: one pass of the actor for those that go on."""
    games = [gymnasium.make("CartPole-v1", max_episode_steps=options.max_steps) for _ in seeds]
    seen = [[game.reset(seed=seed)[0]] for game, seed in zip(games, seeds, strict=True)]
    actions: list[list[int]] = [[] for _ in games]
    rewards: list[list[float]] = [[] for _ in games]
    ended, going = [False] * len(games), list(range(len(games)))
    device = next(actor.parameters()).device
    while going:
        newest = torch.from_numpy(np.stack([seen[i][-1] for i in going])).double().to(device)
        with torch.no_grad():
            scores = actor(newest)
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
        Episode(torch.from_numpy(np.stack(s)).double().to(device), torch.tensor(a).to(device), r, e)
        for s, a, r, e in zip(seen, actions, rewards, ended, strict=True)
    ]


def advantages(episode: Episode, values: Tensor, options: Options) -> Tensor:
    """How much better each action was than the critic expected, [step].

    a_t = d_t + discount smoothing a_(t+1)
    d_t = (1 - discount) reward_t + discount value_(t+1) - value_t

    so that values are between 0 and 1.

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


def summed_loss(model: ActorCritic, episode: Episode, options: Options) -> Tensor:
    """The sum over the episode's steps of the actor's and the critic's loss."""
    values = model.critic(episode.observations)[:, 0]
    better = advantages(episode, values.detach(), options)
    policy = Categorical(logits=model.actor(episode.observations[:-1]))
    actor_loss = -(better * policy.log_prob(episode.actions)).sum()
    critic_loss = (values[:-1] - (values[:-1].detach() + better)).square().sum()
    bonus = options.entropy_weight * policy.entropy().sum()
    return actor_loss + critic_loss - bonus


def train(comm: allstep.Communicator, options: Options) -> ActorCritic:
    """The model after so many updates of so many episodes each."""
    model = ActorCritic(options.width, options.seed).to(comm.device)
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
        losses = [summed_loss(model, episode, options) for episode in played]
        batch.backward(torch.stack(losses).sum() / len(losses))
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
    for name in ("updates", "seed"):
        default = getattr(Options, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"by default {default}")
    parser.add_argument("--run-dir", type=Path, help="keeps checkpoints and goes on from them")
    options = Options(**vars(parser.parse_args()))
    with allstep.init() as comm:
        model = train(comm, options)
        mean_return = test(comm, model, options)
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        if comm.rank == 0:
            print(f"mean return {mean_return:.1f}, parameters' norm {norm:.9f}")


if __name__ == "__main__":
    main()
