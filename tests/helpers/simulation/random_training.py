"""Elastic loops of a user's own, drawn by a seed, whose processes and connections fail."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import allstep
from allstep import Communicator
from allstep.comm.membership import Membership
from allstep.env import Launch
from tests.helpers.generators import rank_generator
from tests.helpers.random_layers import RandomModel
from tests.helpers.random_loops import Life, Loop
from tests.helpers.simulation.scheduler import Process
from tests.helpers.simulation.training import Simulation

_NUM_EPOCHS = 3
_POLICY = allstep.Synchronous(compression="exact", algorithm="native", overlap=False)


class ElasticLife(Life):
    """A worker of an elastic loop.

    Args:
        loop, model, comm: see `Life`.
        membership: this worker's; None for one that is alone.
    """

    def __init__(
        self, loop: Loop, model: RandomModel, comm: Communicator, membership: Membership | None
    ) -> None:
        super().__init__(loop, model, comm, _POLICY)
        self.elastic = allstep.Elastic(
            self.loader, self.exchange, state=self.state, membership=membership
        )
        self._note: Callable[[], None] = lambda: None

    def train_elastic(self, note: Callable[[], None]) -> None:
        """Trains to the end; notes each attempt at a step."""
        self._note = note
        self.run(self.elastic, _NUM_EPOCHS, elastic=self.elastic)

    def _make_step(self, batch: allstep.train.Batch) -> None:
        super()._make_step(batch)
        self._note()

    def _sync_buffers(self) -> None:
        """They are the same on all workers, between two steps."""

    def _evaluate(self) -> float:
        found: float = self.elastic.call(super()._evaluate)
        return found


class RandomTraining(Simulation):
    """One training, by its seed; `torch`'s default dtype is to be float64.

    Args:
        seed: of the loop, and of all that happens.

    Attributes:
        loop: what is trained.
        wrong: what came out otherwise on a worker.
    """

    def __init__(self, seed: int) -> None:
        self.wrong: list[str] = []
        draw = random.Random(seed)
        # Measured shares would follow the clock of this machine.
        self.loop = replace(Loop.draw(draw), shares="equal")
        torch.manual_seed(seed)
        self._model = RandomModel(draw)  # before the workers, which are threads
        with rank_generator(0):
            alone = ElasticLife(self.loop, self._model, Communicator.single_process(), None)
            with alone.elastic:
                alone.train_elastic(lambda: None)
            self._expected = alone.result()
        super().__init__(seed)

    def _train(self, process: Process, comm: Communicator, launch: Launch) -> list[Tensor]:
        with rank_generator(process.number):
            return super()._train(process, comm, launch)

    def _make_loop(self, comm: Communicator, membership: Membership) -> "_Workers":
        return _Workers(ElasticLife(self.loop, self._model, comm, membership), comm)

    def _is_right(self, state: Sequence[Tensor]) -> bool:
        found = zip(self._expected.items(), state, strict=True)
        # Some diverge to NaN.
        self.wrong = [n for (n, x), own in found if not own.allclose(x, 0.0, 0.0, equal_nan=True)]
        return not self.wrong


class _Workers:
    """As the simulation has a loop."""

    def __init__(self, life: ElasticLife, comm: Communicator) -> None:
        self._life, self.comm, self.elastic = life, comm, life.elastic

    def run(self, note: Callable[[], None], save: Callable[[int], None]) -> None:
        self._life.train_elastic(note)

    def state(self) -> list[Tensor]:
        return list(self._life.result().values())
