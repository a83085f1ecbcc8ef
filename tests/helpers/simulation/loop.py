"""A user's own elastic loop, as small as can be."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Synchronous
from allstep.comm.membership import Membership

NUM_EPOCHS, NUM_STEPS, GLOBAL_BATCH = 2, 4, 6
_NUM_SAMPLES = GLOBAL_BATCH * NUM_STEPS // NUM_EPOCHS


class Loop:
    """Made anew by each worker.

    Args:
        comm: the workers.
        membership: this worker's; None for one that is alone.
    """

    def __init__(self, comm: Communicator, membership: Membership | None) -> None:
        self.comm = comm
        self._model = nn.Linear(2, 1)
        with torch.no_grad():
            for n, p in enumerate(self._model.parameters()):
                p.fill_(0.1 * (n + 1))
        policy = Synchronous(compression="exact", algorithm="native", overlap=False)
        self._exchange = allstep.attach(self._model, comm, policy)
        samples = TensorDataset(_samples())
        self._loader = allstep.data.loader(
            samples, comm, global_batch=GLOBAL_BATCH, micro_batch=1, seed=3
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self.elastic = allstep.Elastic(
            self._loader,
            self._exchange,
            state={"optimizer": self._optimizer},
            membership=membership,
        )
        self._evaluations = [0.0] * NUM_EPOCHS
        self._loss = 0.0

    def run(self, note: Callable[[], None], save: Callable[[int], None]) -> None:
        """Trains.

        Args:
            note: called in each attempt at a step.
            save: called between two steps, with their number.
        """
        for epoch in self.elastic.epochs(NUM_EPOCHS):
            for batch in allstep.steps(self._loader, self._exchange, elastic=self.elastic):
                for (x,) in batch:
                    batch.backward(self._model(x).square().mean())
                note()
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._loss = batch.global_loss()
                save(batch.step + 1)
            self._evaluations[epoch] = self.elastic.call(self._evaluate)

    def _evaluate(self) -> float:
        counts = self.comm.all_reduce(torch.ones(1))
        first = next(self._model.parameters()).detach().double().sum()
        return float(first) * (counts.item() == self.comm.size)

    def state(self) -> list[Tensor]:
        """All that was trained; the last evaluation and loss, as who joins has no earlier ones."""
        last = torch.tensor([self._evaluations[-1], self._loss], dtype=torch.float64)
        return [*self.trained(), last]

    def trained(self) -> list[Tensor]:
        """Parameters and momenta."""
        momenta = self._optimizer.state_dict()["state"].values()
        return [
            *(p.detach().clone() for p in self._model.parameters()),
            *(own["momentum_buffer"].clone() for own in momenta),
        ]


@cache
def _samples() -> Tensor:
    return torch.randn(_NUM_SAMPLES, 2, generator=torch.Generator().manual_seed(5))


@cache
def undisturbed() -> list[Tensor]:
    """What one worker comes to."""
    return _run_undisturbed()[0]


@cache
def undisturbed_steps() -> dict[int, list[Tensor]]:
    """What one worker has trained after each number of steps."""
    return _run_undisturbed()[1]


def _run_undisturbed() -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    loop = Loop(Communicator.single_process(), None)
    by_step: dict[int, list[Tensor]] = {}
    with loop.elastic:
        loop.run(lambda: None, lambda step: by_step.update({step: loop.trained()}))
    return loop.state(), by_step
