"""A user's own loop over `steps` that goes on without workers that are lost, and with others."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from allstep.comm.membership import Membership
from allstep.comm.system import System
from allstep.data import GlobalBatch, MapLoader
from allstep.data.batches import GlobalBatchLoader
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.env import Launch, read_launch
from allstep.errors import UsageError, check_integer
from allstep.exchange import Exchange
from allstep.train.checkpoint import Stateful
from allstep.train.elastic import LOST, check_loop, parameters_of
from allstep.train.loop_state import BeforeStep, LoopState, refuse_second_loop
from allstep.train.worker_changes import PLACES, WorkerChanges


class Elastic:
    """Makes a loop over `steps` one that goes on when workers are lost, and when others join.

    While entered, nobody waits for a worker that has ended: the others run the step that was under
    way again, among themselves, as a whole; each sample counts once. A worker that joins gets the
    models, `state` and the position in the data from another when it enters. The bits are those of
    one worker that nobody has disturbed. All workers run the same script, started by
    `allstep launch --elastic`; a lone process, too, may use it. See [Note: elastic loops].

    Code in the loop over a batch may be run again, for other micro-batches; `batch.attempt` counts.
    Code outside of it must not talk to other workers: `batch.global_loss()` may be called.

    Args:
        loader: from `allstep.data.loader`, of a map-style data set.
        exchanges: from `allstep.attach`, with `Synchronous(compression="exact")`, as `steps` gets
            them.
        state: name -> what else the next step depends on, by its `state_dict` and
            `load_state_dict`: the optimizers, schedulers of rates, a GradScaler.
        membership: this worker's, of `loop_membership`; None to ask the launcher for it.

    Raises:
        UsageError: if an argument is of a wrong kind, if what a worker keeps for itself would be
            lost with it, if their process group is another library's and on accelerators, or if the
            launcher ends all workers when one fails.

    Example:
        >>> import torch, allstep
        >>> from torch.utils.data import TensorDataset
        >>> comm = allstep.init(device="cpu")
        >>> model = torch.nn.Linear(3, 1)
        >>> exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with allstep.Elastic(loader, exchange, state={"optimizer": optimizer}) as elastic:
        ...     for epoch in elastic.epochs(2):
        ...         for batch in allstep.steps(loader, exchange, elastic=elastic):
        ...             for x, y in batch:
        ...                 batch.backward(torch.nn.functional.mse_loss(model(x), y))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> loader.step
        6
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        *exchanges: Exchange,
        state: Mapping[str, Stateful],
        membership: Membership | None = None,
    ) -> None:
        self._state = LoopState(loader, exchanges, state)
        check_loop(loader, exchanges)
        self._loader, self._exchanges, comm = loader, exchanges, exchanges[0].comm
        self._changes: WorkerChanges | None = None
        launch = read_launch()
        if membership is None and (launch.launcher != "none" or comm.size > 1):
            membership = loop_membership(launch, comm.timeout_s)
        if membership is not None:
            self._changes = WorkerChanges(comm, membership, self._state)
        self._is_entered = self._is_in_epochs = False
        self._is_in_batch = False
        self._is_behind_batch = False  # or behind all of an epoch
        self._is_in_steps = False
        self._epoch = 0  # the present one
        self._was_over = False  # all its steps were made before the state that was loaded
        self._awaits_update: list[bool] = []  # between two steps: whether gradients are not used
        self._num_calls = 0  # in this step, or behind an epoch's last
        self._before: list[BeforeStep] = []

    def __enter__(self) -> Self:
        if self._is_entered:
            raise UsageError("An Elastic is entered once; make another one.")
        self._is_entered = True
        if self._changes is not None and self._changes.begin(self._training()):
            self._was_over = False  # as who joins begins with a step
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        changes = self._changes
        if changes is None:
            return
        if error_type is not None:
            changes.leave()
            return
        changes.enter(self._loader.step, 1)
        changes.between = self._state.position()
        changes.end()

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs that are still to come; for a worker that joins, from the others' present one.

        Each belongs to one loop over `steps`. A worker that joins in the midst of one has run what
        comes before that loop, too.

        Args:
            num_epochs: of the whole training.

        Yields:
            Epochs before this one.

        Raises:
            UsageError: outside of `with`, or if `num_epochs` is not positive.
        """
        check_integer("num_epochs", num_epochs)
        if not self._is_entered:
            raise UsageError("`epochs` is for `with Elastic(…) as elastic:`.")
        self._is_in_epochs = True
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        with preserved_random_state(self._state.comm.device):
            while (epoch := self._loader.epoch - self._was_over) < num_epochs:
                self._is_behind_batch, self._epoch = False, epoch
                self._state.seed_epoch(epoch)
                yield epoch
                self._was_over = False
        self._is_behind_batch = True

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls what talks to other workers, such as an evaluation; again if one is lost meanwhile.

        All workers call it, behind the loop over a batch, or behind that over `steps`. The function
        must not change what the next step depends on; what is cut for the workers that there are,
        such as an `Evaluator`, it makes itself.

        Args:
            function: returns plain data, as JSON has it.

        Returns:
            That.

        Raises:
            UsageError: elsewhere, where a worker that joins might come alone, or for what is no
                plain data.
        """
        if not self._is_behind_batch:
            raise UsageError(
                "`call` belongs behind the loop over a global batch, or behind that over `steps`."
            )
        changes = self._changes
        self._num_calls += 1
        if changes is None:
            return json.loads(self._found(function))
        text, step, place = None, changes.step, changes.place + 1
        changes.between = self._state.position()
        while text is None:
            changes.enter(step, place)
            try:
                changes.take_up()
                found = self._found(function)
                changes.enter(step, place + 1, is_committing=True)
                self._exchanges[0].comm.barrier()
                changes.note_committed(found)
                text = found
            except LOST:
                text = changes.text_of_others()
        return json.loads(text)

    def _found(self, function: Callable[[], Any]) -> str:
        """What it returns, as a text; each attempt draws the same random numbers."""
        device = self._state.comm.device
        place = self._loader.step, self._is_in_steps, self._num_calls
        with preserved_random_state(device):
            seed_all(derive_seed(self._loader.seed, _CALL, *place), device)
            return _plain(function())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for a file; each worker has the same.

        Taken in the loop over `steps`, what follows that loop in the epoch is run by who goes on
        from it; taken behind that loop it is not: take it at the end of the epoch's body then.

        Raises:
            UsageError: before the end of the loop over a batch, which would be left out.
        """
        if self._is_in_batch:
            raise UsageError(
                "`state_dict` comes behind the update: before the end of the loop over a global"
                " batch, who goes on from it would leave that batch out."
            )
        awaits_update = self._awaits_update or [x.awaits_update for x in self._exchanges]
        return {
            **self._state.state_dict(awaits_update),
            **self._state.position(),
            "is_over": self._is_in_steps and self._loader.epoch != self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, on any number of workers; before it is entered.

        Raises:
            UsageError: if it is entered: a worker that joins would go back, alone.
            CheckpointError: if it is of other data, another model or optimizer.
        """
        if self._is_entered:
            raise UsageError(
                "`load_state_dict` comes before `with`: a worker that joins runs it too."
            )
        self._state.load_state_dict(state)
        self._awaits_update = self._state.awaits_update(state)
        self._was_over = state["is_over"]

    # -- what `steps` asks for -------------------------------------------------------------------

    def begin_steps(self, loader: object, exchanges: tuple[Exchange, ...]) -> None:
        """Checks what `steps` was given.

        Raises:
            UsageError: if it is not the same, outside of `epochs`, or twice in one epoch.
        """
        self._state.check_given("elastic", loader, exchanges)
        if not self._is_in_epochs:
            raise UsageError(
                "`elastic` must know the epoch in which a worker joins: put `steps` in `for epoch"
                " in elastic.epochs(n):`, in `with Elastic(…) as elastic:`."
            )
        if self._loader.epoch != self._epoch and not self._was_over:
            refuse_second_loop("elastic")

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The rest of the epoch; workers are let in before each."""
        self._is_in_steps = True
        while self._loader.epoch == self._epoch:
            self._begin_step()
            self._is_in_batch = True
            yield next(self._loader.global_batches())
        self._is_in_steps, self._is_behind_batch, self._num_calls = False, True, 0

    def after_step(self) -> None:
        """The turn of a global batch is over, and so is what the user does behind it."""
        self._awaits_update = [exchange.awaits_update for exchange in self._exchanges]

    def _begin_step(self) -> None:
        self._state.refuse_left_out()
        self._is_behind_batch, self._awaits_update, self._num_calls = False, [], 0
        self._before.clear()
        changes = self._changes
        if changes is None:
            return
        changes.enter(self._loader.step, 0)
        changes.between = self._state.position()
        if changes.interrupts.requested is not None:
            signal.raise_signal(changes.interrupts.requested)
        if changes.messages.others_wait:
            changes.change()
        changes.be_ready()

    def begin_pass(self) -> GlobalBatch | None:
        """Before a batch's micro-batches are run: another cut of it where workers have changed.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`, then begin again.
        """
        changes = self._changes
        if changes is None:
            return None
        if not self._before:
            changes.enter(changes.step, changes.place + 1)
            self._before = [BeforeStep(exchange.model) for exchange in self._exchanges]
        elif changes.is_committing:
            changes.enter(changes.step, changes.place - 1)
        if not changes.has_changed:
            return None
        for before in self._before:
            before.put_back()
        changes.take_up()
        return next(self._loader.global_batches())

    def commit(self, sums: Tensor) -> Tensor:
        """The last message before an update. Collective.

        Args:
            sums: this worker's parts.

        Returns:
            Their sums over the workers.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`.
        """
        changes = self._changes
        if changes is not None:
            changes.enter(changes.step, changes.place + 1, is_committing=True)
            sums = changes.messages.commit(sums).wait()
            changes.note_committed(json.dumps(sums.tolist()))
        self._end_batch()
        return sums

    def lose_workers(self) -> Tensor | None:
        """Goes on with those who are left. Collective.

        Returns:
            What `commit` would have returned, if others have got it; None to run the step again.

        Raises:
            PeerLostError: if too few are left, or if the launcher is gone.
        """
        assert self._changes is not None
        text = self._changes.text_of_others()
        if text is None:
            return None
        self._end_batch()
        return torch.tensor(json.loads(text), dtype=torch.float64)

    def _end_batch(self) -> None:
        self._is_in_batch, self._is_behind_batch = False, True

    def _training(self) -> dict[str, object]:
        """What must be the same for workers to train together."""
        assert isinstance(self._loader, MapLoader)  # `check_loop` has seen to it
        return {
            "data and state": self._state.options(),
            "samples": self._loader.first_samples(),
            **{
                f"model {n}": {**exchange.policy.in_words, **parameters_of(exchange.model)}
                for n, exchange in enumerate(self._exchanges)
            },
            "threads": torch.get_num_threads(),
        }


def loop_membership(launch: Launch, grace_s: float, system: System | None = None) -> Membership:
    """A worker's place among those of a loop.

    Args:
        launch, grace_s, system: of `Membership`.
    """
    return Membership(
        launch,
        grace_s=grace_s,
        rejoins=False,  # in the midst of the user's code
        lets_in=lambda progress: progress % PLACES == 0,
        system=system,
    )


_CALL = 0x63616C6C  # keeps random numbers apart, of what `Elastic.call` calls


def _plain(found: object) -> str:
    """Plain data as a text.

    Raises:
        UsageError: for what is none.
    """
    try:
        return json.dumps(found)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`function` returned what is no plain data ({error}); return numbers, such as"
            " `float(tensor)`, in lists or dicts."
        ) from None
