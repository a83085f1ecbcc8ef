"""Random loops whose model has experts that lie on different workers, by a seed."""

import copy
import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator
from allstep.nn import MixtureOfExperts
from allstep.train import read_checkpoint
from allstep.train.packing import tensors_in
from tests.helpers.compare import newest_step
from tests.helpers.generators import seeded_thread
from tests.helpers.random_layers import LENGTH, RandomModel
from tests.helpers.random_loops import Life, Loop, differences_of

NUM_EXPERTS = 12  # they divide over 1, 2, 3, 4 and 6 workers


@dataclass(frozen=True)
class LoopWithExperts(Loop):
    """And what is drawn of the experts.

    Attributes:
        places: where in the model's body there are some.
        top_k, capacity_factor: of all of them.
        copies: of each expert, where the workers divide by it.
        dropout: in them.
    """

    places: tuple[int, ...]
    top_k: int
    capacity_factor: float | None
    copies: int
    dropout: float

    @classmethod
    def draw(cls, draw: random.Random) -> Self:
        """One that nothing refuses: gradients that are exchanged at once, one pass for each."""
        loop = Loop.draw(draw)
        loop = replace(
            loop,
            policy=draw.choice(("float32", "sum", "exact", "exact")),
            loss=loop.loss if loop.loss == "weight" else "mean",
            clip="exchange" if loop.clip == "torch" else loop.clip,
            lives=tuple((end, draw.choice((1, 2, 3, 4, 6))) for end, _ in loop.lives),
            workers_after_crash=draw.randint(1, 4),
        )
        return cls(
            **{field.name: getattr(loop, field.name) for field in fields(loop)},
            places=tuple(draw.randint(1, 4) for _ in range(draw.choice((1, 1, 2)))),
            top_k=draw.choice((1, 2, 3)),
            capacity_factor=draw.choice((None, None, 1.0, 0.5)),
            copies=draw.choice((1, 1, 2)),
            dropout=draw.choice((0.0, 0.2)),
        )


class Experts(nn.Module):
    """A mixture whose balance counts, too."""

    def __init__(self, loop: LoopWithExperts, comm: Communicator) -> None:
        super().__init__()

        def expert() -> nn.Module:
            hidden = (nn.Linear(LENGTH, 12), nn.Tanh(), nn.Dropout(loop.dropout))
            return nn.Sequential(*hidden, nn.Linear(12, LENGTH))

        self.mixture = MixtureOfExperts(
            expert,
            comm,
            LENGTH,
            NUM_EXPERTS,
            top_k=loop.top_k,
            capacity_factor=loop.capacity_factor,
            copies=loop.copies if comm.size % loop.copies == 0 else 1,
            seed=3,
            seeded=seeded_thread,
        )

    def forward(self, x: Tensor) -> Tensor:
        y, balance_loss = self.mixture(x)
        return x + balance_loss * y


class LifeWithExperts(Life):
    """Compared by its last checkpoint, which has the experts of all workers."""

    def __init__(
        self,
        loop: LoopWithExperts,
        model: RandomModel,
        comm: Communicator,
        policy: allstep.ExchangePolicy,
    ) -> None:
        model = copy.deepcopy(model)
        for place in loop.places:
            model.body.insert(min(place, len(model.body)), Experts(loop, comm))
        super().__init__(loop, model, comm, policy)

    def train(
        self, run_dir: Path, num_epochs: int, crash_at: int | None = None
    ) -> dict[str, Tensor]:
        super().train(run_dir, num_epochs, crash_at)
        state = read_checkpoint(run_dir / "checkpoints" / f"step-{newest_step(run_dir):08}")
        return tensors_in({name: state[name] for name in ("models", "gradients", "state")})


def loop_of(seed: int) -> LoopWithExperts:
    """What a seed draws."""
    return LoopWithExperts.draw(random.Random(seed))


def differences(seed: int, folder: Path) -> list[str]:
    """What differs between a loop's lives on workers and one worker's life."""
    torch.manual_seed(seed)
    model = RandomModel(random.Random(seed))  # before the ranks, which are threads
    return differences_of(loop_of(seed), model, folder, LifeWithExperts)
