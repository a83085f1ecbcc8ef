"""The workload of a user's own script: `allstep.Elastic`, a loop over `steps`, checkpoints."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.comm.membership import Membership
from allstep.env import read_launch
from allstep.train.elastic_loop import loop_membership
from tests.helpers.compare import differing_names
from tests.helpers.elastic_runs import NUM_STEPS
from tests.helpers.elastic_workers import hold_until
from tests.helpers.nemesis.workload import TIMEOUT_S, Notes

_GLOBAL_BATCH, _STEPS_AN_EPOCH = 16, 4
_NUM_SAMPLES, _NUM_EPOCHS = _GLOBAL_BATCH * _STEPS_AN_EPOCH, NUM_STEPS // _STEPS_AN_EPOCH
_CHECKPOINT_STEPS = 3
_RESULT = "result-"


class Counted(nn.Module):
    """A small network; and for each sample a number that falls by one when the sample counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.counts = nn.Parameter(torch.zeros(_NUM_SAMPLES))

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.layers(x), y) + self.counts[number].mean()


class Script:
    """A user's script.

    Args:
        comm: all workers.
        run_dir: for checkpoints.
        membership: see `Elastic`.
    """

    def __init__(self, comm: Communicator, run_dir: Path, membership: Membership | None) -> None:
        torch.manual_seed(0)
        self._model = Counted()
        x, y = torch.randn(_NUM_SAMPLES, 4), torch.randn(_NUM_SAMPLES, 1)
        data = TensorDataset(x, y, torch.arange(_NUM_SAMPLES))
        self._optimizer = torch.optim.SGD(
            [
                {"params": self._model.layers.parameters(), "lr": 0.1, "momentum": 0.9},
                {"params": [self._model.counts], "lr": float(_GLOBAL_BATCH)},
            ]
        )
        policy = allstep.Synchronous(compression="exact")
        self._exchange = allstep.attach(self._model, comm, policy)
        self._loader = allstep.data.loader(data, comm, global_batch=_GLOBAL_BATCH, micro_batch=4)
        state = {"optimizer": self._optimizer}
        self._elastic = allstep.Elastic(
            self._loader,
            self._exchange,
            state=state,
            run_dir=run_dir,
            every_steps=_CHECKPOINT_STEPS,
            membership=membership,
        )

    def run(self, membership: Membership | None, notes: Notes | None, held_at: int) -> bool:
        """Trains from the newest checkpoint, if there is one; whether to the end."""
        with self._elastic as elastic:
            for _ in elastic.epochs(_NUM_EPOCHS):
                for batch in allstep.steps(self._loader, self._exchange, elastic=elastic):
                    if notes is not None and batch.step == held_at:
                        hold_until(notes.goes_on)
                    for sample in batch:
                        batch.backward(self._model(*sample))
                    self._optimizer.step()
                    self._optimizer.zero_grad()
                    if notes is not None and membership is not None:
                        names = [member.name for member in membership.members]
                        notes.add(membership.generation, names, batch.step)
        return elastic.interrupted is None

    def result(self) -> dict[str, Tensor]:
        """Parameters, buffers and momenta."""
        momenta = self._optimizer.state_dict()["state"]
        found = {f"momentum {n}": own["momentum_buffer"] for n, own in momenta.items()}
        kept = {name: x for name, x in found.items() if x is not None}
        return {**self._model.state_dict(), **kept}


class OwnLoop:
    """See `Workload`."""

    name = "own loop"
    rejoins = False

    def train(self, comm: Communicator, run_dir: Path, notes: Notes, held_at: int) -> None:
        run_dir.mkdir(exist_ok=True)
        membership = loop_membership(read_launch(), TIMEOUT_S)
        script = Script(comm, run_dir, membership)
        if script.run(membership, notes, held_at):
            torch.save(script.result(), notes.folder / f"{_RESULT}{os.getpid()}")

    def undisturbed(self, run_dir: Path) -> None:
        run_dir.mkdir(exist_ok=True)
        script = Script(Communicator.single_process(), run_dir, None)
        script.run(None, None, 0)
        torch.save(script.result(), run_dir / _RESULT)

    def check(self, run_dir: Path, undisturbed: Path, notes: Path, *, was_resumed: bool) -> None:
        self.undisturbed(run_dir)  # from the newest checkpoint, which must load
        expected = torch.load(undisturbed / _RESULT)
        for file in [run_dir / _RESULT, *notes.glob(f"{_RESULT}*")]:
            result = torch.load(file)
            check_counts(result["counts"])
            assert differing_names(result, expected) == [], file.name


def check_counts(counts: Tensor) -> None:
    """Whether each sample has counted once in each epoch.

    Raises:
        AssertionError: else.
    """
    wrong = {n: -x for n, x in enumerate(counts.tolist()) if x != -_NUM_EPOCHS}
    assert not wrong, f"samples that counted not {_NUM_EPOCHS} times: {wrong}"
